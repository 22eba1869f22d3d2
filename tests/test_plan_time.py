"""Predicted times against closed forms, the full simulation, and published step times."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import pytest
from composing import resolved

from conf.resolve import hardware_file
from conf.schema import HardwareConfig, ParallelConfig
from pipeline.schedule import make_schedule
from planning import errors, predict
from planning.balance import resolved_balance
from planning.links import Group, links
from planning.points import rank_correlation, read_point
from planning.rates import Rates
from planning.stack import get_stack
from planning.steady import flush
from planning.step import Layout, newton_schulz_s, step_time

GPU = ("model=gpt_7b", "hardware=p4de", "parallel.balance=uniform")


def layout(schedule="1f1b", stages=4, chunks=8, interleave=1, **others) -> ParallelConfig:
    return ParallelConfig(name="p", schedule=schedule, stages=stages, chunks=chunks, interleave=interleave, **others)


# ---- messages


def test_ring_inside_a_node():
    """2 (n-1)/n of the bytes over each link, 2 (n-1) latencies (Patarasuk and Yuan 2009)."""
    group = Group(local=8, nodes=1, link_bytes_per_s=100.0, link_latency_s=0.5)
    assert group.all_reduce_s(800.0) == pytest.approx(2 * 7 / 8 * 800 / 100 + 14 * 0.5)
    assert group.gather_s(800.0) == pytest.approx(7 / 8 * 800 / 100 + 7 * 0.5)
    assert Group().all_reduce_s(1e9) == 0


def test_rings_in_and_between_nodes():
    """Each of 4 local ranks takes a quarter over the network, between 3 nodes."""
    group = Group(4, 3, link_bytes_per_s=100.0, network_bytes_per_s=10.0, network_latency_s=1.0)
    assert group.gather_s(1200.0) == pytest.approx(3 / 4 * 1200 / 100 + 2 * (1200 / 4 / 3 / 10 + 1))


@pytest.mark.parametrize(
    "tensor, data, stages, expected",  # ranks in a node and nodes of the groups, nodes of eight
    [
        (8, 4, 2, {"tensor": (8, 1), "data": (1, 4), "stage": (1, 2), "ends": (1, 2)}),
        (2, 4, 2, {"tensor": (2, 1), "data": (4, 1), "stage": (1, 2)}),
        (2, 8, 1, {"tensor": (2, 1), "data": (4, 2), "stage": (1, 1)}),
        (16, 2, 1, {"tensor": (8, 2), "data": (1, 2), "stage": (1, 1)}),
        (2, 1, 4, {"tensor": (2, 1), "data": (1, 1), "stage": (4, 1), "ends": (2, 1)}),
        (1, 1, 8, {"stage": (8, 1), "ends": (2, 1)}),  # the first and the last of a node's eight
        (1, 1, 9, {"stage": (8, 2), "ends": (1, 2)}),
        (3, 1, 3, {"stage": (2, 2), "ends": (1, 2)}),  # ranks 0, 1, 2 and 6, 7, 8: the third pair crosses
    ],
)
def test_placement_tensor_first_then_data_then_stages(tensor, data, stages, expected):
    groups = links(HardwareConfig(**hardware_file("p4de")), layout(stages=stages, tensor=tensor, data=data))
    assert {key: (getattr(groups, key).local, getattr(groups, key).nodes) for key in expected} == expected


def test_stages_that_fill_one_node_need_no_network():
    """Tied weights on stages 0 and 7 of a node of eight."""
    lone = HardwareConfig(**(hardware_file("h200") | {"network_bytes_per_s": None}))
    groups = links(lone, layout(stages=8))
    reached = lone.link_bytes_per_s * lone.link_efficiency
    assert groups.ends.all_reduce_s(1e9) == pytest.approx(1e9 / reached + 2 * lone.link_latency_s)
    with pytest.raises(ValueError, match="network_bytes_per_s"):
        links(lone, layout(stages=9))


# ---- computing


def test_large_products_reach_their_efficiency_and_small_ones_the_bandwidth():
    device = Rates(1e12, 1e11, 0.8, 50.0, 0.5, 0.0, 2)
    large = 2e5
    assert device.matmul_s(large, large, large) == pytest.approx(2 * large**3 / 0.8e12, rel=1e-3)
    one_row = device.matmul_s(1, 1000, 1000)  # half a million bytes a millisecond: reading the matrix takes longest
    assert one_row >= 1000 * 1000 * 2 / 0.5e11
    assert device.pass_s(5e10) == pytest.approx(1.0)


def test_efficiency_falls_with_size():
    device = Rates(1e12, 1e15, 0.8, 50.0, 1.0, 0.0, 2)
    per_flop = [device.matmul_s(n, n, n) / n**3 for n in (64, 128, 512, 4096)]
    assert per_flop == sorted(per_flop, reverse=True)


# ---- the flush


@pytest.mark.parametrize("schedule, interleave", [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("zb_h1", 1)])
def test_bubble_of_equal_stages_is_the_closed_form(schedule, interleave):
    p, m, v = 4, 16, interleave
    bubble = {"zb_h1": (p - 1) / (3 * m + p - 1)}.get(schedule, (p - 1) / (v * m + p - 1))
    times = [1.0] * (p * v)
    assert flush(layout(schedule, p, m, v), times, times, times).bubble_fraction == pytest.approx(bubble)


def test_steady_state_equals_the_full_simulation():
    """Extrapolated against simulated whole, equal and unequal stages, with and without transfers."""
    random = Random(0)
    schedules = [("1f1b", 1), ("zb_h1", 1), ("zb_h2", 1), ("interleaved_1f1b", 3), ("zb_v", 2), ("dualpipe_v", 2)]
    for (name, v), p, m, equal in product(schedules, (2, 3, 4), (61, 120), (True, False)):
        chunks = m // p * p if name == "interleaved_1f1b" else m
        forward, inputs, weights = (
            [1.0 if equal else random.uniform(0.8, 1.2) for _ in range(p * v)] for _ in range(3)
        )
        shape = layout(name, p, chunks, v)
        transfers = dict(latency_s=random.choice([0, 0.02]), transfer_s=random.choice([0, 0.1]))
        both = [i + w / 2 for i, w in zip(inputs, weights, strict=True)]  # not the sum: I and W apart recompute more
        last = {"backward_input": [i / 2 for i in inputs], "backward": [b / 2 for b in both]} if m == 61 else None
        whole, short = (
            flush(shape, forward, inputs, weights, backward=both, last=last, most_actions=most, **transfers)
            for most in (10**9, 0)
        )
        assert short.makespan == pytest.approx(whole.makespan, rel=1e-9), (name, p, chunks, equal, transfers)
        assert short.busy == pytest.approx(whole.busy, rel=1e-9)


# ---- the step


def test_the_parts_add_up_and_none_is_negative():
    config = resolved(*GPU, "parallel=pp4", "parallel.checkpoint=always", "parallel.balance=uniform")
    step = step_time(config, get_stack("torch"))
    assert step.total == pytest.approx(sum(step.parts.values()))
    assert min(step.parts.values()) >= -1e-9 * step.total
    short = step_time(config, get_stack("torch"), explain=False)
    assert short.total == pytest.approx(step.total) and short.bubble_fraction == step.bubble_fraction


def test_checkpointing_repeats_the_blocks_forward():
    never, last, always = (
        step_time(
            resolved(*GPU, "parallel=pp4", "parallel.balance=uniform", f"parallel.checkpoint={c}"), get_stack("torch")
        )
        for c in ("never", "except_last", "always")
    )
    assert never.parts["recompute"] == 0 and never.total < last.total < always.total
    assert last.parts["recompute"] == pytest.approx(always.parts["recompute"] * 15 / 16)
    assert 0.9 < always.parts["recompute"] / never.parts["forward"] < 1  # all but embedding, norm and head


def test_tensor_ranks_share_the_work_and_pay_in_messages():
    one, two = (
        step_time(
            resolved(*GPU, "parallel=pp4", f"parallel.tensor={t}", "parallel.balance=uniform"), get_stack("torch")
        )
        for t in (1, 2)
    )
    assert one.parts["tensor_parallel"] == 0 and two.parts["tensor_parallel"] > 0
    assert 0.45 < two.parts["forward"] / one.parts["forward"] < 0.65


def test_accumulating_repeats_the_flush_and_not_the_optimizer():
    one, two = (
        step_time(resolved(*GPU, "parallel=pp4", "parallel.balance=uniform", *more), get_stack("torch"))
        for more in (["train.global_batch=64"], ["train.global_batch=128", "train.accumulate=2"])
    )
    assert two.parts["forward"] == pytest.approx(2 * one.parts["forward"])
    assert two.parts["optimizer"] == one.parts["optimizer"]


def test_muon_costs_its_newton_schulz_products():
    """4 n m^2 + 2 m^3 FLOPs a matrix and step, counted by torch itself over one Muon step of the model."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    import models
    from training.optimizer import make_optimizer

    config, _ = resolved_balance(resolved("model=gpt_tiny", "hardware=cpu", "parallel=single", "optimizer=muon"))
    layers = models.build(config.model, seed=0, dtype=torch.float32)
    parameters = {f"{name}.{own}": p for name, module in layers for own, p in module.named_parameters()}
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    with FlopCounterMode(display=False) as counter:
        make_optimizer(config.optimizer, parameters).step()
    # a device on which only arithmetic takes time
    device = Rates(1e9, 1e30, 1.0, 0.0, 1.0, 0.0, 4)
    assert newton_schulz_s(config, Layout.of(config), device) == pytest.approx(counter.get_total_flops() / 1e9)
    muon, adamw = (
        step_time(resolved_balance(resolved("hardware=cpu", f"optimizer={name}"))[0], get_stack("torch")).parts
        for name in ("muon", "adamw")
    )
    assert muon["optimizer"] > adamw["optimizer"] and muon["forward"] == adamw["forward"]


