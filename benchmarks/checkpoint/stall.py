"""How long a save holds training up: in the background against at once, alternating in one process.

    python benchmarks/checkpoint/stall.py --model gpt_124m --saves 5

Prints each save, then a JSON object: medians in seconds, their ratio, the time of a step with and without a save going
on beside it, bytes on disk against parameters and states.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402

from conf.resolve import resolve  # noqa: E402
from conf.schema import register  # noqa: E402
from planning.balance import resolved_balance  # noqa: E402
from training import manifest  # noqa: E402
from training.checkpoint import Checkpoints, Position  # noqa: E402
from training.data import prepare  # noqa: E402
from training.loop import Trainer  # noqa: E402
from training.ranks import Ranks  # noqa: E402


def make_trainer(model: str, cache: Path) -> Trainer:
    """One process, small steps: what is measured is the save."""
    register()
    overrides = [
        f"model={model}",
        "parallel=single",
        "parallel.chunks=1",
        "data=synthetic",
        f"data.cache={cache}",
        "train.sequence=64",
        "train.global_batch=1",
        "train.steps=1000",
        "train.keep_checkpoints=1",
        "hardware=cpu",
    ]
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        config = resolve(OmegaConf.to_object(compose("config", overrides)))
    config = resolved_balance(config, None)[0]
    corpus = prepare(config.data, sequence=config.train.sequence)
    return Trainer(config, Ranks(0, 1, 0, torch.device("cpu")), corpus, lambda: False)


def measure(trainer: Trainer, run_dir: Path, saves: int) -> dict:
    checkpoints = Checkpoints(trainer, run_dir)
    done = 0

    def step() -> float:
        nonlocal done
        begin = time.perf_counter()
        trainer.step(done)
        done += 1
        return time.perf_counter() - begin

    step()
    stalls: dict[bool, list[float]] = {True: [], False: []}
    beside, alone, wrote = [], [], []
    for _ in range(saves + 1):
        for wait in (True, False):
            begin = time.perf_counter()
            checkpoints.save(Position(done), wait=wait)
            stalls[wait].append(checkpoints.stalls[-1])
            print(f"{'at once' if wait else 'in the background'}: {checkpoints.stalls[-1]:.3f} s", flush=True)
            while not wait and checkpoints._future is not None:
                beside.append(step())
                checkpoints.poll()
            wrote += [] if wait else [time.perf_counter() - begin]
            alone += [step() for _ in range(2)]
    parameters = sum(p.numel() for name, p in trainer.engine.parameters.items() if name not in trainer.engine.tied)
    folder = manifest.complete(run_dir)[0]
    size = sum(path.stat().st_size for path in folder.iterdir())
    now, background = (statistics.median(stalls[wait][1:]) for wait in (True, False))  # the first makes the buffers
    return {
        "saves_each": saves,
        "at_once_s": now,
        "in_background_s": background,
        "first_in_background_s": stalls[False][0],
        "ratio": now / background,
        "written_after_s": statistics.median(wrote),
        "step_alone_s": statistics.median(alone),
        "step_beside_a_save_s": statistics.median(beside),
        "parameters": parameters,
        "bytes_on_disk": size,
        "bytes_a_parameter": size / parameters,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt_124m")
    parser.add_argument("--saves", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(arguments.model, Path(folder))
        print(json.dumps(measure(trainer, Path(folder, "run"), arguments.saves)))


if __name__ == "__main__":
    main()
