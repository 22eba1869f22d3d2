"""Step time of balance=uniform, auto and time on a model with a large head: runs of train.py in turn, round by round.

    python benchmarks/balance/effect.py [--rounds 5] [override ...]

Prints each cut's median step time with its spread, and the gain over uniform beside the predicted one (the simulated
flush with the measured profile). Writes effect.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from conf.schema import from_dict  # noqa: E402
from models.describe import describe  # noqa: E402
from pipeline.optimum import bounds  # noqa: E402
from pipeline.schedule import make_schedule  # noqa: E402
from pipeline.simulate import simulate  # noqa: E402
from training.measure import find_or_measure  # noqa: E402

BALANCES = ("uniform", "auto", "time")
OVERRIDES = [
    "model.vocabulary=8192",
    "parallel=pp2",
    "train.steps=10",
    "train.global_batch=32",
    "train.sequence=128",
    "train.validate_every=0",
    "train.validate_sequences=2",
]


def run(balance: str, overrides: list[str], folder: Path) -> tuple[dict, dict]:
    """result.json and resolved.json of one run."""
    command = [sys.executable, "train.py", f"hydra.run.dir={folder}", f"parallel.balance={balance}", *overrides]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return json.loads((folder / "result.json").read_text()), json.loads((folder / "resolved.json").read_text())


def predicted_flush(config, profile) -> float:
    """Seconds of a flush, simulated with the measured F and B of each layer."""
    seconds = {name: (kind.forward_s, kind.backward_s) for kind in profile.kinds for name in kind.layers}
    layers = [seconds[spec.name] for spec in describe(config.model)]
    ends = bounds(config.parallel.balance)
    pieces = [layers[first:end] for first, end in zip(ends, ends[1:], strict=False)]
    schedule = make_schedule(config.parallel.schedule, config.parallel.stages, config.parallel.chunks)
    forward, backward = ([sum(layer[i] for layer in piece) for piece in pieces] for i in (0, 1))
    return simulate(schedule, forward=forward, backward=backward).makespan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    overrides = OVERRIDES + arguments.overrides
    steps: dict[str, list[float]] = {balance: [] for balance in BALANCES}
    flush, lists, loads = {}, {}, []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            for balance in BALANCES[number % 3 :] + BALANCES[: number % 3]:  # each is first, second, third in turn
                loads.append(os.getloadavg()[0])
                result, resolved = run(balance, overrides, Path(folder, f"{number}_{balance}"))
                steps[balance].append(result["step_time_s"])
                config = from_dict(resolved)
                lists[balance] = config.parallel.balance
                flush[balance] = predicted_flush(config, find_or_measure(config))
                print(f"round {number + 1} {balance:8} {result['step_time_s']:.3f} s", flush=True)
    rows = {}
    for balance in BALANCES:
        values = steps[balance]
        paired = [1 - own / other for own, other in zip(values, steps["uniform"], strict=True)]
        rows[balance] = {
            "balance": lists[balance],
            "step_s": values,
            "median_s": statistics.median(values),
            "range_s": [min(values), max(values)],
            "gain": statistics.median(paired),
            "gain_range": [min(paired), max(paired)],
            "predicted_gain": 1 - flush[balance] / flush["uniform"],
        }
        row = rows[balance]
        print(
            f"{balance:8} {row['balance']}  median {row['median_s']:.3f} s ({min(values):.3f} to {max(values):.3f}), "
            f"gain {row['gain']:.1%} ({min(paired):.1%} to {max(paired):.1%}), predicted {row['predicted_gain']:.1%}"
        )
    print(f"load average before the runs: median {statistics.median(loads):.1f}, largest {max(loads):.1f}")
    content = {"overrides": overrides, "rounds": arguments.rounds, "load": loads, "cuts": rows}
    (HERE / "effect.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