def test_predicted_figures_have_the_results_names():
    config, _ = resolved_balance(resolved("model=gpt_7b", "parallel=pp4", "hardware=p4de", "train.steps=100"))
    figures = predict(config)
    assert set(figures) == {
        "step_time_s", "tokens_per_s", "bubble_fraction", "mfu", "peak_memory_bytes", "cost_usd"
    }  # fmt: skip
    hours = 100 * figures["step_time_s"] / 3600
    assert figures["cost_usd"] == pytest.approx(27.44705 * hours)  # four of a node's eight devices: one node
    assert figures["tokens_per_s"] * figures["step_time_s"] == pytest.approx(config.train.global_batch * 2048)
    assert len(figures["peak_memory_bytes"]) == 4 and 0.1 < figures["mfu"] < 0.9


def test_errors_are_signed_and_skip_what_is_not_there():
    predicted = {"step_time_s": 1.1, "mfu": 0.5, "peak_memory_bytes": [90, 110], "cost_usd": 3.0}
    measured = {"step_time_s": 1.0, "peak_memory_bytes": [100, 100], "cost_usd": 0.0, "status": "completed"}
    found = errors(predicted, measured)
    assert set(found) == {"step_time_s", "peak_memory_bytes"}
    assert found["step_time_s"] == pytest.approx(0.1) and found["peak_memory_bytes"] == pytest.approx([-0.1, 0.1])
    assert errors({"peak_memory_bytes": [1, 2]}, {"peak_memory_bytes": [1]}) == {}


