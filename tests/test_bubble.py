"""Where a step's time went: parts that sum to the step, and causes that are known named with their size."""

from __future__ import annotations

import random

import pytest

from pipeline.bubble import PARTS, explain, repeated
from pipeline.schedule import SCHEDULES, Action, bubble_ideal, make_schedule
from pipeline.simulate import simulate
from pipeline.spans import OPTIMIZER, REDUCE, RankStep, Span, Timing


def happened(schedule, duration, transit=lambda a: 0.0, gap=lambda a: 0.0, post=lambda a: 0.0, begin=None, flushes=1):
    """A step as it would be measured, by asking again and again what can run next: RankSteps that end with the flush.

    duration, transit (of the message that an action needs), gap (of the host, before an action) and post (of the host,
    between an action and handing its result over): of an Action of `repeated(schedule, flushes)`. begin: of each rank.
    """
    whole = repeated(schedule, flushes)
    free = list(begin or [0.0] * schedule.stages)
    starts = list(free)
    ran: dict[Action, Timing] = {}
    left = [list(row) for row in whole.actions]
    while any(left):
        for rank, row in enumerate(left):
            while row:
                action = row[0]
                stage, kind, microbatch = action
                needed = [Action(stage - 1, "F", microbatch)] if kind == "F" and stage else []
                if kind in "BI" and stage < whole.num_stages - 1:
                    needed = [Action(stage + 1, k, microbatch) for k in "BI"]
                    needed = [a for a in needed if any(a in r for r in whole.actions)]
                if any(a not in ran for a in needed):
                    break
                ready, wait = free[rank], None
                for a in needed:
                    if whole.rank_of[a.stage] != rank:
                        wait, ready = free[rank], max(ready, ran[a].sent_s + transit(action))
                start = ready + gap(action)
                timing = Timing(action, start, start + duration(action), wait, ready if wait is not None else None)
                receiver = stage + 1 if kind == "F" else stage - 1
                if kind != "W" and 0 <= receiver < whole.num_stages and whole.rank_of[receiver] != rank:
                    timing.sent_s = timing.end_s + post(action)
                ran[action] = timing
                free[rank] = max(timing.end_s, timing.sent_s or 0.0)
                row.pop(0)
    end = max(timing.end_s for timing in ran.values())
    steps = []
    for row, start in zip(whole.actions, starts, strict=True):
        timings = [ran[action] for action in row]
        for timing in timings:
            timing.action = timing.action._replace(microbatch=timing.action.microbatch % schedule.chunks)
        steps.append(RankStep(start, end, timings))
    return steps


def sums(found) -> list[float]:
    return [sum(rank) for rank in zip(*found.parts.values(), strict=True)]


def every(found, name: str, value: float) -> None:
    assert found.parts[name] == pytest.approx([value] * len(found.parts[name]), abs=1e-9), name


UNIT = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


@pytest.mark.parametrize("name", SCHEDULES)
def test_equal_stages_idle_as_the_schedule_has_it_and_for_no_other_reason(name):
    schedule = make_schedule(name, 4, 8)
    found = explain(schedule, happened(schedule, lambda a: UNIT[a.kind]))
    every(found, "imbalance_idle_s", 0.0)
    every(found, "exposed_communication_s", 0.0)
    every(found, "host_gap_s", 0.0)
    assert found.bubble_fraction == pytest.approx(bubble_ideal(schedule)) == found.bubble_fraction_simulated
    assert sum(found.parts["schedule_idle_s"]) / (4 * found.makespan_s) == pytest.approx(bubble_ideal(schedule))


