"""What runs say together: series over chunks and stages, where each schedule wins, equal loss, micro-batch sizes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from comparing.runs import Run, number
from comparing.table import differing, follows, gib, short_names, text_of

GRID = ("parallel.stages", "parallel.chunks")  # the axes of the heat maps
REPEATED = ("train.seed", "name")  # runs that differ in nothing else are repetitions: their median is shown
# who competes: everything else alike, these are what is compared
COMPETING = ("parallel.engine", "parallel.schedule", "parallel.interleave", "parallel.checkpoint")


def elapsed(run: Run) -> list[float]:
    """Seconds of training at each of `run.steps`: as written, or added up from step times in older runs."""
    seconds, last, total = [], 0, 0.0
    for step in run.steps:
        total += (step["step"] - last) * (number(step.get("step_time_s")) or 0.0)
        last = step["step"]
        seconds.append(number(step.get("elapsed_s")) or total)
    return seconds


def tokens(run: Run) -> list[int]:
    """Tokens trained on at each of `run.steps`."""
    return [int(number(step.get("consumed_tokens")) or 0) for step in run.steps]


# --- groups of runs ---


def label(run: Run, keys: Sequence[str]) -> str:
    """The values of these keys, e.g. "1f1b stages=4": what a schedule, engine or model is called needs no key."""
    names = short_names(keys)
    plain = ("parallel.schedule", "parallel.engine", "model.name")
    values = [(key, text_of(run.config.get(key))) for key in keys]
    return " ".join(value if key in plain else f"{names[key]}={value}" for key, value in values)


def group_by(runs: Iterable[Run], key: Callable[[Run], Hashable]) -> dict[Any, list[Run]]:
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def telling(runs: Sequence[Run], without: Sequence[str]) -> list[str]:
    """The differing keys but `without` and those that follow from another: interleave where the schedule says it."""
    keys = [key for key in differing(runs) if key not in without]
    first = ("parallel.schedule", "parallel.engine", "model.name")
    kept: list[str] = []
    for key in sorted(keys, key=lambda key: key not in first):
        if not any(follows(runs, key, other) for other in kept):
            kept.append(key)
    return kept


def series(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ in chunks, stages and repetition only, by a label of what tells them from the others."""
    keys = telling(runs, (*GRID, *REPEATED))
    return group_by(runs, lambda run: label(run, keys) if keys else "all runs")


def typical(runs: Sequence[Run], key: str) -> float | None:
    """The median of a figure over repetitions."""
    values = [value for value in (number(run.figures.get(key)) for run in runs) if value is not None]
    return statistics.median(values) if values else None


# --- the loss ---


