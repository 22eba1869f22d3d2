"""What two ranks on this machine cost each other: the second part of planning/probe.py, in two children. Imports torch.

Medians in time of the clock: ranks wait for each other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import models
from conf.schema import ModelConfig, from_dict
from pipeline.engines.base import Batch, Stage
from pipeline.engines.torch_engine import TorchEngine
from pipeline.schedule import make_schedule
from planning.children import LARGE_BYTES

SMALL_BYTES = 1024  # of the small one
LEVELS = {"sharded": "full", "replicated": "none", "reduced": "none"}  # of parallel.shard
REPEATS = 11  # the same on both ranks, which wait for each other; of what takes under a millisecond MANY
MANY = 201
TIMEOUT_S = 60


def measure(asked: dict) -> dict[str, float]:
    """asked: `store`, a path that both share; `rank`, 0 or 1; `chunks`; `small` and `shape`, planning.probe's shapes.

    Seconds of an all-reduce of SMALL_BYTES and of LARGE_BYTES (`small_s`, `large_s`); of a flush of `chunks`
    micro-batches under 1f1b, the shape's blocks in each stage (`small_flush_s`, `shape_flush_s`); and of forward and
    backward of a block of the shape `small`: as it is (`block_s`), shared by `tensor` ranks, fully `sharded`, on data
    ranks that do not add up its gradients (`replicated`), and on such that do (`reduced`).
    """
    rank = asked["rank"]
    store = dist.FileStore(asked["store"], 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT_S))
    try:
        _reduce(SMALL_BYTES, MANY)  # makes the connection
        answer = {"small_s": _reduce(SMALL_BYTES, MANY), "large_s": _reduce(LARGE_BYTES, REPEATS)}
        for name in ("small", "shape"):
            answer[f"{name}_flush_s"] = _flush(asked[name], asked["chunks"], rank)
        return answer | _blocks(asked["small"])
    finally:
        dist.destroy_process_group()


def _reduce(size: int, repeats: int) -> float:
    tensor = torch.zeros(size // 4)
    return _median(lambda: dist.all_reduce(tensor), repeats)


def _flush(shape: dict, chunks: int, rank: int) -> float:
    model = from_dict(shape["model"], ModelConfig)
    middle = model.blocks + 1  # embedding and blocks; as many, norm and head
    model = replace(model, blocks=2 * model.blocks)
    layers = models.build(model, seed=0, start=0 if rank == 0 else middle, stop=middle if rank == 0 else None)
    stage = Stage(list(layers))
    engine = TorchEngine(
        {rank: stage}, schedule=make_schedule("1f1b", 2, chunks, 1), boundary=(shape["sequence"], model.hidden),
        dtype=torch.float32, device=torch.device("cpu"), microbatch=shape["batch"],
        loss=models.token_loss, tied={},
    )  # fmt: skip
    ids = torch.randint(model.vocabulary, (shape["batch"] * chunks, shape["sequence"]))
    batch = Batch(ids, None) if rank == 0 else Batch(None, ids)

    def flush() -> None:
        engine.step(batch, 1.0)
        stage.zero_grad(set_to_none=True)
        dist.barrier()

    seconds = _median(flush, REPEATS // 2)
    engine.close()
    return seconds


def _blocks(shape: dict) -> dict[str, float]:
    from torch.distributed.device_mesh import init_device_mesh

    from models.tensor_parallel import parallelize
    from pipeline.engines.sharding import share

    model, mesh = from_dict(shape["model"], ModelConfig), init_device_mesh("cpu", (2,))
    x = torch.randn(shape["batch"], shape["sequence"], model.hidden, requires_grad=True)
    seconds = {}
    for name in ("block", "tensor", "sharded", "replicated", "reduced"):
        blocks = nn.Sequential(*(module for _, module in models.build(model, seed=0, start=1, stop=1 + model.blocks)))
        for module in (*blocks, blocks):  # each block, then what holds them all
            if name == "tensor" and module is not blocks:
                parallelize(module, "block", model.family, mesh, sequence_parallel=False)
            elif name in LEVELS:
                share(module, mesh, LEVELS[name])
        if name == "replicated":
            blocks.set_requires_gradient_sync(False)
        seconds[f"{name}_s"] = _median(lambda blocks=blocks: blocks(x).sum().backward(), 2 * REPEATS) / model.blocks
    return seconds


def _median(piece: Callable[[], object], repeats: int) -> float:
    piece()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        piece()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