@pytest.mark.parametrize("flushes", [1, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_parts_sum_to_each_rank_s_step_whatever_happens(name, flushes):
    draw = random.Random(f"{name} {flushes}")
    schedule = make_schedule(name, 3, 6)
    tables = [{}, {}, {}, {}]
    for table, most in zip(tables, (1.0, 0.5, 0.2, 0.1), strict=True):
        for row in repeated(schedule, flushes).actions:
            table |= {action: draw.uniform(0.01, most) for action in row}
    begin = [draw.uniform(0, 2) for _ in range(3)]
    steps = happened(schedule, *(table.__getitem__ for table in tables), begin=begin, flushes=flushes)
    for rank in steps:
        end = rank.end_s
        rank.spans = [
            Span(REDUCE, "norm", end - draw.uniform(0, 1), end + 0.3),
            Span(OPTIMIZER, "", end + 0.4, end + 1),
        ]
        rank.end_s = end + draw.uniform(1, 2)
    found = explain(schedule, steps)
    assert sums(found) == pytest.approx([rank.end_s - rank.begin_s for rank in steps], rel=1e-12)
    assert min(found.parts["exposed_communication_s"]) > 0 and min(found.parts["reduction_s"]) == pytest.approx(0.3)
    assert found.parts["optimizer_s"] == pytest.approx([0.6] * 3)
    busy = [sum(t.end_s - t.start_s for t in rank.timings) for rank in steps]
    assert found.parts["compute_s"] == pytest.approx(busy)
    assert found.bubble_fraction == pytest.approx(1 - sum(busy) / 3 / found.makespan_s)


@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_cost_what_the_simulator_says_they_do(name):
    schedule = make_schedule(name, 4, 8)
    durations = {"forward": 1.0, "backward_input": 1.2, "backward_weight": 0.8}
    took = {"F": 1.0, "B": 2.0, "I": 1.2, "W": 0.8}
    found = explain(schedule, happened(schedule, lambda a: took[a.kind], transit=lambda a: 0.3))
    slow = simulate(schedule, **durations, transfer_latency_s=0.3).makespan - simulate(schedule, **durations).makespan
    assert slow > 0
    every(found, "exposed_communication_s", slow)
    every(found, "imbalance_idle_s", 0.0)
    every(found, "host_gap_s", 0.0)
    assert list(found.links.values()) == pytest.approx([0.3] * len(found.links)) and found.links


def test_uneven_durations_cost_what_the_simulator_says_they_do():
    schedule, draw = make_schedule("1f1b", 4, 8), random.Random(1)
    forward = [[draw.uniform(0.5, 1.5) for _ in range(8)] for _ in range(4)]
    backward = [[draw.uniform(1, 3) for _ in range(8)] for _ in range(4)]
    took = {"F": forward, "B": backward}
    found = explain(schedule, happened(schedule, lambda a: took[a.kind][a.stage][a.microbatch]))
    means = [sum(map(sum, table)) / 32 for table in (forward, backward)]
    uneven = simulate(schedule, forward=forward, backward=backward)
    even = simulate(schedule, forward=means[0], backward=means[1])
    assert found.parts["schedule_idle_s"] == pytest.approx(even.idle)
    assert found.parts["imbalance_idle_s"] == pytest.approx(
        [u - e for u, e in zip(uneven.idle, even.idle, strict=True)]
    )
    assert found.bubble_fraction_simulated == pytest.approx(uneven.bubble_fraction)


P, M, F, B = 4, 6, 1.0, 2.0  # closed forms for gpipe: makespan (m + p - 1)(F + B)


def gpipe(**causes):
    schedule = make_schedule("gpipe", P, M)
    slow = causes.pop("slow", {})
    return explain(schedule, happened(schedule, lambda a: {"F": F, "B": B}[a.kind] * slow.get(a.stage, 1.0), **causes))


def test_a_slow_stage_is_imbalance_of_its_size():
    found = gpipe(slow={2: 1.5})
    mean = (F + B) * (P - 1 + 1.5) / P
    every(found, "schedule_idle_s", (P - 1) * mean)
    every(found, "exposed_communication_s", 0.0)
    every(found, "host_gap_s", 0.0)
    makespan = (P - 1) * (F + B) + M * 1.5 * (F + B)
    others = makespan - M * (F + B) - (P - 1) * mean
    itself = makespan - M * 1.5 * (F + B) - (P - 1) * mean
    assert itself < 0 < others
    assert found.parts["imbalance_idle_s"] == pytest.approx([others, others, itself, others])


def test_a_slow_link_is_exposed_communication_of_its_size():
    link = {1, 2}
    found = gpipe(transit=lambda a: 0.7 if {a.stage, a.stage + (-1 if a.kind == "F" else 1)} == link else 0.0)
    every(found, "exposed_communication_s", 2 * 0.7)  # once through the forwards and once through the backwards
    every(found, "imbalance_idle_s", 0.0)
    every(found, "host_gap_s", 0.0)
    assert found.where["exposed_communication_s"] == pytest.approx([0.0, 0.7, 0.7, 0.0])
    assert [found.links[link] for link in ((1, 2), (2, 1))] == pytest.approx([0.7, 0.7])


def test_a_slow_host_is_host_gap_of_its_size():
    found = gpipe(gap=lambda a: 0.25 if a.stage == 1 else 0.0)
    every(found, "host_gap_s", 2 * M * 0.25)  # its stage is the slowest one by that
    every(found, "exposed_communication_s", 0.0)
    every(found, "imbalance_idle_s", 0.0)
    assert found.where["host_gap_s"] == pytest.approx([0.0, 2 * M * 0.25, 0.0, 0.0])


def test_a_host_that_sends_late_is_not_taken_for_a_slow_link():
    found = gpipe(post=lambda a: 0.25 if a.stage == 1 else 0.0)
    assert min(found.parts["host_gap_s"]) > 0.2
    every(found, "exposed_communication_s", 0.0)
    assert found.where["exposed_communication_s"] == pytest.approx([0.0] * P)


def test_a_message_that_nobody_waited_for_costs_nothing():
    schedule = make_schedule("gpipe", 2, 4)
    steps = happened(schedule, lambda a: 1.0, transit=lambda a: 0.5, gap=lambda a: 0.6 if a.stage else 0.0)
    found = explain(schedule, steps)
    free = explain(schedule, happened(schedule, lambda a: 1.0, transit=lambda a: 0.5))
    assert found.parts["exposed_communication_s"] == pytest.approx(free.parts["exposed_communication_s"])


def test_a_rank_still_busy_with_the_step_before_idles_less_in_this_one():
    prompt, late = gpipe(), gpipe(begin=[0.0, 0.0, 0.0, 1.5])
    assert late.parts["schedule_idle_s"][3] == pytest.approx(prompt.parts["schedule_idle_s"][3] - 1.5)
    every(late, "host_gap_s", 0.0)
    too_late = gpipe(begin=[0.0, 0.0, 0.0, (P - 1) * F + 0.5])  # its first input was there 0.5 before
    assert too_late.parts["host_gap_s"] == pytest.approx([0.5, 0.5, 0.5, 0.0])
    assert too_late.parts["schedule_idle_s"][3] == pytest.approx(prompt.parts["schedule_idle_s"][3] - (P - 1) * F)


def test_a_reduction_begins_when_all_ranks_have_come_to_it():
    schedule = make_schedule("gpipe", 2, 2)
    steps = happened(schedule, lambda a: 1.0)
    end = steps[0].end_s
    steps[0].spans = [Span(REDUCE, "norm", end + 2.0, end + 2.5)]  # its host was late
    steps[1].spans = [Span(REDUCE, "norm", end - 1.0, end + 2.5)]
    for rank in steps:
        rank.end_s = end + 2.5
    found = explain(schedule, steps)
    every(found, "reduction_s", 0.5)
    every(found, "host_gap_s", 2.0)


def test_what_ran_must_be_the_schedule():
    schedule = make_schedule("gpipe", 2, 2)
    steps = happened(make_schedule("1f1b", 2, 2), lambda a: 1.0)
    with pytest.raises(AssertionError):
        explain(schedule, steps)


def test_one_rank_has_seven_parts_and_no_idle():
    schedule = make_schedule("1f1b", 1, 4)
    found = explain(schedule, happened(schedule, lambda a: 1.0, gap=lambda a: 0.1 if a.microbatch else 0.0))
    assert tuple(found.parts) == PARTS
    assert [found.parts[name][0] for name in PARTS] == pytest.approx([8.0, 0.0, 0.0, 0.0, 0.6, 0.0, 0.0])
