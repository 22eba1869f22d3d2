"""Memory of ranks that share layers, sequence and states: published formulas and closed forms."""

from __future__ import annotations

import pytest
from composing import resolved

from models.describe import activation_bytes, block_parts, describe, num_parameters
from pipeline.schedule import held_microbatches, make_schedule
from planning.activations import rank_activation_bytes, tensor_elements
from planning.balance import resolved_balance
from planning.memory import rank_memory
from planning.predict import ranks_memory
from planning.step import Layout

# Korthikanti et al. 2022, arXiv 2205.05198, table 2: activation bytes of a Transformer layer, 16 bit, dropout, with
# s sequence, b micro-batch, h hidden, a heads, t tensor ranks
TABLE_2 = {
    "no parallelism": lambda s, b, h, a, t: s * b * h * (34 + 5 * a * s / h),
    "tensor": lambda s, b, h, a, t: s * b * h * (10 + 24 / t + 5 * a * s / (h * t)),
    "tensor and sequence": lambda s, b, h, a, t: s * b * h * (34 / t + 5 * a * s / (h * t)),
    "tensor and selective": lambda s, b, h, a, t: s * b * h * (10 + 24 / t),
    "tensor, sequence and selective": lambda s, b, h, a, t: s * b * h * 34 / t,
}


@pytest.mark.parametrize("s, b, h, a, t", [(2048, 4, 6144, 64, 8), (2048, 1, 12288, 96, 8), (512, 2, 1024, 16, 4)])
def test_table_2_of_2205_05198(s, b, h, a, t):
    sizes = dict(B=b, T=s, D=h, F=4 * h, H=a, stream=2, compute=2, dropout=True)
    whole, shared = block_parts(**sizes, fused=False)
    scores = shared - (block_parts(**sizes, fused=True)[1] - 2 * b * s * a)  # less fused attention's log-sum-exp
    ours = {
        "no parallelism": whole + shared,
        "tensor": whole + shared / t,
        "tensor and sequence": (whole + shared) / t,
        "tensor and selective": whole + (shared - scores) / t,
        "tensor, sequence and selective": (whole + shared - scores) / t,
    }
    assert ours == {name: pytest.approx(formula(s, b, h, a, t), rel=1e-12) for name, formula in TABLE_2.items()}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_one_rank_keeps_what_the_description_says(precision, dropout):
    model = resolved("model=gpt_tiny", f"model.dropout={dropout}").model
    for spec in describe(model):
        for checkpointed in (False, True):
            assert rank_activation_bytes(spec, model, 4, 128, precision, checkpointed) == activation_bytes(
                spec, model, 4, 128, precision, checkpointed
            )
    block = describe(model)[1]
    stream, compute = 4, {"float32": 4, "bfloat16": 2}[precision]
    parts = block_parts(B=4, T=128, D=128, F=512, H=4, stream=stream, compute=compute, dropout=dropout > 0, fused=True)
    statistics = 2 * 2 * stream * 4 * 128
    copies = 2 * 12 * 128**2 if precision == "bfloat16" else 0
    assert sum(parts) + statistics + copies == activation_bytes(block, model, 4, 128, precision, False)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_tensor_and_sequence_parallel_ranks_keep_less(precision):
    model = resolved("model=gpt_7b").model
    block = describe(model)[1]
    one, tensor, sequence = (
        rank_activation_bytes(block, model, 1, 2048, precision, False, t, sp)
        for t, sp in ((1, False), (4, False), (4, True))
    )
    assert one / 4 < tensor < one and sequence == pytest.approx(one / 4, abs=1)


def test_parameters_of_a_tensor_rank():
    """Column-parallel biases and matrices in four parts, norms and biases after a sum whole (arXiv 1909.08053)."""
    D, V, T = 12288, 51200, 2048
    specs = describe(resolved("model=gpt3_175b").model)
    assert tensor_elements(specs[1], 4) == (12 * D * D + 3 * D + 4 * D) // 4 + (D + D) + 4 * D
    assert tensor_elements(specs[0], 4) == V * D // 4 + T * D
    assert tensor_elements(specs[-1], 4) == V * D // 4


