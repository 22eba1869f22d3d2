"""The same model and global batch as one process, two stages, two data ranks, two tensor ranks: step time and memory.

    python benchmarks/layouts/run.py [--rounds 5] [override ...]

Runs of train.py in turn, round by round. Prints each layout's median step time with its spread and each rank's peak
memory, beside what was predicted, and writes results.csv beside this file.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LAYOUTS = {
    "single": ["parallel=single", "parallel.chunks=8"],
    "pp2": ["parallel=pp2"],
    "dp2": ["parallel=dp4", "parallel.data=2", "parallel.chunks=4"],
    "fsdp2": ["parallel=fsdp4", "parallel.data=2", "parallel.chunks=4"],
    "tp2": ["parallel=tp2", "parallel.chunks=8"],
}
OVERRIDES = ["train.steps=16", "train.validate_every=0", "train.validate_sequences=2", "train.checkpoint_every=0"]
MIB = 2**20


def run(layout: str, overrides: list[str], folder: Path) -> dict:
    """result.json of one run."""
    command = [sys.executable, "train.py", f"hydra.run.dir={folder}", *LAYOUTS[layout], *OVERRIDES, *overrides]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return json.loads((folder / "result.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    found: dict[str, list[dict]] = {layout: [] for layout in LAYOUTS}
    names = list(LAYOUTS)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            for layout in names[number % len(names) :] + names[: number % len(names)]:  # each is first in turn
                result = run(layout, arguments.overrides, Path(folder, f"{number}_{layout}"))
                found[layout].append(result)
                step_s, load = result["step_time_s"], os.getloadavg()[0]
                print(f"round {number + 1} {layout:7} {step_s:.3f} s (load {load:.1f})", flush=True)
    rows = [
        row(layout, results, statistics.median(r["step_time_s"] for r in found["single"]))
        for layout, results in found.items()
    ]
    with open(HERE / "results.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for line in rows:
        print("  ".join(f"{key} {value}" for key, value in line.items()))


def row(layout: str, results: list[dict], single_s: float) -> dict:
    """Medians over the runs; memory of each rank in MiB."""
    times = sorted(result["step_time_s"] for result in results)
    median = statistics.median(times)
    memory = [statistics.median(rank) / MIB for rank in zip(*(r["peak_memory_bytes"] for r in results), strict=True)]
    predicted = results[0]["predicted"]
    return {
        "layout": layout,
        "n": len(times),
        "step_time_s": f"{median:.4f}",
        "least": f"{times[0]:.4f}",
        "most": f"{times[-1]:.4f}",
        "of_single": f"{median / single_s:.3f}",
        "predicted_step_time_s": f"{predicted['step_time_s']:.4f}",
        "step_time_error": f"{predicted['step_time_s'] / median - 1:+.3f}",
        "peak_memory_mib": " ".join(f"{rank:.0f}" for rank in memory),
        "predicted_memory_mib": " ".join(f"{rank / MIB:.0f}" for rank in results[0]["predicted"]["peak_memory_bytes"]),
        "loss": f"{results[0]['loss']:.4f}",
    }


if __name__ == "__main__":
    main()