# ---- published times

COLUMNS = "gpu gpus_per_node layers hidden heads seq vocab schedule recompute precision".split()
# Narayanan et al. 2021, arXiv 2104.04473, table 1 (full recomputation, A100 80 GB, nodes of eight): layers, hidden,
# heads, tensor, stages, data, interleave, micro-batch, batch; then teraFLOP/s a GPU, from which eq. 3 gives the time
TABLE_1 = [
    (24, 2304, 24, 1, 1, 32, 1, 16, 512, 137),
    (40, 6144, 48, 8, 1, 32, 1, 8, 1024, 135),
    (48, 8192, 64, 8, 2, 32, 1, 4, 1536, 138),
    (80, 12288, 96, 8, 8, 24, 2, 2, 2304, 148),
    (96, 16384, 128, 8, 16, 15, 2, 1, 2160, 155),
]


def published(layers, hidden, heads, tensor, stages, data, interleave, microbatch, batch, teraflops):
    """The row as a table's cells, and its seconds: F = 96 B s l h^2 (1 + s/6h + V/16lh)."""
    s, V, gpus = 2048, 51200, tensor * stages * data
    flops = 96 * batch * s * layers * hidden**2 * (1 + s / (6 * hidden) + V / (16 * layers * hidden))
    cells = dict(
        gpu="a100_80gb", gpus_per_node=8, num_gpus=gpus, layers=layers, hidden=hidden, heads=heads, seq=s, vocab=V,
        tensor=tensor, stages=stages, data=data, interleave=interleave, microbatch=microbatch, global_batch=batch,
        schedule="1f1b", recompute="full", precision="fp16",
    )  # fmt: skip
    return {key: str(value) for key, value in cells.items()}, flops / gpus / (teraflops * 1e12)


