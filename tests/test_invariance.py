"""The same seed gives the same weights, bit for bit, however the model is cut; to rounding where the order differs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import cases
from ranks import run_ranks
from training.data import Corpus
from training.loop import Trainer
from training.ranks import Ranks

STEPS = 20
CHUNKS = 4


def _corpus(folder) -> Corpus:
    """Random tokens: nothing to learn beyond their frequency, but every gradient is of ordinary size."""
    generator = np.random.default_rng(0)
    for side, count in (("train", 4000), ("validation", 400)):
        generator.integers(0, cases.VOCABULARY, count, dtype=np.uint8).tofile(folder / f"{side}.bin")
    return Corpus(
        train_path=str(folder / "train.bin"),
        validation_path=str(folder / "validation.bin"),
        dtype="uint8",
        train_tokens=4000,
        validation_tokens=400,
        vocabulary=cases.VOCABULARY,
        tokenizer="byte",
        bytes_per_token=1.0,
        content_hash="",
        description="random",
        entropy_floor=None,
    )


def _config(**overrides):
    """Dropout, clipping (always active at this norm), accumulation and tied weights, all on; AdamW."""
    case = cases.config(
        **{"dropout": 0.1, "accumulate": 2, "tied": True, "precision": "float32", "chunks": CHUNKS} | overrides
    )
    optimizer = replace(
        case.optimizer, name="adamw", learning_rate=3e-3, warmup_steps=3, weight_decay=0.1, clip_norm=0.05
    )
    return replace(case, optimizer=optimizer, train=replace(case.train, steps=STEPS, max_minutes=0))


def _train(rank: int, world: int, corpus: Corpus, listed: list) -> list[tuple[list, dict]]:
    """Losses and gradient norms of every step, and this rank's weights after the last, for each configuration."""
    found = []
    for config in listed:
        ranks = Ranks(rank, world, rank, torch.device("cpu"))
        trainer = Trainer(config, ranks, corpus, lambda: False)
        try:
            outcomes = [trainer.step(step) for step in range(config.train.steps)]
            assert all(outcome.gradient_norm > config.optimizer.clip_norm for outcome in outcomes)
            history = [(outcome.loss, outcome.gradient_norm) for outcome in outcomes]
            weights = {n: p.detach().numpy().copy() for n, p in trainer.engine.parameters.items()}
            found.append((history, weights))
        finally:
            trainer.engine.close()
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    return _corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def single(corpus):
    """The reference: one process, micro-batch by micro-batch."""
    torch.set_num_threads(1)
    return _train(0, 1, corpus, [_config(engine="single")])[0]


EXACT = {  # stages -> layouts whose backwards run in micro-batch order
    1: [dict(schedule="1f1b")],
    2: [
        dict(schedule="1f1b"),
        dict(schedule="1f1b", balance=[1, 7]),
        dict(schedule="1f1b", balance=[3, 8]),
        dict(schedule="1f1b", checkpoint="always", interval=3),
        dict(schedule="gpipe"),
        dict(schedule="interleaved_1f1b", interleave=2),
        dict(schedule="interleaved_1f1b", interleave=3),
        dict(schedule="zb_h1"),
        dict(schedule="zb_h2", checkpoint="always"),
        dict(schedule="zb_v", interleave=2),
        dict(schedule="dualpipe_v", interleave=2),
    ],
    4: [
        dict(schedule="1f1b", checkpoint="except_last"),
        dict(schedule="interleaved_1f1b", interleave=2),
        dict(schedule="zb_v", interleave=2),
    ],
}


@pytest.mark.parametrize("stages", EXACT)
def test_weights_after_20_steps_are_those_of_one_process_bit_for_bit(stages, corpus, single):
    layouts = EXACT[stages]
    answers = run_ranks(_train, stages, corpus, [_config(stages=stages, **layout) for layout in layouts])
    history, weights = single
    for index, layout in enumerate(layouts):
        held = {}
        for answer in answers:
            assert answer[index][0] == history, f"{layout}: another loss or gradient norm"
            held |= answer[index][1]
        assert held.keys() == weights.keys()
        different = [name for name in weights if not np.array_equal(held[name], weights[name])]
        assert not different, f"{layout}: {len(different)} parameters differ, first {different[0]}"


def _short(**layout):
    config = _config(**layout)
    return replace(config, train=replace(config.train, steps=5))


@pytest.mark.parametrize(
    "family, stages, chunks, layouts",
    [
        ("llama", 2, 4, [dict(schedule=name, interleave=2) for name in ("interleaved_1f1b", "zb_v")]),
        ("gpt", 8, 8, [dict(schedule="zb_h1")]),
    ],
    ids=["llama", "eight stages"],
)
def test_weights_after_five_steps_are_those_of_one_process_bit_for_bit(family, stages, chunks, layouts, corpus):
    torch.set_num_threads(1)
    common = dict(family=family, chunks=chunks)
    ((history, weights),) = _train(0, 1, corpus, [_short(engine="single", **common)])
    answers = run_ranks(_train, stages, corpus, [_short(stages=stages, **common, **layout) for layout in layouts])
    for index, layout in enumerate(layouts):
        assert all(answer[index][0] == history for answer in answers), layout
        held = {name: weight for answer in answers for name, weight in answer[index][1].items()}
        assert held.keys() == weights.keys()
        assert all(np.array_equal(held[name], weight) for name, weight in weights.items()), layout


ROUNDING = 2e-4  # relative distance of the weights after 20 float32 steps that add the same numbers in another order


@pytest.mark.parametrize(
    "layout",
    [
        dict(engine="single", chunks=2),
        dict(engine="single", chunks=8),
        dict(engine="single", chunks=4, microbatch=4, accumulate=1),
        dict(engine="fairscale", stages=2, schedule="gpipe"),
        dict(engine="fairscale", stages=4, schedule="gpipe", checkpoint="except_last"),
    ],
    ids=str,
)
def test_other_orders_of_adding_differ_by_rounding_only(layout, corpus, single):
    layout = {"microbatch": 8 // layout.get("chunks", CHUNKS)} | layout
    ((_, weights),) = _train(0, 1, corpus, [_config(**layout)])
    for name, expected in single[1].items():
        distance = np.linalg.norm(weights[name] - expected) / np.linalg.norm(expected)
        assert distance < ROUNDING, f"{name} is {distance} off"


def test_another_seed_is_far_outside_the_rounding_tolerance(corpus, single):
    config = _config(engine="single")
    ((_, weights),) = _train(0, 1, corpus, [replace(config, train=replace(config.train, seed=cases.SEED + 1))])
    name = "block.0.attention.qkv.weight"
    assert np.linalg.norm(weights[name] - single[1][name]) > 0.5 * np.linalg.norm(single[1][name])


def test_looped_bfs_reverses_the_backwards_and_differs_by_rounding_only(corpus, single):
    answers = run_ranks(_train, 2, corpus, [_config(stages=2, schedule="looped_bfs", interleave=2)])
    held = {name: weight for answer in answers for name, weight in answer[0][1].items()}
    worst = max(np.linalg.norm(held[n] - w) / np.linalg.norm(w) for n, w in single[1].items())
    assert 0 < worst < ROUNDING
