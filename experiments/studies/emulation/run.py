"""Emulated runs against the simulator: every schedule at 2 to 16 stages and 4 to 64 chunks; writes results.csv.

    python experiments/studies/emulation/run.py           about nine minutes on two cores, on a machine that is quiet
    python experiments/studies/emulation/run.py FOLDER    reads experiments/FOLDER, the runs of an earlier call

Both also put the table and what it says into README.md, between its two marks.
Each point is a run of train.py. Three sweeps run side by side: waiting takes little of a core.
"""

from __future__ import annotations

import csv
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
SCHEDULES = "gpipe,1f1b,interleaved_1f1b,looped_bfs,zb_h1,zb_h2,zb_v,dualpipe_v"
STEPS = 3
# a stage's forward and backward of one sequence, all of gpt_7b's on one emulated A100
MODEL_S = 0.55
COMMON = [
    "hardware=emulated_a100_80gb",
    "model=gpt_7b",
    "train.global_batch=${parallel.chunks}",  # micro-batches of one sequence
    f"train.steps={STEPS}",
    "parallel.balance=uniform",  # one block a stage at 16 ranks with two stages each
    "preflight=false",  # 64 micro-batches do not fit two A100: it is time that is looked at
    "train.trace=1",
]
# streams side by side: (schedules, stages, chunks, seconds here that a micro-batch takes on a rank)
STREAMS = [
    [(SCHEDULES, 16, "4,64", 0.2)],
    [(SCHEDULES, 2, "4,64", 0.2), ("1f1b,zb_v", 2, "16", 0.02)],
    [
        (SCHEDULES, 4, "16", 0.2),
        (SCHEDULES, 8, "32", 0.2),
        ("1f1b,zb_v", 8, "16", 0.1),
        ("1f1b,zb_v", 8, "16", 0.05),
        ("1f1b,zb_v", 8, "16", 0.02),
    ],
]
COLUMNS = (
    "schedule",
    "stages",
    "chunks",
    "microbatch_ms",
    "n",
    "step_s",
    "step_simulated_s",
    "step_error_percent",
    "bubble",
    "bubble_simulated",
    "bubble_by_wall_clock",
    "lateness_ms",
    "start_up_s",
)


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else f"emulation_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    begin, load = time.monotonic(), os.getloadavg()[0]
    if len(sys.argv) == 1:
        scripts = ["; ".join(sweep(name, *part) for part in stream) for stream in STREAMS]
        streams = [subprocess.Popen(["bash", "-c", script], cwd=REPOSITORY) for script in scripts]
        for stream in streams:
            stream.wait()
    rows = [row for folder in sorted(Path(REPOSITORY, "experiments", name).glob("*/*_*")) if (row := read(folder))]
    rows.sort(
        key=lambda row: (-nominal(row), SCHEDULES.split(",").index(row["schedule"]), row["stages"], row["chunks"])
    )
    with open(HERE / "results.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    text = f"{said(rows)}\n\n{table(rows)}"
    if len(sys.argv) == 1:
        text += (
            f"\n\n{len(rows)} points in {(time.monotonic() - begin) / 60:.1f} minutes; load average {load:.1f} before"
        )
    between_marks(HERE / "README.md", text)
    print(text)
    return 0


def said(rows: list[dict]) -> str:
    """What the table says."""
    long = [row for row in rows if nominal(row) == 200]
    errors = sorted(abs(row["step_error_percent"]) for row in long)
    points = [100 * abs(row["bubble"] - row["bubble_simulated"]) for row in long]
    wall = [100 * abs(row["bubble_by_wall_clock"] - row["bubble_simulated"]) for row in long]
    text = (
        f"At 200 ms a micro-batch and more ({len(long)} points, {STEPS} steps each) the step time is "
        f"{statistics.median(errors):.2f} % off the simulator's in the median, {errors[-1]:.2f} % at most; the bubble "
        f"at most {max(points):.2f} percentage points by the accelerators' stamps, {max(wall):.2f} by the wall clock."
    )
    for size in sorted({nominal(row) for row in rows} - {200}, reverse=True):
        own = [row["step_error_percent"] for row in rows if nominal(row) == size]
        text += f" At {size} ms: {min(own):+.1f} to {max(own):+.1f} % ({len(own)} points)."
    first = max((row["start_up_s"] for row in rows if row["stages"] == 16), default=0)
    warm = [row["start_up_s"] for row in rows if row["stages"] == 16 and row["start_up_s"] < first]
    return text + (
        f" Sixteen ranks were ready {first} s after their folder was written in the first run of a sweep (three sweeps "
        f"import at once), {statistics.median(warm):.1f} s in the others (median of {len(warm)})."
    )


def nominal(row: dict) -> int:
    """Milliseconds that a micro-batch was meant to take: stages are not quite alike."""
    return min(200, round(row["microbatch_ms"], -1))


def between_marks(readme: Path, text: str) -> None:
    before, _, rest = readme.read_text().partition("<!-- results -->\n")
    _, mark, after = rest.partition("<!-- end of results -->")
    readme.write_text(f"{before}<!-- results -->\n{text}\n{mark}{after}")


def sweep(name: str, schedules: str, stages: int, chunks: str, microbatch_s: float) -> str:
    """The command line of one sweep."""
    own = [
        f"name={name}/p{stages}_{1e3 * microbatch_s:g}ms",
        f"parallel.schedule={schedules}",
        f"parallel.stages={stages}",
        f"parallel.chunks={chunks}",
        f"emulate.time_scale={microbatch_s * stages / MODEL_S:.4g}",
    ]
    words = [sys.executable, "train.py", "-m", *COMMON, *own]
    return " ".join(f"'{word}'" for word in words)


def read(folder: Path) -> dict | None:
    """One run's row; None for a point that cannot be."""
    result = json.loads((folder / "result.json").read_text())
    if result["status"] == "skipped":
        return None
    assert result["status"] == "completed", (folder, result.get("failure"))
    plan = json.loads((folder / "plan.json").read_text())
    config, times = plan["config"], plan["durations"]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    parallel, scale = config["parallel"], config["emulate"]["time_scale"]
    step, simulated = statistics.median(r["step_time_s"] for r in records), result["predicted"]["step_time_s"]
    busy = sum(map(sum, (times["forward"], times["backward_input"], times["backward_weight"]))) / parallel["stages"]
    flush = step - times["reduction_s"] - times["optimizer_s"]
    return {
        "schedule": parallel["schedule"],
        "stages": parallel["stages"],
        "chunks": parallel["chunks"],
        "microbatch_ms": round(1e3 * busy * scale),
        "n": len(records),
        "step_s": round(step, 4),
        "step_simulated_s": round(simulated, 4),
        "step_error_percent": round(100 * (step / simulated - 1), 3),
        "bubble": round(statistics.median(r["bubble_fraction"] for r in records), 5),
        "bubble_simulated": round(result["predicted"]["bubble_fraction"], 5),
        "bubble_by_wall_clock": round(1 - parallel["chunks"] * busy / flush, 5),
        "lateness_ms": round(1e3 * result["emulation_lateness_s"], 1),
        "start_up_s": round(result["start_up_s"], 1),
    }


def table(rows: list[dict]) -> str:
    """Markdown."""
    shown = [column for column in COLUMNS if column != "start_up_s"]
    lines = [" | ".join(shown), " | ".join("---" for _ in shown)]
    lines += [" | ".join(str(row[column]) for column in shown) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
