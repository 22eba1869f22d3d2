"""Schedules as data: made by name, checked, and asked for their bubble and the micro-batches they hold. No torch.

`python -m pipeline.schedule 1f1b stages=4 chunks=8` draws one, `python -m pipeline.schedule` lists them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable

from pipeline import own, published
from pipeline.action import KINDS, Action, Impossible, Schedule
from pipeline.check import check, feasible_order

__all__ = [
    "KINDS",
    "SCHEDULES",
    "Action",
    "Impossible",
    "Schedule",
    "bubble_ideal",
    "check",
    "feasible_order",
    "held_microbatches",
    "make_schedule",
]

# A new schedule is one function and one line here; the default of its `interleave` is what interleave=null means.
SCHEDULES: dict[str, Callable[..., list[list[Action]]]] = {
    "gpipe": published.gpipe,
    "1f1b": published.one_f_one_b,
    "interleaved_1f1b": published.interleaved_1f1b,
    "looped_bfs": published.looped_bfs,
    "zb_h1": published.zb_h1,
    "zb_h2": published.zb_h2,
    "zb_v": published.zb_v,
    "dualpipe_v": published.dualpipe_v,
}


def make_schedule(name: str, stages: int, chunks: int, interleave: int | None = None) -> Schedule:
    """Builds and checks a schedule.

    name: one of SCHEDULES, or a user's own: `path/to/file.py:function`, or a text file with the grid (pipeline/own.py).
    stages: pipeline ranks. chunks: micro-batches. interleave: model stages a rank; None = the schedule's own.
    ValueError for an unknown name or a faulty schedule (pipeline/check.py); Impossible, which is a ValueError, for
    numbers that do not fit the schedule.
    """
    for key, value in (("stages", stages), ("chunks", chunks), ("interleave", interleave)):
        if value is not None and value < 1:
            raise ValueError(f"{key} must be at least 1, not {value}")
    if name in SCHEDULES:
        if interleave is None:
            interleave = inspect.signature(SCHEDULES[name]).parameters["interleave"].default
        try:
            actions = SCHEDULES[name](stages, chunks, interleave)
        except ValueError as error:
            raise Impossible(str(error)) from None
    elif own.is_own(name):
        actions, interleave = own.load(name, stages, chunks, interleave)
    else:
        known = ", ".join(SCHEDULES)
        raise ValueError(f"unknown schedule {name!r}: known are {known}, path/to/file.py:function, path/to/grid.txt")
    schedule = Schedule(name, stages, chunks, interleave, actions)
    check(schedule)
    return schedule


def held_microbatches(schedule: Schedule) -> list[int]:
    """The most forwards, one a (model stage, micro-batch), whose activations a rank holds at once; one entry a rank.

    Held from F until B, or until W where the backward is split. With interleave v each is 1/v of the rank's layers.
    """
    peaks = []
    for row in schedule.actions:
        held = peak = 0
        for _, kind, _ in row:
            if kind == "F":
                held += 1
                if held > peak:
                    peak = held
            elif kind != "I":
                held -= 1
        peaks.append(peak)
    return peaks


def bubble_ideal(schedule: Schedule) -> float:
    """bubble_fraction when all stages take F = 1, B = 2, I = W = 1 and transfers nothing: mean over ranks of idle /
    makespan. (p-1)/(m+p-1) for gpipe and 1f1b; the closed forms of the others are in pipeline/published.py."""
    last_stage = schedule.num_stages - 1
    free = [0] * schedule.stages  # when each rank has finished its last action
    forward: dict[tuple[int, int], int] = {}  # (stage, micro-batch) -> end of its F
    backward: dict[tuple[int, int], int] = {}  # the same of its B or I
    rows = [iter(row) for row in schedule.actions]
    for rank in feasible_order(schedule):
        stage, kind, microbatch = next(rows[rank])
        if kind == "F":
            ready = forward[stage - 1, microbatch] if stage > 0 else 0
            free[rank] = forward[stage, microbatch] = max(free[rank], ready) + 1
        elif kind == "W":
            free[rank] += 1
        else:
            ready = backward[stage + 1, microbatch] if stage < last_stage else 0
            free[rank] = backward[stage, microbatch] = max(free[rank], ready) + (2 if kind == "B" else 1)
    whole = schedule.stages * max(free)
    return (whole - 3 * schedule.chunks * schedule.num_stages) / whole


if __name__ == "__main__":
    from pipeline.draw import main  # draws, and so stands to the right of this file in the import order

    sys.exit(main(sys.argv[1:]))
