"""Every schedule executed over gloo: gradients against plain autograd in float64, bit for bit against `single`."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import cases
from pipeline.engines.base import Batch
from pipeline.schedule import SCHEDULES, make_schedule
from ranks import run_ranks

TOLERANCE = 1e-10  # relative, float64
BLOCKS = 12  # one each for 4 ranks with 3 stages
INTERLEAVES = {"interleaved_1f1b": (1, 2, 3), "looped_bfs": (1, 2, 3), "zb_v": (2,), "dualpipe_v": (2,)}


def _allowed(name: str, stages: int, interleave: int) -> list[int]:
    """Numbers of chunks up to 16 that the schedule takes: the least, the next, one in the middle, the largest."""
    allowed = []
    for chunks in range(1, 17):
        try:
            make_schedule(name, stages, chunks, interleave)
            allowed.append(chunks)
        except ValueError:
            continue
    return sorted({allowed[0], allowed[1], allowed[len(allowed) // 2], allowed[-1]})


def _layouts(stages: int) -> list[dict]:
    return [
        dict(schedule=name, stages=stages, interleave=interleave, chunks=chunks, tied=tied, blocks=BLOCKS, microbatch=1)
        for name in SCHEDULES
        for interleave in INTERLEAVES.get(name, (1,))
        for chunks in _allowed(name, stages, interleave)
        for tied in (True, False)
    ]


@cache
def _reference(chunks: int, tied: bool):
    case = cases.config(engine="single", chunks=chunks, tied=tied, blocks=BLOCKS, microbatch=1)
    inputs, targets = cases.tokens(chunks)
    alone = cases.gradients(case, 0, Batch(inputs, targets))
    return cases.reference(case, inputs, targets, None), alone


def _answers(rank: int, world: int, layouts: list[dict]) -> list[tuple]:
    """This rank's loss, worst relative gradient error, whose it is, and the parameters that differ from `single`'s."""
    answers = []
    for layout in layouts:
        case = cases.config(**layout)
        loss, gradients = cases.gradients(case, rank, Batch(*cases.tokens(layout["chunks"])))
        (expected_loss, expected), (_, alone) = _reference(layout["chunks"], layout["tied"])
        worst, name = cases.worst_error(gradients, expected, cases.tied_names(case))
        different = [name for name, gradient in gradients.items() if not torch.equal(gradient, alone[name])]
        answers.append((loss, expected_loss, worst, name, different, sorted(gradients)))
    return answers


@pytest.mark.parametrize("stages", [2, 4])
def test_gradients_of_every_schedule(stages):
    layouts = _layouts(stages)
    answers = run_ranks(_answers, stages, layouts, timeout_s=240)
    for index, layout in enumerate(layouts):
        schedule = make_schedule(layout["schedule"], stages, layout["chunks"], layout["interleave"])
        held = [name for answer in answers for name in answer[index][5]]
        assert len(held) == len(set(held)) == len(_reference(1, False)[1][1]), f"{layout}: a parameter is missing"
        for rank, answer in enumerate(answers):
            loss, expected_loss, worst, name, different, _ = answer[index]
            assert worst < TOLERANCE, f"{layout}: rank {rank} {name} is off by {worst}"
            if not schedule.reverses_backward:
                assert not different, f"{layout}: rank {rank}: bits of {different[0]} are not those of one process"
            if rank == schedule.rank_of[-1]:
                assert loss == pytest.approx(expected_loss, rel=1e-12), layout


def test_schedules_that_reverse_the_backwards_are_the_known_ones():
    reversing = {name for name in SCHEDULES if make_schedule(name, 4, 16).reverses_backward}
    assert reversing == {"looped_bfs"}


def _compiled(rank: int, world: int, schedule: str) -> str:
    from training import build

    case = cases.config(stages=1, schedule=schedule, chunks=2)
    whole = build.models.build

    def compiled(*args, **kwargs):
        return [(name, torch.compile(module, backend="eager")) for name, module in whole(*args, **kwargs)]

    build.models.build = compiled
    try:
        build.build_engine(case, rank=rank, device=torch.device("cpu"))
        return "built"
    except ValueError as error:
        return str(error)


def test_compiled_layers_are_refused_where_the_backward_is_split():
    assert run_ranks(_compiled, 1, "1f1b") == ["built"]
    (message,) = run_ranks(_compiled, 1, "zb_h1")
    assert "embedding is compiled" in message and "1f1b" in message