def test_published_parameter_counts():
    """GPT-2's own 124,439,808 and the sizes of arXiv 2104.04473, table 1: 1,008.0 billion (the last row)."""
    small = resolved("model=gpt_124m", "model.vocabulary_multiple=1").model
    assert num_parameters(describe(small)) == 124_439_808
    assert num_parameters(describe(resolved("model=gpt_1t").model)) / 1e9 == pytest.approx(1008.0, abs=0.1)
    assert num_parameters(describe(resolved("model=gpt3_175b").model)) / 1e9 == pytest.approx(174.6, abs=0.1)


@pytest.mark.parametrize(
    "shard, stages, parts",  # parts of weights, gradients and optimizer state on one of 4 data ranks
    [
        ("none", 1, (2, 1, 1)),  # FSDP2's replicate computes with a copy of the weights
        ("optimizer", 1, (1 + 1 / 4, 1, 1 / 4)),  # its own part, and all of them gathered
        ("gradients", 1, (1 + 1 / 4, 1 / 4, 1 / 4)),
        ("optimizer", 2, (1 + 1 / 4, 1, 1 / 4)),
        ("full", 2, (None, 1, 1 / 4)),  # whole gradients at the peak of a pipeline
    ],
)
def test_sharding(shard, stages, parts):
    config = resolved(
        "model=gpt_7b", "hardware=p4de", "parallel=pp2", f"parallel.stages={stages}", "parallel.data=4",
        f"parallel.shard={shard}",
    )  # fmt: skip
    specs = describe(config.model)
    whole = 4 * sum(tensor_elements(spec, 1) for spec in specs)
    memory = rank_memory(config, specs, 1)
    for key, part, bytes_each in zip(("weights", "gradients", "optimizer"), parts, (1, 1, 2), strict=True):
        if part is not None:
            assert memory[key] == pytest.approx(whole * part * bytes_each, abs=8), key
    if shard == "full":  # a quarter, and two layers whole
        assert whole / 4 < memory["weights"] < whole / 2


def test_ranks_with_unequal_stages_are_counted_stage_by_stage():
    """Interleaved: the moment that is worst for the rank's own two stages, by hand from the schedule's actions."""
    config = resolved(
        "parallel=pp2", "parallel.schedule=interleaved_1f1b", "parallel.interleave=2", "parallel.balance=[1,2,3,2]"
    )
    layout = Layout.of(config)
    block = activation_bytes(describe(config.model)[1], config.model, 4, 128, "float32", False)
    schedule = make_schedule("interleaved_1f1b", 2, 8, 2)
    extra = {0: activation_bytes(layout.stages[0][0], config.model, 4, 128, "float32", False), 1: 0}
    message = 4 * 128 * 128 * 4  # what a stage receives lies in a buffer, which is no activation
    for rank in (0, 1):
        worst, held = 0, dict.fromkeys((rank, rank + 2), 0)
        for stage, kind, _ in schedule.actions[rank]:
            held[stage] += {"F": 1, "B": -1}[kind]
            sizes = {0: block + extra[0], 1: 2 * block, 2: 3 * block, 3: 2 * block + _ends(config, layout)}
            worst = max(worst, sum(held[s] * (sizes[s] - message * (s > 0)) for s in held))
        assert ranks_memory(config, layout)[rank]["activations"] == worst
    assert max(held_microbatches(schedule)) > 2


def _ends(config, layout) -> int:
    return sum(
        activation_bytes(spec, config.model, 4, 128, "float32", False)
        for spec in layout.stages[-1]
        if spec.kind in ("norm", "head")
    )


def test_the_preset_fits_the_devices_that_it_is_for():
    config, _ = resolved_balance(resolved("model=gpt3_175b", "parallel=megatron_8x4x16", "hardware=a100_80gb"))
    totals = [rank["total"] for rank in ranks_memory(config, Layout.of(config))]
    assert len(totals) == 8 and max(totals) < config.hardware.memory_bytes
