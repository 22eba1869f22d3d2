"""Where ranks stand in a layout; 512 of them checked without starting one, over torch's fake process group."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from composing import resolved
from torch.testing._internal.distributed.fake_pg import FakeStore

from models.describe import describe, num_parameters
from pipeline.placement import DIMENSIONS, mesh_shape, num_ranks, pipeline_of, place, placement_lines
from planning.balance import resolved_balance
from planning.predict import make_plan
from training.announce import describe_run, predicted_memory
from training.build import build_engine, make_mesh
from training.parts import counted_here

BIG = ["model=gpt3_175b", "parallel=megatron_8x4x16", "hardware=a100_80gb", "train.precision=bfloat16"]
# first and last pipeline rank, several data and tensor ranks, the last of all
LOOKED_AT = (0, 1, 5, 66, 448, 511)


@pytest.fixture(scope="module")
def big():
    config = resolved(*BIG)
    config = resolved_balance(config)[0]
    return replace(config, hardware=replace(config.hardware, device="cpu"))  # the meta device has no CUDA to find


def test_places_and_peers_by_hand():
    parallel = resolved("parallel=pp2_tp2_dp2").parallel
    assert mesh_shape(parallel) == (2, 2, 2) and num_ranks(parallel) == 8
    assert [tuple(place(rank, parallel)) for rank in (0, 1, 2, 3, 4, 7)] == [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 1, 1),
    ]  # fmt: skip
    assert pipeline_of(0, parallel) == [0, 4] and pipeline_of(7, parallel) == [3, 7]
    assert placement_lines(resolved("parallel=pp4").parallel, 8) == []


def test_tensor_ranks_share_a_node(big):
    """On nodes of 8: ranks that differ only in their tensor coordinate are on one node, and the reader is told."""
    nodes = {}
    for rank in range(512):
        where = place(rank, big.parallel)
        nodes.setdefault((where.pipeline, where.data), set()).add(rank // 8)
    assert len(nodes) == 128 and all(len(of_group) == 1 for of_group in nodes.values())
    first, second = placement_lines(big.parallel, 8)
    assert "8 pipeline x 16 data x 4 tensor ranks" in first
    assert second == "64 nodes of 8 devices; inside one: tensor 4 of 4, data 2 of 16, pipeline 1 of 8"


@pytest.mark.parametrize("rank", LOOKED_AT)
def test_512_ranks_hold_what_the_plan_says(big, rank):
    """Mesh, groups, layers, parameters and bytes of a rank, from the very code that a cluster would run."""
    dist.init_process_group("fake", rank=rank, world_size=512, store=FakeStore())
    try:
        mesh = make_mesh(big.parallel, "cpu")
        engine = build_engine(big, rank=rank, device=torch.device("meta"), mesh=mesh)
        where = place(rank, big.parallel)
        assert tuple(mesh.get_local_rank(name) for name in DIMENSIONS) == tuple(where)
        assert [mesh[name].size() for name in DIMENSIONS] == [8, 16, 4]
        assert dist.get_process_group_ranks(mesh.get_group("pipeline")) == pipeline_of(rank, big.parallel)
        planned = make_plan(big)["ranks"][where.pipeline]
        names = [name for stage in engine.stages.values() for name in stage.names]
        assert names == planned["layers"]
        shapes = {n: shape for spec in describe(big.model) for n, shape in spec.parameters.items()}
        assert {n: tuple(p.shape) for n, p in engine.parameters.items()} == {n: shapes[n] for n in engine.parameters}
        own = sum(p.to_local().numel() for p in engine.parameters.values())
        # AdamW keeps two numbers of four bytes for each that this rank owns; parts of uneven rows are a little larger
        assert 8 * own == pytest.approx(planned["optimizer"], rel=1e-3)
        assert {str(p.device) for p in engine.parameters.values()} == {"meta"}
    finally:
        engine.close()
        dist.destroy_process_group()


def test_data_and_tensor_ranks_hold_every_parameter_once():
    """What the 64 ranks of the last pipeline rank count of themselves adds up to its layers, of a small model."""
    config = resolved(
        "model=gpt_tiny", "parallel=megatron_8x4x16", "hardware=a100_80gb", "train.precision=float32",
        "train.sequence=128", "train.global_batch=512", "train.steps=1", "parallel.balance=[2,1,1,1,1,1,1,3]",
    )  # fmt: skip
    config = replace(config, hardware=replace(config.hardware, device="cpu"))
    counted = 0
    for rank in range(7 * 64, 512):
        dist.init_process_group("fake", rank=rank, world_size=512, store=FakeStore())
        try:
            mesh = make_mesh(config.parallel, "cpu")
            engine = build_engine(config, rank=rank, device=torch.device("meta"), mesh=mesh)
            own = engine.parameters.values()
            counted += sum(p.to_local().numel() for p in own if counted_here(p, place(rank, config.parallel)))
        finally:
            engine.close()
            dist.destroy_process_group()
    last = [spec for spec in describe(config.model) if spec.name in ("block.7", "norm", "head")]
    assert counted == num_parameters(last)


@pytest.mark.parametrize(
    ("typed", "first", "last"),
    [
        (["parallel.stages=2"], "rank 0: ", "rank 1: "),
        (["parallel.stages=2", "parallel.data=2"], "ranks 0, 1: ", "ranks 2, 3: "),
        (["parallel.stages=2", "parallel.data=8"], "ranks 0 ... 7: ", "ranks 8 ... 15: "),
        (["parallel.stages=2", "parallel.data=2", "parallel.shard=optimizer"], "ranks 0, 1: ", "ranks 2, 3: "),
    ],
)
def test_ranks_of_a_stage_are_named_with_what_each_holds(typed, first, last):
    config = resolved_balance(resolved("model.blocks=4", *typed))[0]
    lines = describe_run(config, None, predicted_memory(config)).split("\n")
    held = [line.strip() for line in lines if ": embedding" in line or ": block." in line]
    assert len(held) == 2 and held[0].startswith(first) and held[1].startswith(last)
    layers = describe(config.model)[: config.parallel.balance[0]]
    whole = num_parameters(layers)
    each = {1: "", 2: " each", 8: " each"}[config.parallel.data]
    expected = f"{whole:,} parameters{each},"
    if config.parallel.shard == "optimizer":
        expected = f"{whole // 2:,} parameters each of {whole:,},"
    assert expected in held[0]
