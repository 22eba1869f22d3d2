"""Runs that stop and go on, inside a test's ranks: the real trainer, checkpoints and loop, records kept in memory."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import cases
from planning.balance import resolved_balance
from training.checkpoint import Checkpoints
from training.data import Corpus
from training.loop import Trainer, train
from training.parts import whole
from training.ranks import Ranks
from training.shards import state_of

STEPS = 9
EPOCH = 3  # steps


class Records:
    """What the loop records on rank 0."""

    def __init__(self) -> None:
        self.steps, self.validations = [], []

    def step(self, figures: dict) -> None:
        keys = ("step", "loss", "gradient_norm", "learning_rate", "consumed_samples", "consumed_tokens")
        self.steps.append(tuple(figures[key] for key in keys))

    def validation(self, step: int, figures: dict) -> None:
        self.validations.append((step, figures["validation_loss"]))


def config(*, steps: int = STEPS, every: int = 0, keep: int = 2, **overrides):
    """AdamW in warm-up for 4 steps, dropout, clipping, accumulation and tied weights; three steps are an epoch."""
    case = cases.config(
        **{"dropout": 0.1, "accumulate": 2, "tied": True, "precision": "float32", "chunks": 4} | overrides
    )
    optimizer = replace(
        case.optimizer, name="adamw", learning_rate=3e-3, warmup_steps=4, weight_decay=0.1, clip_norm=0.05
    )
    run = dict(steps=steps, checkpoint_every=every or steps, keep_checkpoints=keep, validate_every=2, max_minutes=0)
    run |= dict(validate_sequences=8, log_every=100, trace=0)
    case = replace(case, optimizer=optimizer, train=replace(case.train, **run))
    return resolved_balance(case, None)[0]


def corpus(folder: Path) -> Corpus:
    """Random tokens, EPOCH steps of 16 sequences each."""
    generator = np.random.default_rng(0)
    counts = {"train": EPOCH * 16 * cases.SEQUENCE + 1, "validation": 400}
    for side, count in counts.items():
        generator.integers(0, cases.VOCABULARY, count, dtype=np.uint8).tofile(folder / f"{side}.bin")
    return Corpus(
        train_path=str(folder / "train.bin"),
        validation_path=str(folder / "validation.bin"),
        dtype="uint8",
        train_tokens=counts["train"],
        validation_tokens=counts["validation"],
        vocabulary=cases.VOCABULARY,
        tokenizer="byte",
        bytes_per_token=1.0,
        content_hash="",
        description="random",
        entropy_floor=None,
    )


def run(rank: int, world: int, corpus: Corpus, run_dir: Path, starts: list) -> tuple[Records, dict[str, np.ndarray]]:
    """One start after the other in `run_dir`, each (configuration, step at which a signal stops it or None); what rank
    0 recorded of all of them, and this rank's part of the state at the end."""
    torch.set_num_threads(1)
    logging.getLogger().setLevel(logging.INFO)  # torch.distributed.checkpoint debugs at length
    records = Records()
    for config, stop_at in starts:
        done = [0]
        trainer = Trainer(config, Ranks(rank, world, rank, torch.device("cpu")), corpus, lambda d=done: d[0] >= 1)
        try:
            checkpoints = Checkpoints(trainer, run_dir)
            start = checkpoints.restore()
            original = trainer.step

            def step(number: int, original=original, done=done, stop_at=stop_at):
                done[0] = int(stop_at is not None and number + 1 >= stop_at)
                return original(number)

            trainer.step = step
            train(trainer, records if rank == 0 else None, checkpoints, start)
            state = state_of(trainer.engine.parameters, trainer.engine.tied, trainer.optimizer)
            copies = {n: p.detach() for n, p in trainer.engine.parameters.items()}  # a tied weight's copy too
            held = {name: whole(tensor).numpy().copy() for name, tensor in (state | copies).items()}
        finally:
            trainer.engine.close()
    return records, held


def merged(answers: list) -> tuple[Records, dict[str, np.ndarray]]:
    """Rank 0's records and all ranks' state."""
    return answers[0][0], {name: array for _, held in answers for name, array in held.items()}


def assert_same_state(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Bit for bit, weights and optimizer."""
    assert got.keys() == expected.keys()
    different = [name for name in expected if not np.array_equal(got[name], expected[name])]
    assert not different, f"{len(different)} tensors differ, first {different[0]}"
