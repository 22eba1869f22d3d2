"""Fails loudly when a new torch changes the private parts of torch.distributed.pipelining that the engine relies on."""

from __future__ import annotations

import inspect

import torch
from torch.distributed.pipelining import PipelineStage, schedules

import cases
from conf.checkpointing import forwards_again
from pipeline.engines import torch_runtime
from pipeline.engines.base import Batch
from pipeline.schedule import Action, make_schedule
from ranks import run_ranks
from training.build import build_engine


def _parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_methods_that_are_overridden_have_the_same_parameters():
    for own, theirs, names in (
        (
            torch_runtime.RunnableStage,
            PipelineStage,
            [
                "forward_one_chunk",
                "backward_one_chunk",
                "backward_weight_one_chunk",
                "get_fwd_send_ops",
                "get_bwd_send_ops",
            ],
        ),
        (
            torch_runtime.Runtime,
            schedules._PipelineScheduleRuntime,
            ["_maybe_compute_loss", "_maybe_get_loss", "_update_losses"],
        ),
    ):
        for name in names:
            assert _parameters(getattr(own, name)) == _parameters(getattr(theirs, name)), f"{own.__name__}.{name}"


def test_the_private_functions_take_what_they_are_given():
    assert _parameters(schedules._add_send_recv) == ["compute_actions", "stage_to_rank", "num_stages"]
    assert _parameters(schedules._add_unshard_reshard)[0] == "compute_actions"
    prepare = schedules._PipelineScheduleRuntime._prepare_schedule_with_comms
    assert _parameters(prepare) == ["self", "actions", "format"]


def test_torch_reads_our_text_of_an_action():
    for kind, meaning in (("F", "F"), ("B", "B"), ("I", "I"), ("W", "W")):
        action = schedules._Action.from_str(str(Action(12, kind, 3)))
        assert (action.stage_index, action.computation_type.value, action.microbatch_index) == (12, meaning, 3)


def _executed(rank: int, world: int, case) -> list[str]:
    engine = build_engine(case, rank=rank, device=torch.device("cpu"))
    inputs, targets = cases.tokens(case.train.global_batch)
    engine.clock.begin()
    engine.step(Batch(inputs, targets), 1.0)
    timings = engine.clock.end().timings
    assert all(0 < timing.start_s <= timing.end_s for timing in timings)
    # stage 1's F and stage 0's B wait for a message, and stage 0's F and stage 1's B send one
    for timing in timings:
        waits = (timing.action.kind == "F") == (rank == 1)
        assert (timing.wait_s is not None) == (timing.arrived_s is not None) == waits
        assert (timing.sent_s is not None) == (timing.handed_s is not None) == (not waits)
        if waits:
            assert timing.wait_s <= timing.arrived_s <= timing.start_s
        else:
            assert timing.end_s <= timing.sent_s <= timing.handed_s
    assert all(a.end_s <= b.start_s for a, b in zip(timings, timings[1:], strict=False))
    return [str(timing.action) for timing in timings]


def _forwards(rank: int, world: int, listed: list) -> list[float]:
    """Of each case, how often the forward of each of this rank's blocks runs for a micro-batch."""
    counts = []
    for case in listed:
        engine = build_engine(case, rank=rank, device=torch.device("cpu"))
        inputs, targets = cases.tokens(case.train.global_batch)
        ran = []
        blocks = [
            layer for stage in engine.stages.values() for layer in stage.layers if type(layer).__name__ == "Block"
        ]
        hooks = [block.register_forward_pre_hook(lambda *_, ran=ran: ran.append(1)) for block in blocks]
        batch = Batch(inputs if engine.needs_inputs else None, targets if engine.needs_targets else None)
        engine.step(batch, 1.0)
        counts.append(len(ran) / len(blocks) / engine.chunks)
        for hook in hooks:
            hook.remove()
    return counts


def test_what_a_backward_in_two_parts_recomputes():
    """What the warning says of it (conf/checkpointing.py) and plan.py does not count."""
    kinds = [("gpt", 1, 7), ("gpt", 2, 13), ("llama", 1, 10), ("mlp", 1, 2)]
    listed = [cases.config(stages=2, schedule="zb_h1", checkpoint="always", family=f, interval=i) for f, i, _ in kinds]
    assert [forwards_again(case) for case in listed] == [again for *_, again in kinds]
    first, last = run_ranks(_forwards, 2, listed)
    assert last == [1 + again for *_, again in kinds]
    assert first == [2.0] * len(kinds)


def test_what_runs_is_the_very_list():
    for schedule in ("gpipe", "1f1b"):
        case = cases.config(stages=2, chunks=4, schedule=schedule)
        expected = [[str(action) for action in row] for row in make_schedule(schedule, 2, 4).actions]
        assert run_ranks(_executed, 2, case) == expected