def smooth_loss(run: Run) -> list[float]:
    """The lowest loss so far, each a mean over a twentieth of the curve's points, one a point of `run.steps`."""
    losses = [number(step.get("loss")) for step in run.steps]
    width = max(1, len(losses) // 20)
    best, found = math.inf, []
    for i in range(len(losses)):
        window = [loss for loss in losses[max(0, i + 1 - width) : i + 1] if loss is not None]
        if window:
            best = min(best, sum(window) / len(window))
        found.append(best)
    return found


def time_to(loss: float, seconds: Sequence[float], smooth: Sequence[float]) -> float | None:
    """Seconds of training until the smoothed loss is `loss` or less, but for rounding; None where it never is."""
    return next((s for s, reached in zip(seconds, smooth, strict=True) if reached <= loss * (1 + 1e-6)), None)


# --- the crossover ---


@dataclass
class Contest:
    """The schedules that ran the same work with the same stages and chunks; rows of crossover.csv."""

    work: str  # what tells this work from the others
    stages: int
    chunks: int
    entries: list[dict]  # one a schedule, the fastest first

    @property
    def gain(self) -> float | None:
        """How much faster the fastest is than the next, as a part of the next one's tokens/s."""
        return self.entries[0]["gain"] if len(self.entries) > 1 else None


def contests(runs: Sequence[Run]) -> list[Contest]:
    """For each work, stages and chunks that at least two schedules ran: who wins, and by how much against theory.

    Each entry's `gain` and `theory_…` compare the winner with it (the first entry: with the second): tokens/s, the
    ideal bubbles' (1 - bubble) and the planner's tokens/s. `time_to_loss_s` is each one's time to the highest of their
    final losses: the loss that all of them reach.
    """
    good = [run for run in runs if run.ended_well]
    keys = telling(good, (*GRID, *REPEATED, *COMPETING))
    who = [key for key in telling(good, ()) if key in COMPETING] or ["parallel.schedule"]
    found = []
    same = group_by(good, lambda run: (label(run, keys) if keys else "", *(run.config.get(key) for key in GRID)))
    for (work, stages, chunks), group in same.items():
        names = group_by(group, lambda run: label(run, who))
        if len(names) < 2 or not isinstance(stages, int) or not isinstance(chunks, int):
            continue
        found.append(Contest(work, stages, chunks, _entries(names)))
    return sorted(found, key=lambda contest: (contest.work, contest.stages, contest.chunks))


def _entries(names: dict[str, list[Run]]) -> list[dict]:
    smooth = {run.path: smooth_loss(run) for group in names.values() for run in group if run.steps}
    target = max((losses[-1] for losses in smooth.values() if losses[-1] < math.inf), default=None)  # emulated: no loss
    entries = []
    for name, group in names.items():
        ideal = typical(group, "bubble_fraction_ideal")
        reached = [run for run in group if target is not None and run.path in smooth]
        times = [time_to(target, elapsed(run), smooth[run.path]) for run in reached]
        times = [seconds for seconds in times if seconds is not None]
        entries.append(
            {
                "schedule": name,
                "runs": len(group),
                "tokens_per_s": typical(group, "tokens_per_s"),
                "bubble_fraction": typical(group, "bubble_fraction"),
                "bubble_fraction_ideal": ideal,
                "predicted_tokens_per_s": typical(group, "predicted.tokens_per_s"),
                "loss": target,
                "time_to_loss_s": statistics.median(times) if times else None,
            }
        )
    entries.sort(key=lambda entry: -entry["tokens_per_s"])
    for index, entry in enumerate(entries):
        first, other = entries[0], entries[1] if index == 0 else entry
        entry["gain"] = first["tokens_per_s"] / other["tokens_per_s"] - 1
        entry["theory_gain"] = _ratio(_busy(first), _busy(other))
        entry["predicted_gain"] = _ratio(first["predicted_tokens_per_s"], other["predicted_tokens_per_s"])
        entry["gain_at_equal_loss"] = _ratio(other["time_to_loss_s"], first["time_to_loss_s"])
    return entries


def _busy(entry: dict) -> float | None:
    ideal = entry["bubble_fraction_ideal"]
    return None if ideal is None else 1 - ideal


def _ratio(first: float | None, other: float | None) -> float | None:
    return first / other - 1 if first and other else None


def contest_rows(found: Sequence[Contest]) -> list[dict]:
    """crossover.csv: a row a schedule of each contest, the winner first."""
    return [
        {"work": c.work, "stages": c.stages, "chunks": c.chunks, "place": place, **entry}
        for c in found
        for place, entry in enumerate(c.entries, 1)
    ]


# --- micro-batches ---


def show_memory(row: dict) -> str:
    """A row's peak memory; the planner's where none was measured: emulated runs hold nothing."""
    measured, predicted = row["peak_memory_bytes"], row["predicted_peak_memory_bytes"]
    if measured is not None:
        return gib(measured)
    return "" if predicted is None else f"{gib(predicted)} planned"


def microbatch_rows(runs: Sequence[Run]) -> list[dict]:
    """The tuning table: a row a micro-batch size (of each series), with the rule chunks >= 4 x stages held against it.

    Empty when no series has two sizes. A run that did not fit is a row with its status.
    """
    sized = [run for run in runs if run.micro_batch() and isinstance(run.config.get("parallel.stages"), int)]
    keys = telling(sized, ("parallel.chunks", *REPEATED))
    rows = []
    groups = group_by(
        sized, lambda run: (label(run, keys) if keys else "", run.micro_batch(), run.config["parallel.chunks"])
    )
    for (name, size, chunks), group in groups.items():
        good = [run for run in group if run.ended_well]
        stages = group[0].config["parallel.stages"]
        row = {"series": name, "stages": stages, "micro_batch": size, "chunks": chunks}
        row |= {"rule": chunks >= 4 * stages, "status": (good or group)[0].status, "runs": len(good)}
        for key in ("tokens_per_s", "step_time_s", "peak_memory_bytes", "bubble_fraction", "bubble_fraction_ideal"):
            row[key] = typical(good, key)
        for key in ("tokens_per_s", "peak_memory_bytes"):
            row[f"predicted_{key}"] = typical(group, f"predicted.{key}")
        rows.append(row)
    best: dict[str, float] = {}
    for row in rows:
        best[row["series"]] = max(best.get(row["series"], 0.0), row["tokens_per_s"] or 0.0)
    for row in rows:
        row["of_best"] = row["tokens_per_s"] / best[row["series"]] if row["tokens_per_s"] else None
    sizes = group_by(rows, lambda row: row["series"])
    rows = [row for row in rows if len({other["micro_batch"] for other in sizes[row["series"]]}) > 1]
    return sorted(rows, key=lambda row: (row["series"], row["stages"], row["micro_batch"]))
