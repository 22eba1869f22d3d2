"""Where a step's time went: the parts of each rank's step, told apart by what was measured. Imports no torch.

Every rank's step, from when it begins to when it has updated its weights, is the sum of seven parts:

    compute                F, B, I and W, with the loss and what layers send among tensor and data ranks
    schedule idle          idle that the schedule has when every action of a kind takes the same time, the mean over
                           ranks and micro-batches, and messages take none
    imbalance idle         what the durations as they were measured add: a slow stage, a slow micro-batch. Below zero
                           on a rank that computes more than the mean: it idles less than the schedule has planned
    exposed communication  what the messages add: the time in which no computation hid them
    host gap               what the host adds: an action's input was there, the rank free, and it did not run yet; data
                           and all else that a step does besides
    reduction              gradients over data ranks, tied weights, the gradient norm, the step's figures: from when
                           all ranks of the pipeline have come to it
    optimizer              clipping and update

        begin_s                                     end_s
        rank 0  data F0F1F2..~B0_...~B1_.~B2_ norm update
        rank 1  data ..~F0B0_ggF1B1_F2B2_.... norm update
                     +------ the flush -----+
                     first F                last B or W on any rank

    . waits for the other rank to compute    ~ a message is under way    g the host's gap

Waiting is told from transferring by readiness at both ends. Rank 1 waits from when it is free: for rank 0 until that
has finished F0, and for the message from when rank 0 has handed it to the link until it is there. If rank 0 does not
send at once, or rank 1 does not run F0 at once when it is there, that is the host's.

In the flush each rank idles makespan - compute. The reasons are found by replaying the flush, each time with one more
of them taken away: as measured, without the host's gaps, without messages, with mean durations. What the makespan loses
by it is the part: what it costs every rank, whether it waited there itself or was held up by one that did (`where` has
what each rank saw itself). So the parts sum to the step exactly, and a part is what the step would gain without it,
those below it in the list being gone already. planning/step.py divides the predicted step in the same way.

How long a message took is seen when the receiver waited for it. One that was there already (its wait took less than
`THERE_S`) may have taken anything up to then: it counts as the median of those seen on the same link, or 0 where none
was. A rank that begins its step after the first F (its optimizer took longer) has idled that much less in this step: it
is taken from its schedule idle as far as it would have waited for its first input, else from its host gap.

Where ranks outnumber cores, a rank also waits for a core, in whatever part it is then: the parts mean little.
"""

from __future__ import annotations

import statistics
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from pipeline.action import Action, Schedule
from pipeline.check import feasible_order
from pipeline.spans import OPTIMIZER, REDUCE, RankStep, Timing

PARTS = (
    "compute_s",
    "schedule_idle_s",
    "imbalance_idle_s",
    "exposed_communication_s",
    "host_gap_s",
    "reduction_s",
    "optimizer_s",
)
THERE_S = 0.0002  # waiting for a message that is there already takes less; a tenth of it is usual


@dataclass(frozen=True)
class Explanation:
    """A step, explained. Seconds; lists have one entry a rank."""

    parts: dict[str, list[float]]  # PARTS; a rank's sum is its step
    where: dict[str, list[float]]  # exposed communication and host gaps of the flush that each rank saw itself
    makespan_s: float  # from the first F to the last B or W on any rank
    bubble_fraction: float  # mean over ranks of idle / makespan, as measured
    bubble_fraction_simulated: float  # the same with the measured durations, messages and the host taking no time
    links: dict[tuple[int, int], float]  # (from rank, to rank) -> median seconds of the messages whose time was seen


def repeated(schedule: Schedule, flushes: int) -> Schedule:
    """`flushes` flushes one after the other as one schedule; micro-batches are counted on."""
    rows = [
        [Action(a.stage, a.kind, a.microbatch + flush * schedule.chunks) for flush in range(flushes) for a in row]
        for row in schedule.actions
    ]
    return replace(schedule, chunks=schedule.chunks * flushes, actions=rows)


