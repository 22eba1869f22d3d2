"""From the resolved config to an engine that holds this rank's layers, and nothing of any other rank's."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import models
from conf.schema import ParallelConfig, RootConfig
from models.describe import LayerSpec, describe
from models.loss import token_loss
from pipeline.engines.base import Engine, Stage
from pipeline.partition import rank_of_stage, split_stages
from pipeline.placement import DIMENSIONS, mesh_shape, num_ranks, place, reduces_each
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


def make_mesh(parallel: ParallelConfig, device_type: str) -> DeviceMesh | None:
    """The layout's ranks, the first of the world, as (pipeline, data, tensor); None for a pipeline alone, which needs
    none. Every rank of the world calls it."""
    shape = mesh_shape(parallel)
    if shape.data * shape.tensor == 1:
        return None
    return DeviceMesh(device_type, torch.arange(num_ranks(parallel)).view(shape), mesh_dim_names=DIMENSIONS)


def build_engine(
    config: RootConfig,
    *,
    rank: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
) -> Engine:
    """The engine of `config.parallel.engine`, with the layers of this rank on `device`.

    Args:
        rank: 0 .. ranks of the layout - 1.
        group: the ranks of a pipeline alone; None = all.
        mesh: `make_mesh`'s, for a layout with data or tensor ranks; these then share the layers.

    Raises ValueError for a layout that does not fit (all of it is checked in the front already).
    """
    parallel = config.parallel
    layers = describe(config.model)
    names = [layer.name for layer in layers]
    ranks = rank_of_stage(parallel)
    cut = split_stages(parallel.balance, len(ranks), names)
    pipeline_rank = place(rank, parallel).pipeline
    own = [stage for stage, owner in enumerate(ranks) if owner == pipeline_rank or parallel.engine != "torch"]
    stages = {stage: _build_stage(config, cut[stage], layers, device, mesh) for stage in own}
    common = {
        "microbatch": config.train.global_batch // (config.train.accumulate * parallel.chunks * parallel.data),
        "loss": token_loss,
        "tied": tied_parameters(layers),
    }
    engine = engine_class(parallel.engine)
    parts = parallel.tensor if parallel.sequence_parallel else 1  # of the sequence
    if parallel.engine == "single":
        return engine(stages, num_stages=1, chunks=parallel.chunks, **common)
    if parallel.engine == "fairscale":
        cuda = device.type == "cuda"
        devices = [torch.device("cuda", index) if cuda else device for index in range(parallel.stages)]
        return engine(stages, devices=devices, checkpoint=parallel.checkpoint, chunks=parallel.chunks, **common)
    return engine(
        stages,
        schedule=make_schedule(parallel.schedule, parallel.stages, parallel.chunks, parallel.interleave),
        boundary=(config.train.sequence // parts, config.model.hidden),
        dtype=DTYPES[config.train.precision],
        device=device,
        group=group if mesh is None else mesh.get_group("pipeline"),
        vocabulary_parallel=parallel.tensor > 1,
        reduces_each=reduces_each(parallel),
        **common,
    )


def _build_stage(
    config: RootConfig, names: list[str], layers: list[LayerSpec], device: torch.device, mesh: DeviceMesh | None
) -> Stage:
    """Layer by layer: only the parts that are this rank's stay, so that memory holds one whole layer at most."""
    fairscale = config.parallel.engine == "fairscale"
    built = []
    for index, layer in enumerate(layers):
        if layer.name in names:
            built += models.build(
                config.model,
                seed=config.train.seed,
                start=index,
                stop=index + 1,
                dtype=DTYPES[config.train.precision],
                device=torch.device("cpu") if fairscale else device,  # fairscale moves each stage to its own device
            )
            if mesh is not None:
                _share(built[-1][1], layer.kind, config, mesh)
    stage = Stage(
        built,
        precision=config.train.precision,
        checkpoint="never" if fairscale else config.parallel.checkpoint,  # fairscale has its own
        interval=config.parallel.checkpoint_interval,
    )
    if config.parallel.data > 1:
        from pipeline.engines import sharding

        sharding.share(stage, mesh["data"], config.parallel.shard)
    return stage


def _share(module: nn.Module, kind: str, config: RootConfig, mesh: DeviceMesh) -> None:
    """One layer among the tensor ranks, and then among the data ranks; each brings a part of torch."""
    parallel = config.parallel
    if parallel.tensor > 1:
        from models.tensor_parallel import parallelize

        sequence_parallel = parallel.sequence_parallel
        parallelize(module, kind, config.model.family, mesh["tensor"], sequence_parallel=sequence_parallel)
    if parallel.data > 1:
        from pipeline.engines import sharding

        sharding.share(module, mesh["data"], parallel.shard)
