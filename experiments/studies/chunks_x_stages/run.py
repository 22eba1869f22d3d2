"""The sweep of chunks and stages on emulated A100, and its bubbles against theory; writes results.csv.

python experiments/studies/chunks_x_stages/run.py             runs the sweep (about twelve minutes), then reads it
python experiments/studies/chunks_x_stages/run.py FOLDER      reads experiments/FOLDER, a sweep that there is
python experiments/studies/chunks_x_stages/run.py --table     prints results.csv as the README's tables
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
sys.path.insert(0, str(REPOSITORY))

from pipeline.schedule import bubble_ideal, make_schedule  # noqa: E402

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1")
COLUMNS = (
    "schedule",
    "stages",
    "chunks",
    "status",
    "step_s",
    "step_simulated_s",
    "tokens_per_s",
    "bubble",
    "bubble_simulated",
    "bubble_equal_stages",
    "lateness_ms",
)


def main() -> int:
    load, took = os.getloadavg()[0], ""
    name, begin = sys.argv[1] if len(sys.argv) > 1 else f"chunks_x_stages_{time.strftime('%H-%M-%S')}", time.monotonic()
    if len(sys.argv) == 1:
        command = [sys.executable, "train.py", "-m", "+experiment=chunks_x_stages", f"name={name}"]
        subprocess.run(command, cwd=REPOSITORY, check=True)
        took = f"\n\nThe sweep took {(time.monotonic() - begin) / 60:.1f} minutes; load average {load:.1f} before."
    rows = [read(path.parent) for path in sorted(Path(REPOSITORY, "experiments", name).glob("*/result.json"))]
    rows.sort(key=lambda row: (SCHEDULES.index(row["schedule"]), row["stages"], row["chunks"]))
    with open(HERE / "results.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    text = tables([{key: str(value) for key, value in row.items()} for row in rows]).strip() + took
    between_marks(HERE / "README.md", text)
    print(text)
    return 0


def between_marks(readme: Path, text: str) -> None:
    before, _, rest = readme.read_text().partition("<!-- results -->\n")
    _, mark, after = rest.partition("<!-- end of results -->")
    readme.write_text(f"{before}<!-- results -->\n{text}\n{mark}{after}")


def read(folder: Path) -> dict:
    """One run's row."""
    result = json.loads((folder / "result.json").read_text())
    parallel = json.loads((folder / "plan.json").read_text())["config"]["parallel"]
    layout = (parallel["schedule"], parallel["stages"], parallel["chunks"])
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]  # all alike: no warm-up
    figures = {
        key: statistics.median(step[key] for step in steps)
        for key in ("step_time_s", "tokens_per_s", "bubble_fraction")
    }
    return {
        "schedule": layout[0],
        "stages": layout[1],
        "chunks": layout[2],
        "status": result["status"],
        "step_s": round(figures["step_time_s"], 4),
        "step_simulated_s": round(result["predicted"]["step_time_s"], 4),
        "tokens_per_s": round(figures["tokens_per_s"]),
        "bubble": round(figures["bubble_fraction"], 5),
        "bubble_simulated": round(result["predicted"]["bubble_fraction"], 5),
        "bubble_equal_stages": round(bubble_ideal(make_schedule(*layout, parallel["interleave"])), 5),
        "lateness_ms": round(1e3 * result["emulation_lateness_s"], 1),
    }


def tables(rows: list[dict[str, str]]) -> str:
    """Markdown: a table a schedule, stages down and chunks across; then how far measured is from theory."""
    text = []
    for schedule in SCHEDULES:
        own = {(row["stages"], row["chunks"]): row for row in rows if row["schedule"] == schedule}
        chunks = sorted({int(key[1]) for key in own})
        text += [f"\n| {schedule} | " + " | ".join(f"{m} chunks" for m in chunks) + " |"]
        text += ["| --- |" + " --- |" * len(chunks)]
        for stages in sorted({int(key[0]) for key in own}):
            cells = [_cell(own[str(stages), str(m)]) for m in chunks]
            text.append(f"| {stages} stages | " + " | ".join(cells) + " |")
    for column, theory in (
        ("bubble_simulated", "the simulator"),
        ("bubble_equal_stages", "equal stages, free messages"),
    ):
        relative = [float(row["bubble"]) / float(row[column]) - 1 for row in rows]
        points = [100 * (float(row["bubble"]) - float(row[column])) for row in rows]
        near = sum(abs(value) <= 0.05 for value in relative)
        text.append(
            f"\nAgainst {theory}: in the median {statistics.median(relative):+.2%} of the bubble, {min(relative):+.1%} "
            f"to {max(relative):+.1%}, or {min(points):+.2f} to {max(points):+.2f} percentage points; {near} of "
            f"{len(rows)} points are within 5 % of it."
        )
    return "\n".join(text)


def _cell(row: dict[str, str]) -> str:
    measured, simulated = 100 * float(row["bubble"]), 100 * float(row["bubble_simulated"])
    return f"{measured:.1f} / {simulated:.1f} / {100 * float(row['bubble_equal_stages']):.1f} %"


if __name__ == "__main__":
    sys.exit(main())
