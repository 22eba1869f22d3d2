"""The clocks of ranks, brought to one; and a rank's own, which sees what each action waits for."""

from __future__ import annotations

import time

import torch.distributed as dist

from pipeline.engines.clock import Clock
from pipeline.schedule import Action
from pipeline.spans import DATA, RankStep, Span
from ranks import run_ranks
from training import clocks


def _ahead(rank: int, world: int) -> clocks.Offsets:
    """Rank k's clock shows 5 k seconds more, and each rank runs on a machine of its own."""
    group, members = dist.group.WORLD, list(range(world))
    apart = clocks.align(group, members, rank, now=lambda: time.perf_counter() + 5 * rank, machine=str(rank))
    return apart, clocks.align(group, members, rank)


def test_clocks_that_differ_are_found_out_within_the_stated_uncertainty():
    apart, together = run_ranks(_ahead, 3)[0]
    assert not apart.shared and apart.applied_s == apart.estimated_s and apart.estimated_s[0] == 0.0
    for rank in (1, 2):
        assert 0 < apart.uncertainty_s[rank] < 0.05
        assert abs(apart.estimated_s[rank] - 5 * rank) <= apart.uncertainty_s[rank]
    assert together.shared and together.applied_s == [0.0] * 3, "processes of one machine have one clock"
    assert all(abs(e) <= u for e, u in zip(together.estimated_s[1:], together.uncertainty_s[1:], strict=True))
    moved = RankStep(7.0, 9.0, [], [Span(DATA, DATA, 7.5, 8.0)]).moved(-5.0)
    assert (moved.begin_s, moved.end_s, moved.spans[0].start_s) == (2.0, 4.0, 2.5)


def test_the_clock_sees_only_steps_and_what_each_action_waits_for():
    clock, action = Clock(), Action(1, "F", 0)
    clock.waits(action, 0)
    clock.arrived()
    assert clock.run(action, lambda: 3) == 3 and clock.timings == []
    clock.begin()
    clock.waits(action, 0)
    time.sleep(0.02)
    clock.arrived()
    time.sleep(0.02)  # the host's
    clock.run(action, time.sleep, 0.02)
    clock.extend(action, time.sleep, 0.02)
    clock.sends()
    clock.sent()
    clock.run(Action(1, "B", 0), lambda: None)
    with clock.span(DATA, "batch"):
        time.sleep(0.02)
    step = clock.end()
    first, second = step.timings
    assert step.begin_s <= first.wait_s < first.arrived_s - 0.019 < first.start_s - 0.038 < first.end_s - 0.077
    assert first.end_s <= first.sent_s <= first.handed_s <= second.start_s
    assert second.wait_s is None and second.arrived_s is None and second.sent_s is None
    assert [(s.kind, s.label) for s in step.spans] == [(DATA, "batch")] and step.spans[0].end_s <= step.end_s
    with clock.span(DATA, "validation"):
        clock.run(action, lambda: None)
    assert clock.end().timings == step.timings, "after the step nothing is kept"