def test_shipped_figures_on_published_step_times():
    predicted, measured = [], []
    for row in TABLE_1:
        cells, seconds = published(*row)
        point = read_point(cells, get_stack("megatron"), lambda name: HardwareConfig(**hardware_file(name)))
        predicted.append(step_time(point.config, point.stack, explain=False).total)
        measured.append(seconds)
    relative = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    assert max(relative) < 0.06 and sum(relative) / len(relative) < 0.03
    assert rank_correlation(predicted, measured) == 1


def test_a_slower_network_costs_time():
    cells, _ = published(*TABLE_1[1])
    point = read_point(cells, get_stack("megatron"), lambda name: HardwareConfig(**hardware_file(name)))
    slow = replace(point.config, hardware=replace(point.config.hardware, network_bytes_per_s=1e9))
    assert (
        step_time(slow, point.stack).parts["data_parallel"]
        > step_time(point.config, point.stack).parts["data_parallel"]
    )


def test_a_backward_in_two_parts_recomputes_for_each_module_again():
    """conf/checkpointing.py's count, which tests/test_torch_runtime.py holds to torch: 7 forwards a micro-batch where I
    and W are apart, 1 on the first stage and in whole backwards. dualpipe_v mixes both."""

    def recomputed(schedule: str, checkpoint: str = "always", interleave: int = 1) -> float:
        config = resolved(
            *GPU, f"parallel.schedule={schedule}", "parallel.stages=2", f"parallel.interleave={interleave}",
            "parallel.chunks=8", f"parallel.checkpoint={checkpoint}", "parallel.balance=uniform",
            "train.global_batch=16",
        )  # fmt: skip
        step = step_time(config, get_stack("torch"))
        assert step.total == pytest.approx(step_time(config, get_stack("torch"), explain=False).total)
        return step.parts["recompute"]

    assert recomputed("zb_h1") == pytest.approx((1 + 7) / 2 * recomputed("1f1b"))
    assert recomputed("zb_h1", "except_last") == pytest.approx(7 / 8 * recomputed("zb_h1"))
    assert recomputed("1f1b") < recomputed("dualpipe_v", interleave=2) < recomputed("zb_v", interleave=2)


@pytest.mark.parametrize(
    "overrides",
    [
        "parallel.stages=1 parallel.schedule=dualpipe_v parallel.checkpoint=always parallel.balance=[1,10]",
        "parallel.stages=2 parallel.schedule=dualpipe_v parallel.checkpoint=except_last parallel.balance=[3,2,2,4]",
        "parallel.stages=3 parallel.schedule=zb_h2 parallel.chunks=1 parallel.balance=[4,3,4]",
        "parallel.stages=2 parallel.schedule=interleaved_1f1b parallel.chunks=2 parallel.balance=[1,4,4,2]",
    ],
)
def test_no_bubble_is_less_than_nothing(overrides):
    """Also where uneven stages gain, and where their mean would work less than they do."""
    config = resolved("hardware=p5", *overrides.split())
    stack = get_stack("torch")
    told, plain = step_time(config, stack), step_time(config, stack, explain=False)
    assert told.total == pytest.approx(plain.total)
    assert min(told.parts.values()) >= -1e-9 * told.total
    waiting = sum(told.parts[name] for name in ("bubble_schedule", "bubble_imbalance", "stage_transfers"))
    assert waiting == pytest.approx(plain.parts["bubble"], abs=1e-9 * told.total)


def test_a_users_grid_is_planned_with_its_own_number_of_micro_batches(tmp_path):
    """A text file has one: nothing may ask for a shorter schedule of it."""
    grid = tmp_path / "grid.txt"
    published = make_schedule("1f1b", 2, 9)
    grid.write_text("\n".join(" ".join(map(str, row)) for row in published.actions) + "\n")
    shape = (*GPU, "parallel=pp2", "parallel.chunks=9", "train.global_batch=9", "parallel.checkpoint=always")
    times = [step_time(resolved(*shape, f"parallel.schedule={name}"), get_stack("torch")) for name in ("1f1b", grid)]
    assert times[1].total == pytest.approx(times[0].total)