def ran_as(schedule: Schedule, ranks: list[RankStep]) -> dict[Action, tuple[int, Timing]]:
    """Every action of a step with its rank and timing; micro-batches counted on over the flushes. AssertionError: what
    ran is not the schedule, once or several times."""
    ran = {}
    whole = repeated(schedule, len(ranks[0].timings) // len(schedule.actions[0]))
    for rank, (row, measured) in enumerate(zip(whole.actions, ranks, strict=True)):
        assert len(row) == len(measured.timings), f"rank {rank} ran {len(measured.timings)} actions of {len(row)}"
        for action, timing in zip(row, measured.timings, strict=True):
            stage, kind, microbatch = timing.action
            assert action[:2] == (stage, kind), "another order"
            assert (action.microbatch - microbatch) % schedule.chunks == 0, "another order"
            ran[action] = rank, timing
    return ran


def explain(schedule: Schedule, ranks: list[RankStep]) -> Explanation:
    """The parts of a step that ran `schedule`, once or several times (accumulation).

    ranks: what each rank measured, in rank order, on one clock. AssertionError: what ran is not the schedule.
    """
    ran = {action: timing for action, (_, timing) in ran_as(schedule, ranks).items()}
    schedule = repeated(schedule, len(ranks[0].timings) // len(schedule.actions[0]))
    duration = {action: timing.end_s - timing.start_s for action, timing in ran.items()}
    delays, links = _transfers(schedule, ran)
    first = min(timing.start_s for timing in ran.values())
    last = max(timing.end_s for timing in ran.values())
    order = feasible_order(schedule)
    hosted = last - first
    sent, _ = replay(schedule, duration, delays, order)
    free, _ = replay(schedule, duration, {}, order)
    means = _means(duration)
    even, leads = replay(schedule, means, {}, order)

    parts: dict[str, list[float]] = {name: [] for name in PARTS}
    arrivals = arrivals_of(ranks)
    for row, rank, lead in zip(schedule.actions, ranks, leads, strict=True):
        compute, mean = (sum(table[action] for action in row) for table in (duration, means))
        late = max(0.0, rank.begin_s - first)
        hidden = min(late, lead)
        reduction, optimizer, rest = _outside(rank, first, last, arrivals)
        values = (
            compute,
            even - mean - hidden,
            (free - compute) - (even - mean),
            sent - free,
            hosted - sent - (late - hidden) + rest,
            reduction,
            optimizer,
        )
        for name, value in zip(PARTS, values, strict=True):
            parts[name].append(value)
    busy = sum(parts["compute_s"]) / len(ranks)
    return Explanation(parts, _where(schedule, ran, first), hosted, 1 - busy / hosted, 1 - busy / free, links)


def replay(
    schedule: Schedule, duration: Mapping[Action, float], delay: Mapping[Action, float], order: list[int]
) -> tuple[float, list[float]]:
    """The makespan when every action runs as soon as its rank is free and its input there, and each rank's first start.

    delay: seconds from the end of what an action needs, on another rank, to its arrival; those not in it: 0.
    order: `feasible_order` of the schedule.
    """
    free = [0.0] * schedule.stages
    starts: list[float | None] = [None] * schedule.stages
    done: dict[tuple[int, bool, int], float] = {}  # (stage, is F, micro-batch) -> end of that F, B or I
    rows = [iter(row) for row in schedule.actions]
    for rank in order:
        action = next(rows[rank])
        stage, kind, microbatch = action
        start = free[rank]
        if kind != "W":
            source = (stage - 1 if kind == "F" else stage + 1, kind == "F", microbatch)
            if source in done:  # the first stage's F and the last one's B need no other stage
                start = max(start, done[source] + delay.get(action, 0.0))
        if starts[rank] is None:
            starts[rank] = start
        free[rank] = end = start + duration[action]
        if kind != "W":
            done[stage, kind == "F", microbatch] = end
    return max(free), starts


def source_of(action: Action, ran: Container[Action]) -> Action | None:
    """The action of another stage whose result `action` needs, of those that ran."""
    stage, kind, microbatch = action
    if kind == "F":
        found = Action(stage - 1, "F", microbatch)
        return found if found in ran else None
    if kind != "W":
        for before in (Action(stage + 1, "B", microbatch), Action(stage + 1, "I", microbatch)):
            if before in ran:
                return before
    return None


def _transfers(schedule: Schedule, ran: dict[Action, Timing]) -> tuple[dict[Action, float], dict]:
    """How long the message that each action waits for took from when it was sent, and the median of each link."""
    seen: dict[tuple[int, int], list[float]] = {}
    exact: dict[Action, float] = {}
    most: dict[Action, tuple[tuple[int, int], float]] = {}
    for action, timing in ran.items():
        source = source_of(action, ran)
        if timing.wait_s is None or source is None:
            continue
        link = (schedule.rank_of[source.stage], schedule.rank_of[action.stage])
        sent = ran[source].sent_s
        taken = max(0.0, timing.arrived_s - sent)
        if sent >= timing.wait_s or timing.arrived_s - timing.wait_s >= THERE_S:
            exact[action] = taken
            seen.setdefault(link, []).append(taken)
        else:
            most[action] = link, max(0.0, timing.wait_s - sent)
    medians = {link: statistics.median(times) for link, times in seen.items()}
    for action, (link, longest) in most.items():
        exact[action] = min(longest, medians.get(link, 0.0))
    return exact, medians


def _means(duration: dict[Action, float]) -> dict[Action, float]:
    """Every action with the mean duration of its kind."""
    of_kind: dict[str, list[float]] = {}
    for action, seconds in duration.items():
        of_kind.setdefault(action.kind, []).append(seconds)
    mean = {kind: sum(values) / len(values) for kind, values in of_kind.items()}
    return {action: mean[action.kind] for action in duration}


def arrivals_of(ranks: list[RankStep]) -> dict[str, float]:
    """Label of each reduction -> when the last of the ranks that take part had come to it."""
    arrivals: dict[str, float] = {}
    for rank in ranks:
        for span in rank.spans:
            if span.kind == REDUCE:
                arrivals[span.label] = max(span.start_s, arrivals.get(span.label, span.start_s))
    return arrivals


def _outside(rank: RankStep, first: float, last: float, arrivals: dict[str, float]) -> tuple[float, float, float]:
    """Reduction, optimizer and the rest of a rank's step, before and after the flush (first … last)."""

    def outside(start: float, end: float) -> float:
        before = min(end, first) - min(start, first)
        return before + max(end, last) - max(start, last)

    reduction = optimizer = 0.0
    for span in rank.spans:
        if span.kind == REDUCE:
            reduction += outside(min(arrivals[span.label], span.end_s), span.end_s)
        elif span.kind == OPTIMIZER:
            optimizer += outside(span.start_s, span.end_s)
    return reduction, optimizer, outside(rank.begin_s, rank.end_s) - reduction - optimizer


def _where(schedule: Schedule, ran: dict[Action, Timing], first: float) -> dict[str, list[float]]:
    """Seconds of the flush that each rank itself waited for messages under way, and that its host let pass."""
    transferring, host = [], []
    for row in schedule.actions:
        waited = gaps = 0.0
        free = first
        for action in row:
            timing, source = ran[action], source_of(action, ran)
            begun = free
            if source is not None:
                begun = max(begun, ran[source].end_s)
                if timing.wait_s is not None:
                    sent = ran[source].sent_s
                    exposed = max(0.0, timing.arrived_s - max(timing.wait_s, sent))
                    waited += exposed
                    begun = max(begun, timing.arrived_s) if exposed else begun
            gaps += max(0.0, timing.start_s - begun)
            free = timing.end_s
        transferring.append(waited)
        host.append(gaps)
    return {"exposed_communication_s": transferring, "host_gap_s": host}
