"""Small configurations and their plain-autograd references, shared by the tests of engines and gradients."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as fn
from torch import Tensor

import models
from conf.schema import (
    DataConfig,
    HardwareConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RootConfig,
    TrainConfig,
)
from models.describe import describe
from training.build import build_engine

SEQUENCE, VOCABULARY, SEED = 8, 31, 3


def config(
    *,
    engine: str = "torch",
    schedule: str = "1f1b",
    stages: int = 1,
    chunks: int = 4,
    interleave: int = 1,
    balance="uniform",
    tied: bool = True,
    dropout: float = 0.0,
    blocks: int = 8,
    checkpoint: str = "never",
    interval: int = 1,
    microbatch: int = 2,
    accumulate: int = 1,
    precision: str = "float64",
    family: str = "gpt",
    vocabulary: int = VOCABULARY,
    data: int = 1,
    tensor: int = 1,
    sequence_parallel: bool = False,
    shard: str = "none",
) -> RootConfig:
    """A resolved configuration of a model small enough for float64 tests in milliseconds."""
    return RootConfig(
        model=_model(family, blocks, vocabulary, tied, dropout, key_value_heads=max(1, tensor)),
        parallel=ParallelConfig(
            name="test",
            engine=engine,
            schedule=schedule,
            stages=stages,
            chunks=chunks,
            interleave=interleave,
            balance=balance,
            checkpoint=checkpoint,
            checkpoint_interval=interval,
            data=data,
            tensor=tensor,
            sequence_parallel=sequence_parallel,
            shard=shard,
        ),
        optimizer=OptimizerConfig(name="sgd", learning_rate=0.1),
        hardware=HardwareConfig(name="cpu", device="cpu"),
        data=DataConfig(name="test", source="synthetic"),
        train=TrainConfig(
            steps=20,
            global_batch=accumulate * chunks * microbatch,
            accumulate=accumulate,
            sequence=SEQUENCE,
            seed=SEED,
            precision=precision,
        ),
    )


def _model(family, blocks, vocabulary, tied, dropout, key_value_heads) -> ModelConfig:
    return ModelConfig(
        name="test",
        family=family,
        blocks=blocks,
        hidden=16,
        heads=2,
        key_value_heads=key_value_heads if family == "llama" else None,
        feedforward=64,
        positions=SEQUENCE,
        vocabulary=vocabulary,
        tied=tied,
        dropout=dropout,
    )


def tokens(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets [N, T]: the targets are independent of the inputs, so that a wrong pairing cannot hide."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randint(0, VOCABULARY, (2, rows, SEQUENCE), generator=generator)
    return draw[0], draw[1]


def reference(case: RootConfig, inputs: Tensor, targets: Tensor, key: Tensor | None) -> tuple[float, dict[str, Tensor]]:
    """Mean loss and every gradient by plain autograd on the whole batch at once, a tied weight truly shared."""
    layers = models.build(case.model, seed=case.train.seed, dtype=torch.float64)
    parameters = {f"{name}.{own}": p for name, module in layers for own, p in module.named_parameters()}
    x = inputs
    if case.model.tied:
        head = dict(layers)["head"]
        del head.weight
        head.weight = parameters["embedding.token.weight"]
        del parameters["head.weight"]
    for _, module in layers:
        x = module(x, key)
    loss = fn.cross_entropy(x.flatten(0, 1), targets.flatten())
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in parameters.items()}


def gradients(case: RootConfig, rank: int, batch, *, flushes: int = 1) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of this rank after one optimizer step's flushes through the case's engine."""
    engine = build_engine(case, rank=rank, device=torch.device("cpu"))
    try:
        rows = len(batch.inputs) // flushes
        loss = 0.0
        for flush in range(flushes):
            part = slice(flush * rows, (flush + 1) * rows)
            own = replace(
                batch,
                inputs=batch.inputs[part] if engine.needs_inputs else None,
                targets=batch.targets[part] if engine.needs_targets else None,
                keys=None if batch.keys is None else batch.keys[part],
            )
            loss += float(engine.step(own, 1.0 / batch.inputs.numel()))
        engine.sum_tied_gradients()
        return loss, {name: p.grad for name, p in engine.parameters.items()}
    finally:
        engine.close()


def worst_error(got: dict[str, Tensor], expected: dict[str, Tensor], tied: dict[str, str]) -> tuple[float, str]:
    """Largest |got - expected| / |expected| (norms) over the parameters in `got`, and whose it is."""
    errors = {}
    for name, gradient in got.items():
        right = expected[tied.get(name, name)]
        errors[name] = float((gradient - right).norm() / right.norm())
    name = max(errors, key=errors.__getitem__)
    return errors[name], name


def tied_names(case: RootConfig) -> dict[str, str]:
    return {copy: owner for layer in describe(case.model) for copy, owner in layer.tied.items()}
