"""From the resolved config to an engine that holds this rank's layers, and nothing of any other rank's."""

from __future__ import annotations

import torch
import torch.distributed as dist

import models
from conf.schema import RootConfig
from models.describe import LayerSpec, describe
from models.loss import token_loss
from pipeline.engines.base import Engine, Stage
from pipeline.partition import rank_of_stage, split_stages
from pipeline.schedule import make_schedule

DTYPES = {"float32": torch.float32, "bfloat16": torch.float32, "float64": torch.float64}  # of weights and messages


def tied_parameters(layers: list[LayerSpec]) -> dict[str, str]:
    """Copy's canonical name -> owner's, of the whole model."""
    return {copy: owner for layer in layers for copy, owner in layer.tied.items()}


def canonical_order(layers: list[LayerSpec]) -> list[str]:
    """Every parameter of the model in layer order, a tied one once, by its owner's name."""
    return [name for layer in layers for name in layer.parameters if name not in layer.tied]


def engine_class(name: str) -> type[Engine]:
    """The class behind `parallel.engine`; the first call imports its library."""
    if name == "single":
        from pipeline.engines.single import SingleEngine

        return SingleEngine
    if name == "fairscale":
        from pipeline.engines.fairscale_engine import FairscaleEngine

        return FairscaleEngine
    from pipeline.engines.torch_engine import TorchEngine

    return TorchEngine


def build_engine(
    config: RootConfig, *, rank: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> Engine:
    """The engine of `config.parallel.engine`, with the layers of this rank on `device`; `group`: None = all ranks.

    Raises ValueError for a layout that does not fit (all of it is checked in the front already).
    """
    parallel = config.parallel
    layers = describe(config.model)
    names = [layer.name for layer in layers]
    ranks = rank_of_stage(parallel)
    cut = split_stages(parallel.balance, len(ranks), names)
    own = [stage for stage, owner in enumerate(ranks) if owner == rank or parallel.engine != "torch"]
    stages = {stage: _build_stage(config, cut[stage], names, device) for stage in own}
    common = {
        "microbatch": config.train.global_batch // (config.train.accumulate * parallel.chunks),
        "loss": token_loss,
        "tied": tied_parameters(layers),
    }
    engine = engine_class(parallel.engine)
    if parallel.engine == "single":
        return engine(stages, num_stages=1, chunks=parallel.chunks, **common)
    if parallel.engine == "fairscale":
        cuda = device.type == "cuda"
        devices = [torch.device("cuda", index) if cuda else device for index in range(parallel.stages)]
        return engine(stages, devices=devices, checkpoint=parallel.checkpoint, chunks=parallel.chunks, **common)
    return engine(
        stages,
        schedule=make_schedule(parallel.schedule, parallel.stages, parallel.chunks, parallel.interleave),
        boundary=(config.train.sequence, config.model.hidden),
        dtype=DTYPES[config.train.precision],
        device=device,
        group=group,
        **common,
    )


def _build_stage(config: RootConfig, stage: list[str], names: list[str], device: torch.device) -> Stage:
    start = names.index(stage[0])
    fairscale = config.parallel.engine == "fairscale"
    layers = models.build(
        config.model,
        seed=config.train.seed,
        start=start,
        stop=start + len(stage),
        dtype=DTYPES[config.train.precision],
        device=torch.device("cpu") if fairscale else device,  # fairscale moves each stage to its own device
    )
    return Stage(
        layers,
        precision=config.train.precision,
        checkpoint="never" if fairscale else config.parallel.checkpoint,  # fairscale has its own
        interval=config.parallel.checkpoint_interval,
    )
