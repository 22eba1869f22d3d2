"""Peak memory of every rank, predicted beside measured: gpt_124m over schedules and activation checkpointing on CPU.

    python benchmarks/planner/memory.py --measure    about 20 s a run on two quiet cores; rewrites memory.csv
    python benchmarks/planner/memory.py              memory.csv beside what the planner says now

Measured is what train.py reports: the growth of a rank's resident memory since it was ready to build its model.
"""

from __future__ import annotations

import csv
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
sys.path.insert(0, str(REPOSITORY))

from conf.schema import from_dict  # noqa: E402
from planning.predict import predict  # noqa: E402

TABLE = HERE / "memory.csv"
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_v", "dualpipe_v")
CHECKPOINTS = ("never", "except_last", "always")
# one optimizer step allocates everything but what is left from the step before: three are enough
COMMON = (
    "data=synthetic train.steps=3 train.checkpoint_every=0 train.validate_every=0 train.validate_sequences=2 "
    "train.max_minutes=0"
).split()
CASES = [
    ("gpt_124m", f"parallel.schedule={schedule}", f"parallel.checkpoint={checkpoint}")
    for schedule, checkpoint in itertools.product(SCHEDULES, CHECKPOINTS)
]
CASES += [("gpt_124m", "parallel=single"), ("gpt_124m", "parallel=single", "parallel.checkpoint=always")]
CASES += [("gpt_124m", "parallel=pp4"), ("gpt_124m", "train.sequence=256"), ("gpt_124m", "train.global_batch=16")]
CASES += [("gpt_tiny", "parallel=single"), ("gpt_tiny", "parallel=pp2"), ("gpt_tiny", "parallel=pp4")]


def measure(case: tuple[str, ...], folder: Path) -> tuple[dict, list[int]]:
    """The resolved configuration of one run of train.py, and the measured bytes of each rank."""
    model, *overrides = case
    command = [sys.executable, str(REPOSITORY / "train.py"), f"model={model}", *overrides, *COMMON]
    run = subprocess.run([*command, f"hydra.run.dir={folder}"], cwd=REPOSITORY, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)}\n{run.stderr[-2000:]}")
    result = json.loads((folder / "result.json").read_text())
    return json.loads((folder / "resolved.json").read_text()), result["peak_memory_bytes"]


def measure_all() -> None:
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["case", "measured_bytes", "config"])
        for case in CASES:
            with tempfile.TemporaryDirectory() as folder:
                config, measured = measure(case, Path(folder, "run"))
            kept = {key: config[key] for key in ("model", "parallel", "optimizer", "hardware", "data", "train")}
            kept["hardware"] = config["hardware"] | {"sources": {}}
            writer.writerow([" ".join(case), json.dumps(measured), json.dumps(kept)])
            file.flush()
            print(f"{' '.join(case):70} {[round(value / 2**20) for value in measured]} MiB", flush=True)


def table() -> None:
    sizes: list[float] = []
    with TABLE.open(newline="") as file:
        for row in csv.DictReader(file):
            predicted = predict(from_dict(json.loads(row["config"])))["peak_memory_bytes"]
            cells = []
            for ours, theirs in zip(predicted, json.loads(row["measured_bytes"]), strict=True):
                sizes.append(abs(ours / theirs - 1))
                cells.append(f"{ours / 2**20:5,.0f} / {theirs / 2**20:5,.0f} MiB {ours / theirs - 1:+6.1%}")
            print(f"{row['case']:66} {'  '.join(cells)}")
    print(
        f"\n{len(sizes)} ranks, predicted / measured: median |error| {statistics.median(sizes):.1%}, "
        f"mean {statistics.mean(sizes):.1%}, worst {max(sizes):.1%}"
    )


if __name__ == "__main__":
    if "--measure" in sys.argv[1:]:
        measure_all()
    table()
