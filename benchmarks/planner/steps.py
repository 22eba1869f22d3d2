"""Step time of small models on this machine's cores, predicted beside measured; calibrated anew at the start.

    python benchmarks/planner/steps.py [RUNS]      3 runs of each case in turn: about three minutes on two quiet cores

The machine has to be quiet: the plan assumes that nothing else runs on it, and says nothing about a shared one.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent
sys.path.insert(0, str(REPOSITORY))

from planning.calibrate import CACHE  # noqa: E402

COMMON = "data=synthetic train.checkpoint_every=0 train.validate_every=0 train.validate_sequences=2".split()
CASES = {
    "gpt_tiny single": "model=gpt_tiny parallel=single train.steps=25",
    "gpt_tiny pp2": "model=gpt_tiny parallel=pp2 train.steps=25",
    "gpt_tiny pp2, gpipe": "model=gpt_tiny parallel=pp2 parallel.schedule=gpipe train.steps=25",
    "gpt_124m pp2": "model=gpt_124m parallel=pp2 train.steps=4",
}


def run(overrides: str) -> tuple[float, float]:
    """Predicted and measured seconds of a step (median after the first ones) in one run of train.py."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", *overrides.split(), *COMMON, f"hydra.run.dir={folder}/run"]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
        result = json.loads(Path(folder, "run", "result.json").read_text())
    return result["predicted"]["step_time_s"], result["step_time_s"]


def main(runs: int) -> None:
    CACHE.unlink(missing_ok=True)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    for _ in range(runs):
        for name, overrides in CASES.items():
            found[name].append(run(overrides))
            predicted, measured = found[name][-1]
            print(f"{name:22} {predicted:.3f} s predicted, {measured:.3f} s measured", flush=True)
    print(f"\n{'n = ' + str(runs):22} predicted   measured (least to most)     error of the medians")
    for name, pairs in found.items():
        predicted, times = pairs[0][0], sorted(measured for _, measured in pairs)
        middle = statistics.median(times)
        spread = f"({times[0]:.3f} to {times[-1]:.3f})"
        print(f"{name:22} {predicted:7.3f} s {middle:8.3f} s {spread:18} {predicted / middle - 1:+8.1%}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
