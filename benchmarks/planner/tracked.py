"""Bytes of all tensors of every rank at its peak, predicted beside torch's MemTracker: gpt_124m, over schedules and
activation checkpointing.

    python benchmarks/planner/tracked.py       rewrites tracked.csv; twenty minutes on two busy cores
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent.parent / "tests")]

from memory import CHECKPOINTS, SCHEDULES, TABLE

from conf.schema import RootConfig, from_dict
from planning.predict import ranks_memory
from planning.step import Layout
from ranks import run_ranks


def main() -> None:
    from tracking import tracked

    with TABLE.open(newline="") as file:
        configs = {row["case"]: from_dict(json.loads(row["config"])) for row in csv.DictReader(file)}
    errors = []
    with (HERE / "tracked.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["schedule", "checkpoint", "rank", "predicted_bytes", "tracked_bytes"])
        for schedule, checkpoint in [(s, c) for s in SCHEDULES for c in CHECKPOINTS]:
            config = configs[f"gpt_124m parallel.schedule={schedule} parallel.checkpoint={checkpoint}"]
            counted = [peak for (peak,) in run_ranks(tracked, 2, [config], timeout_s=600)]
            for rank, (ours, theirs) in enumerate(zip(_tensors(config), counted, strict=True)):
                writer.writerow([schedule, checkpoint, rank, ours, theirs])
                errors.append(ours / theirs - 1)
            file.flush()
            print(f"{schedule:18} {checkpoint:12} " + "  ".join(f"{error:+.1%}" for error in errors[-2:]), flush=True)
    sizes = [abs(error) for error in errors]
    print(f"\n{len(errors)} ranks: median |error| {statistics.median(sizes):.1%}, worst {max(errors, key=abs):+.1%}")


def _tensors(config: RootConfig) -> list[int]:
    ranks = ranks_memory(config, Layout.of(config))
    return [parts["total"] - parts["allocator"] - parts["runtime"] for parts in ranks]


if __name__ == "__main__":
    main()
