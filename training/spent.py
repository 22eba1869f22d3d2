"""Where a run's time went, from its result.json, for the console: the parts of a step and the bubble. No torch."""

from __future__ import annotations

from statistics import mean
from typing import Any

from planning.report import align, duration

LABELS = {
    "compute_s": "compute",
    "schedule_idle_s": "schedule idle",
    "imbalance_idle_s": "imbalance idle",
    "exposed_communication_s": "exposed communication",
    "host_gap_s": "host gap",
    "reduction_s": "reduction",
    "optimizer_s": "optimizer",
}
BUBBLES = {
    "bubble_fraction": "measured",
    "bubble_fraction_ideal": "ideal",
    "bubble_fraction_simulated": "simulated with the measured durations",
}


def typical(steps: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """`time` and `where` of a run, from several steps' records: the mean over the half of the steps whose length is
    nearest to the median. A mean, so that the parts still sum to the step; of steps with as many ranks as the last."""
    ranks = len(steps[-1]["time"]["compute_s"])
    alike = [step for step in steps if len(step["time"]["compute_s"]) == ranks]
    alike.sort(key=lambda step: sum(map(sum, step["time"].values())))
    cut = len(alike) // 4
    middle = alike[cut : len(alike) - cut]
    return {
        key: {name: [mean(step[key][name][r] for step in middle) for r in range(ranks)] for name in steps[-1][key]}
        for key in ("time", "where")
        if key in steps[-1]
    }


def table(result: dict[str, Any]) -> str:
    """Parts of a step, means over ranks, and the bubble; empty where nothing was measured but a note is to be made."""
    note = result.get("bubble_note")
    if "time" not in result:
        return f"where the time went: {note}" if note else ""
    time = result["time"]
    # rank 0's pipeline alone is timed, the memory of all ranks is known: data and tensor ranks lie between its ranks
    apart = len(result.get("peak_memory_bytes", [])) // len(time["compute_s"])
    names = [
        f"rank {r * apart} (pipeline rank {r})" if apart > 1 else f"rank {r}" for r in range(len(time["compute_s"]))
    ]
    step = mean(map(sum, zip(*time.values(), strict=True)))
    rows = [["where a step's time went", duration(step), "", ""]]
    for name, label in LABELS.items():
        part = mean(time[name])
        seen = result.get("where", {}).get(name)
        said = _spread(time[name], step, names) if seen is None else _seen(seen, step, names)
        rows.append([f"  {label}", duration(part), f"{part / step:.1%}", said])
    lines = _aligned(rows)
    shown = [f"{result[key]:.3f} {name}" for key, name in BUBBLES.items() if key in result]
    if "bubble_fraction" in result.get("predicted", {}):
        shown.append(f"{result['predicted']['bubble_fraction']:.3f} predicted")
    lines.append(f"bubble_fraction: {', '.join(shown)}")
    return "\n".join([*lines, *([f"note: {note}"] if note else [])])


def _spread(ranks: list[float], step: float, names: list[str]) -> str:
    """Which ranks have least and most, where that is more than 1 % of a step."""
    least, most = min(ranks), max(ranks)
    if most - least < 0.01 * step:
        return ""
    return f"{duration(least)} on {names[ranks.index(least)]} ... {duration(most)} on {names[ranks.index(most)]}"


def _seen(ranks: list[float], step: float, names: list[str]) -> str:
    """Which rank saw most of what costs all of them the same, where that is more than 1 % of a step."""
    most = max(ranks)
    if len(ranks) == 1 or most < 0.01 * step:
        return ""
    return f"most of it seen by {names[ranks.index(most)]}: {duration(most)}"


def _aligned(rows: list[list[str]]) -> list[str]:
    """Three columns of figures, and what is said of them flush left."""
    figures = align([row[:3] for row in rows], left=1).split("\n")
    width = max(map(len, figures))
    return [f"{line:<{width}}  {row[3]}".rstrip() for line, row in zip(figures, rows, strict=True)]
