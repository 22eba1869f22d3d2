"""Pipeline, data and tensor ranks together: gradients, whole training runs and checkpoints are those of one process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import resuming
import torch
import torch.distributed as dist

import cases
from pipeline.engines.base import own_part
from ranks import run_ranks
from training import parity
from training.build import make_mesh
from training.loop import Trainer
from training.parts import whole
from training.ranks import Ranks

TOLERANCE = 1e-10
EVEN = 32  # a vocabulary that two tensor ranks can share


# --- gradients: 2 x 2 x 2 ---

LEVELS = {
    "1f1b": ("none", "optimizer", "full"),
    "interleaved_1f1b": ("none", "full"),
    "zb_h1": ("none", "optimizer"),
    "zb_v": ("none", "optimizer"),
}
CUBE = [
    cases.config(
        schedule=schedule,
        stages=2,
        interleave=2 if schedule in ("interleaved_1f1b", "zb_v") else 1,
        data=2,
        tensor=2,
        shard=level,
        sequence_parallel=bool(number % 2),
        vocabulary=EVEN,
        accumulate=1 + number % 2,
        chunks=4,
        microbatch=4,
        dropout=0.1,
        blocks=4,
        family="llama" if level == "optimizer" else "gpt",
    )
    for schedule, levels in LEVELS.items()
    for number, level in enumerate(levels)
]


def _measure(rank: int, world: int, listed: list) -> list:
    mesh = make_mesh(listed[0].parallel, "cpu")
    return [parity.measure(case, rank, dist.group.WORLD, mesh=mesh) for case in listed]


def test_every_gradient_of_two_by_two_by_two_ranks():
    """Tied, dropout, clipping; every rank's gradients, weights after a step and norm against plain autograd."""
    answers = run_ranks(_measure, 8, CUBE, timeout_s=300)
    for number, case in enumerate(CUBE):
        report = parity.compare(case, [answer[number] for answer in answers], parity.reference(case))
        assert report.worst[0] < TOLERANCE, (case.parallel, report.worst)


# --- whole steps: dropout, clipping, accumulation, AdamW, validation ---

STEPS, HELD_OUT = 4, 7  # held-out sequences: no multiple of the data ranks


def _run_config(**overrides):
    usual = dict(dropout=0.1, accumulate=2, chunks=4, microbatch=4, vocabulary=EVEN, blocks=4, precision="float64")
    case = cases.config(**usual | overrides)
    optimizer = replace(case.optimizer, name="adamw", learning_rate=3e-3, warmup_steps=2, clip_norm=0.05)
    return replace(case, optimizer=optimizer, train=replace(case.train, steps=STEPS, max_minutes=0))


def _train(rank: int, world: int, corpus, listed: list) -> list:
    """Losses, norms and held-out loss of each configuration, and its weights after the last step."""
    found = []
    for config in listed:
        trainer = Trainer(config, Ranks(rank, world, rank, torch.device("cpu")), corpus, lambda: False)
        try:
            history = [trainer.held_out_loss(HELD_OUT)]
            for step in range(STEPS):
                outcome = trainer.step(step)
                assert outcome.gradient_norm > config.optimizer.clip_norm  # clipping is at work
                history += [outcome.loss, outcome.gradient_norm, trainer.held_out_loss(HELD_OUT)]
            weights = {n: whole(p.detach()).numpy().copy() for n, p in trainer.engine.parameters.items()}
            size = sum(own_part(p).numel() for p in trainer.engine.parameters.values())
            found.append((history, weights, size))
        finally:
            trainer.engine.close()
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return resuming.corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def single(corpus):
    torch.set_num_threads(1)
    return _train(0, 1, corpus, [_run_config(engine="single")])[0]


LAYOUTS = {
    2: [
        dict(data=2),
        dict(data=2, shard="optimizer"),
        dict(data=2, shard="gradients"),
        dict(data=2, shard="full", checkpoint="always"),
        dict(tensor=2),
        dict(tensor=2, sequence_parallel=True),
    ],
    4: [
        dict(stages=2, data=2),
        dict(stages=2, data=2, schedule="zb_h1", shard="optimizer"),
        dict(stages=2, tensor=2, sequence_parallel=True),
        dict(data=2, tensor=2, shard="full"),
        dict(data=4, chunks=2, microbatch=8),
    ],
}


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_training_is_that_of_one_process(ranks, corpus, single):
    layouts = LAYOUTS[ranks]
    answers = run_ranks(_train, ranks, corpus, [_run_config(**layout) for layout in layouts], timeout_s=240)
    history, weights, size = single
    for number, layout in enumerate(layouts):
        if layout.get("shard", "none") != "none" and "tensor" not in layout and "stages" not in layout:
            parts = [answer[number][2] for answer in answers]
            assert sum(parts) == size and max(parts) <= 0.51 * size, "each data rank holds a half"
        for answer in answers:
            found, held, _ = answer[number]
            np.testing.assert_allclose(found, history, rtol=TOLERANCE, err_msg=str(layout))
            for name, weight in held.items():
                # Adam divides by a gradient's own size: where that is near zero rounding is enlarged
                np.testing.assert_allclose(weight, weights[name], rtol=1e-6, atol=1e-9, err_msg=f"{layout} {name}")


# --- checkpoints ---


def test_a_run_moves_between_all_kinds_of_layouts(corpus, tmp_path):
    """Four stages, then 2 x 2 data ranks, sharded ones, one process, two tensor ranks, fairscale, and back. Each proves
    the loss of the checkpoint's held-out batch first (training/checkpoint.py raises where it differs)."""
    usual = dict(vocabulary=EVEN, precision="float64", microbatch=2)
    layouts = [
        (4, dict(stages=4), 1),
        (4, dict(stages=2, data=2), 2),
        (2, dict(data=2, shard="full"), 3),
        (1, dict(engine="single"), 4),
        (2, dict(tensor=2, sequence_parallel=True), 5),
        (4, dict(data=2, tensor=2, shard="optimizer"), 6),
        (1, dict(engine="fairscale", stages=2, schedule="gpipe"), 7),
        (4, dict(stages=4), None),
    ]
    losses = []
    for world, layout, stop in layouts:
        case = resuming.config(**usual | layout)
        records, state = resuming.merged(run_ranks(resuming.run, world, corpus, tmp_path, [(case, stop)]))
        losses += [step[:3] for step in records.steps]
    case = resuming.config(engine="single", **usual)
    expected, weights = resuming.run(0, 1, corpus, tmp_path / "whole", [(case, None)])
    np.testing.assert_allclose(losses, [step[:3] for step in expected.steps], rtol=1e-9)
    for name, weight in weights.items():
        np.testing.assert_allclose(state[name], weight, rtol=1e-6, atol=1e-8, err_msg=name)
