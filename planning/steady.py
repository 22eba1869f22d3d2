"""The simulated flush for any number of chunks: whole where it is short, its steady state extrapolated where not.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conf.schema import ParallelConfig
from pipeline.schedule import Schedule, make_schedule
from pipeline.simulate import Timeline, simulate

MOST_ACTIONS = 20_000  # simulated whole: a tenth of a second
TOLERANCE = 1e-9  # of a period, between rounds that count as equal
# these run as many micro-batches as there are before the first backward: no round repeats, and they are simulated whole
FILL_AND_DRAIN = ("gpipe", "looped_bfs")


@dataclass(frozen=True)
class Flush:
    """One flush of the pipeline; seconds."""

    makespan: float
    busy: list[float]  # of each rank

    @property
    def bubble_fraction(self) -> float:
        """Mean over ranks of idle / makespan."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan)


def flush(
    parallel: ParallelConfig,
    forward: Sequence[float],
    backward_input: Sequence[float],
    backward_weight: Sequence[float],
    *,
    backward: Sequence[float] | None = None,
    last: dict[str, Sequence[float]] | None = None,
    latency_s: float = 0.0,
    transfer_s: float = 0.0,
    most_actions: int = MOST_ACTIONS,
) -> Flush:
    """Simulates parallel's schedule with one duration a model stage and kind of action, the same for each micro-batch
    but the last one, of which `last` (of the same names) has those that differ: checkpoint=except_last does not
    recompute it. backward: of a whole one; None: backward_input + backward_weight.

    With many chunks (more than most_actions actions) a shorter schedule is simulated, until its rounds repeat: when
    every rank starts each round one period after the last, all that follows is decided by the same sums, so more
    chunks add whole periods and nothing else. Equal to the full simulation; where no round repeats, it is that.
    """
    p, m = parallel.stages, parallel.chunks
    kinds = {"forward": forward, "backward_input": backward_input, "backward_weight": backward_weight}
    kinds["backward"] = backward or [i + w for i, w in zip(backward_input, backward_weight, strict=True)]
    ends = kinds | (last or {})

    def run(chunks: int) -> tuple[Schedule, Timeline]:
        schedule = make_schedule(parallel.schedule, p, chunks, parallel.interleave)
        tables = {
            name: [[each] * (chunks - 1) + [end] for each, end in zip(kinds[name], ends[name], strict=True)]
            for name in kinds
        }
        return schedule, simulate(schedule, **tables, transfer_latency_s=latency_s, transfer_s=transfer_s)

    repeats = parallel.schedule not in FILL_AND_DRAIN and "." not in parallel.schedule  # a user's own may do anything
    short = 4 * p + m % p
    while repeats and 2 * m * len(forward) > most_actions and 2 * short < m:
        schedule, timeline = run(short)
        found = _period(schedule, timeline, p)
        if found is not None:
            (period, busy), rounds = found, (m - short) // p
            return Flush(
                timeline.makespan + rounds * period,
                [whole + rounds * more for whole, more in zip(timeline.busy, busy, strict=True)],
            )
        short = 2 * short - m % p
    _, timeline = run(m)
    return Flush(timeline.makespan, timeline.busy)


def _period(schedule: Schedule, timeline: Timeline, p: int) -> tuple[float, list[float]] | None:
    """Seconds that a round of p micro-batches takes in the steady state, and those of them in which each rank is busy;
    None where rounds differ between ranks or from one to the next, over two rounds in the middle of the schedule."""
    first = (schedule.chunks // (2 * p) - 1) * p
    period, busy = None, []
    for row, starts, ends in zip(schedule.actions, timeline.start, timeline.end, strict=True):
        spans = zip(row, starts, ends, strict=True)
        busy.append(sum(end - start for (_, _, m), start, end in spans if first <= m < first + p))
        begun = {action: start for action, start in zip(row, starts, strict=True)}
        for action, start in begun.items():
            stage, kind, microbatch = action
            if not first <= microbatch < first + 2 * p:
                continue
            step = begun[stage, kind, microbatch + p] - start
            if period is None:
                period = step
            elif abs(step - period) > TOLERANCE * period:
                return None
    return None if period is None else (period, busy)
