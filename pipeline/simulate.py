"""A schedule with durations: when each action runs, the bubble, and the activations held. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

from pipeline.schedule import Schedule, feasible_order, held_microbatches

# One number for all; or one a model stage; or for a model stage one a micro-batch.
Durations = float | Sequence[float | Sequence[float]]


@dataclass(frozen=True)
class Timeline:
    """When each action of a schedule runs. Times in the unit of the durations, from the first F on."""

    start: list[list[float]]  # of each rank's actions, as in schedule.actions
    end: list[list[float]]
    makespan: float  # from the first F to the last B or W on any rank
    busy: list[float]  # of each rank
    idle: list[float]  # of each rank: makespan - busy
    peak_held: list[int]  # of each rank: pipeline.schedule.held_microbatches

    @property
    def bubble_fraction(self) -> float:
        """Mean over ranks of idle / makespan."""
        return sum(self.idle) / (len(self.idle) * self.makespan)

    @property
    def bubble_in_span(self) -> float:
        """Mean over ranks of the idle part of the rank's own span, from its first action's start to its last one's end.

        What the zero-bubble papers call the bubble: idle before a rank's first action and after its last is left out.
        """
        idle = []
        for start, end, busy in zip(self.start, self.end, self.busy, strict=True):
            span = end[-1] - start[0]
            idle.append((span - busy) / span if span else 0)
        return sum(idle) / len(idle)

    @property
    def bubble_overhead(self) -> float:
        """Idle over ideal time, which is all work spread evenly over the ranks; (p-1)/m for gpipe and 1f1b."""
        return sum(self.idle) / sum(self.busy)


def simulate(
    schedule: Schedule,
    *,
    forward: Durations,
    backward: Durations | None = None,
    backward_input: Durations | None = None,
    backward_weight: Durations | None = None,
    transfer_latency_s: float = 0,
    transfer_s: float = 0,
) -> Timeline:
    """Runs the schedule: each rank takes its actions in order, each as soon as its input has arrived.

    forward, backward, backward_input, backward_weight: durations of F, B, I and W, each a number, or one a model
    stage, or for a model stage one a micro-batch. None: backward = backward_input + backward_weight where both are
    given, else 2 x forward; backward_input = backward / 2; backward_weight = backward - backward_input.

    What a stage sends to a stage on another rank arrives transfer_latency_s + transfer_s after the action's end; a link
    (one a pair of ranks and direction) is taken for transfer_s by each and carries one at a time. Ranks do not wait for
    their sends. Between stages of one rank nothing is sent. All durations in one unit, seconds or any other; integers
    give exact results.

    ValueError: lengths that do not fit the schedule, a negative or infinite duration, durations that are all zero, a
    deadlock.
    """
    tables = _tables(schedule, forward, backward, backward_input, backward_weight)
    _require_time("transfer_latency_s", transfer_latency_s)
    _require_time("transfer_s", transfer_s)
    starts, ends, busy = _run(schedule, tables, transfer_latency_s, transfer_s)
    makespan = max(row[-1] for row in ends)
    if not makespan > 0:
        raise ValueError("the durations are all zero: a schedule that takes no time has no bubble")
    return Timeline(starts, ends, makespan, busy, [makespan - b for b in busy], held_microbatches(schedule))


def _run(
    schedule: Schedule, tables: dict[str, list[list[float]]], latency: float, occupied: float
) -> tuple[list[list[float]], list[list[float]], list[float]]:
    """Start and end of each action, and the busy time, of each rank. occupied: how long a transfer takes its link."""
    chunks, last_stage, rank_of = schedule.chunks, schedule.num_stages - 1, schedule.rank_of
    free: list[float] = [0] * schedule.stages  # when each rank is done with its last action
    busy: list[float] = [0] * schedule.stages
    links: dict[tuple[int, int], float] = {}  # (from, to) -> when the link is free again
    # when the input of each (stage, micro-batch)'s F and of its B or I has arrived
    forward_ready: list[float] = [0] * (schedule.num_stages * chunks)
    backward_ready: list[float] = [0] * (schedule.num_stages * chunks)
    starts: list[list[float]] = [[] for _ in range(schedule.stages)]
    ends: list[list[float]] = [[] for _ in range(schedule.stages)]
    rows = [iter(row) for row in schedule.actions]
    for rank in feasible_order(schedule):
        stage, kind, microbatch = next(rows[rank])
        cell = stage * chunks + microbatch
        start = free[rank]
        if kind == "F":
            start = max(start, forward_ready[cell])
        elif kind != "W":
            start = max(start, backward_ready[cell])
        duration = tables[kind][stage][microbatch]
        free[rank] = end = start + duration
        busy[rank] += duration
        starts[rank].append(start)
        ends[rank].append(end)
        receiver = stage + 1 if kind == "F" else stage - 1
        if kind == "W" or not 0 <= receiver <= last_stage:
            continue
        if rank_of[receiver] != rank:
            if occupied:
                link = (rank, rank_of[receiver])
                end = links[link] = max(end, links.get(link, 0)) + occupied
            end += latency
        ready = forward_ready if kind == "F" else backward_ready
        ready[receiver * chunks + microbatch] = end
    return starts, ends, busy


def _require_time(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name}={value} is no duration: it must be 0 or more, and finite")


def _tables(
    schedule: Schedule,
    forward: Durations,
    backward: Durations | None,
    backward_input: Durations | None,
    backward_weight: Durations | None,
) -> dict[str, list[list[float]]]:
    """The duration of each kind, as [stage][micro-batch]."""
    forwards = _table("forward", forward, schedule)
    if backward is None and (backward_input is None or backward_weight is None):
        backward = [[2 * f for f in row] for row in forwards]
    if backward_input is None:
        backward_input = [[b / 2 for b in row] for row in _table("backward", backward, schedule)]
    inputs = _table("backward_input", backward_input, schedule)
    if backward_weight is None:
        pairs = zip(_table("backward", backward, schedule), inputs, strict=True)
        backward_weight = [[b - i for b, i in zip(*rows, strict=True)] for rows in pairs]
    weights = _table("backward_weight", backward_weight, schedule)
    if backward is None:
        backward = [[i + w for i, w in zip(*rows, strict=True)] for rows in zip(inputs, weights, strict=True)]
    return {"F": forwards, "B": _table("backward", backward, schedule), "I": inputs, "W": weights}


def _table(name: str, durations: Durations, schedule: Schedule) -> list[list[float]]:
    """One number, one a stage, or one a stage and micro-batch -> [stage][micro-batch]."""
    stages = [durations] * schedule.num_stages if isinstance(durations, Real) else durations
    if len(stages) != schedule.num_stages:
        raise ValueError(f"{name} has {len(stages)} entries for {schedule.num_stages} model stages")
    table = []
    for stage, entry in enumerate(stages):
        if isinstance(entry, Real):
            _require_time(f"{name}[{stage}]", entry)
            table.append([entry] * schedule.chunks)
            continue
        if len(entry) != schedule.chunks:
            raise ValueError(f"{name}[{stage}] has {len(entry)} entries for {schedule.chunks} micro-batches")
        for microbatch, value in enumerate(entry):
            if not 0 <= value < math.inf:  # asked here as well: a call for each of a million costs a second
                _require_time(f"{name}[{stage}][{microbatch}]", value)
        table.append(list(entry))
    return table
