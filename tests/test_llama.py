"""Llama's layers against its formulas written out in float64; documents that do not see each other; its presets."""

from __future__ import annotations

import math

import pytest
import torch
from composing import resolved
from torch import nn

import models
from conf.check import check
from conf.schema import ModelConfig
from models.describe import activation_bytes, describe, forward_flops
from models.documents import attention_mask
from models.llama import Attention, rotary_frequencies
from planning.balance import resolved_balance
from planning.layers import layer_cost
from planning.links import Group
from planning.memory import layer_bytes, micro_batch
from planning.predict import ranks_memory
from planning.stack import get_stack
from planning.step import Layout

VOCABULARY = 50


def make_model(**changes) -> ModelConfig:
    small = dict(blocks=2, hidden=32, heads=4, key_value_heads=2, positions=64, rope_theta=100.0)
    return ModelConfig(name="small", family="llama", vocabulary=VOCABULARY, tied=False, **{**small, **changes})


def build_random(model: ModelConfig) -> dict[str, nn.Module]:
    """All layers in float64, every parameter random, so that no norm hides behind a 1."""
    torch.manual_seed(1)
    layers = dict(models.build(model, seed=0, dtype=torch.float64))
    for module in layers.values():
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.3)
    return layers


def forward(layers, ids, documents=None):
    x = ids
    for module in layers.values():
        x = module(x, None, documents)
    return x


def rms_norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x, theta):
    """[T, W]: the pair (i, i + W / 2) of row m is a complex number, multiplied by exp(1j m theta^(-2 i / W))."""
    T, W = x.shape
    pairs = torch.complex(x[:, : W // 2], x[:, W // 2 :])
    angles = torch.tensor([[m * theta ** (-2 * i / W) for i in range(W // 2)] for m in range(T)], dtype=x.dtype)
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], -1)


def block_by_formula(x, block, model):
    """One sequence [T, D] through one block, head by head (arXiv 2302.13971, 2104.09864, 2002.05202, 2305.13245)."""
    T, W, group = len(x), model.hidden // model.heads, model.heads // model.key_value_heads
    y = rms_norm(x, block.attention_norm.weight, model.norm_eps)
    mixed = []
    for head in range(model.heads):
        shared = head // group
        q = turned(y @ block.attention.q.weight[head * W : (head + 1) * W].T, model.rope_theta)
        k = turned(y @ block.attention.k.weight[shared * W : (shared + 1) * W].T, model.rope_theta)
        v = y @ block.attention.v.weight[shared * W : (shared + 1) * W].T
        scores = (q @ k.T / math.sqrt(W)).masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -math.inf)
        mixed.append(scores.softmax(-1) @ v)
    x = x + torch.cat(mixed, -1) @ block.attention.projection.weight.T
    y = rms_norm(x, block.feedforward_norm.weight, model.norm_eps)
    gate, up = y @ block.feedforward.gate.weight.T, y @ block.feedforward.up.weight.T
    return x + (gate * torch.sigmoid(gate) * up) @ block.feedforward.down.weight.T


@pytest.mark.parametrize(
    "changes", [{}, dict(key_value_heads=1), dict(key_value_heads=4, norm_eps=0.1), dict(heads=1, key_value_heads=1)]
)
def test_logits_equal_the_formulas(changes):
    model = make_model(**changes)
    layers, ids = build_random(model), torch.randint(VOCABULARY, (2, 11))
    with torch.no_grad():
        got = forward(layers, ids)
        for row, sequence in enumerate(ids):
            x = layers["embedding"].token.weight[sequence]
            for i in range(model.blocks):
                x = block_by_formula(x, layers[f"block.{i}"], model)
            logits = rms_norm(x, layers["norm"].weight, model.norm_eps) @ layers["head"].weight.T
            assert torch.allclose(got[row], logits, rtol=0, atol=1e-12)


def test_no_token_sees_a_later_one():
    layers, ids = build_random(make_model()), torch.randint(VOCABULARY, (1, 24))
    changed = ids.clone()
    changed[0, 10] = (ids[0, 10] + 1) % VOCABULARY
    differs = (forward(layers, ids) != forward(layers, changed))[0].any(-1)
    assert not differs[:10].any() and differs[10:].all()


def test_scaled_frequencies_of_llama_3_1():
    """Factor 8: pairs that turn at least 4 times in 8,192 tokens stay, those that do not turn once are 8 x slower."""
    plain, scaled = rotary_frequencies(128, 500_000.0), rotary_frequencies(128, 500_000.0, 8.0)
    turns = 8192 * plain / (2 * math.pi)
    assert torch.equal(scaled[turns >= 4], plain[turns >= 4]) and torch.equal(scaled[turns <= 1], plain[turns <= 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.sum() > 2 and (scaled.diff() < 0).all()
    part = (turns[between] - 1) / 3
    assert torch.allclose(scaled[between], plain[between] * (part + (1 - part) / 8), rtol=1e-12)


# ---- documents -------------------------------------------------------------------------------------------------------


def test_the_mask_of_documents():
    mask = attention_mask(torch.tensor([[7, 7, 9, 7]]))
    assert mask.shape == (1, 1, 4, 4)
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [1, 1, 0, 1]]


@pytest.mark.parametrize("key_value_heads", [1, 4])
def test_a_packed_document_is_what_it_is_alone(key_value_heads):
    """Logits and gradients: positions are not reset, and need not be, since only distances count."""
    layers = build_random(make_model(key_value_heads=key_value_heads))
    parameters = [parameter for module in layers.values() for parameter in module.parameters()]
    lengths = (5, 1, 9)
    ids = torch.randint(VOCABULARY, (2, sum(lengths)))
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).expand(2, -1)
    packed = forward(layers, ids, documents)
    alone = torch.cat([forward(layers, part) for part in ids.split(lengths, 1)], 1)
    assert torch.allclose(packed, alone, rtol=0, atol=1e-12)
    assert not torch.allclose(packed, forward(layers, ids), atol=0.01)
    weights = torch.randn_like(packed)
    for got, expected in zip(
        torch.autograd.grad((packed * weights).sum(), parameters),
        torch.autograd.grad((alone * weights).sum(), parameters),
        strict=True,
    ):
        assert torch.allclose(got, expected, rtol=1e-10, atol=1e-10)


def test_one_document_a_sequence_is_plain_causal_attention():
    layers, ids = build_random(make_model()), torch.randint(VOCABULARY, (3, 12))
    documents = torch.arange(3)[:, None].expand(3, 12)
    assert torch.allclose(forward(layers, ids, documents), forward(layers, ids), rtol=0, atol=1e-12)


# ---- tensor parallelism, dropout, precision --------------------------------------------------------------------------


def test_attention_on_a_part_of_the_heads():
    """Columns of q, k, v and rows of the projection on each of two ranks: their outputs add up to the whole."""
    model = make_model()
    whole, x = build_random(model)["block.0"].attention, torch.randn(2, 9, 32, dtype=torch.float64)
    total = 0
    for rank in range(2):
        part = Attention(model).double()
        for name in ("q", "k", "v"):
            weight = getattr(whole, name).weight
            getattr(part, name).weight = nn.Parameter(weight.chunk(2, 0)[rank])
        part.projection.weight = nn.Parameter(whole.projection.weight.chunk(2, 1)[rank])
        total = total + part(x)
    assert torch.allclose(total, whole(x), rtol=0, atol=1e-12)


def test_bfloat16_keeps_rotations_in_float32():
    """At position 4,000 a bfloat16 angle would be off by up to 16 radians."""
    attention = Attention(make_model(rope_theta=10_000.0))
    x = torch.randn(1, 4096, 4, 8, dtype=torch.float64)
    exact, rounded = attention.rotate(x), attention.rotate(x.bfloat16())
    assert rounded.dtype == torch.bfloat16 and float((rounded - exact).abs().max()) < 0.05
    assert float((attention.rotate(x.float()) - exact).abs().max()) < 1e-5


# ---- configuration ---------------------------------------------------------------------------------------------------


def test_what_null_becomes():
    model = resolved("model=llama_tiny", "model.key_value_heads=null").model
    assert (model.vocabulary, model.feedforward, model.key_value_heads) == (256, 384, 4)
    released = 11008  # Llama 7B's, a multiple of 256
    assert 0 <= released - resolved("model=llama_tiny", "model.hidden=4096").model.feedforward < 256


@pytest.mark.parametrize(
    "name, heads, key_value_heads, width, positions, scaling",
    [("8b", 32, 8, 128, 8192, 1), ("70b", 64, 8, 128, 8192, 1), ("405b", 128, 8, 128, 131_072, 8)],
)
def test_presets_of_llama_3(name, heads, key_value_heads, width, positions, scaling):
    model = resolved(f"model=llama3_{name}", "hardware=p5").model
    assert (model.heads, model.key_value_heads, model.hidden // model.heads) == (heads, key_value_heads, width)
    assert (model.positions, model.rope_scaling, model.rope_theta, model.norm_eps) == (
        positions,
        scaling,
        500_000,
        1e-5,
    )
    assert (model.vocabulary, model.tied) == (128_256, False)


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["model.key_value_heads=3"], ["model.heads=4", "model.key_value_heads=3", "set model.key_value_heads to 2"]),
        (["model.heads=3"], ["model.hidden=128", "model.heads=3", "set model.heads to 2"]),
        (["model.hidden=100", "model.heads=4"], ["model.hidden=100", "heads of width 25", "set model.hidden to 104"]),
        (["model.vocabulary=100"], ["model.vocabulary=100", "256 tokens of data=python_source"]),
        (["model.rope_theta=0"], ["model.rope_theta=0", "more than 0"]),
        (["model.rope_scaling=0.5"], ["model.rope_scaling=0.5", "at least 1"]),
        (
            ["parallel.tensor=4", "model.vocabulary_multiple=4"],
            ["model.key_value_heads=2", "parallel.tensor=4", "set parallel.tensor to 2"],
        ),
    ],
)
def test_bad_input_is_one_line_with_the_remedy(overrides, words):
    with pytest.raises(ValueError) as refusal:
        check(resolved("model=llama_tiny", *overrides), here=False)
    assert "\n" not in str(refusal.value) and all(word in str(refusal.value) for word in words), refusal.value


# ---- what the planner makes of it ------------------------------------------------------------------------------------


class CountingRates:
    """A device whose seconds are the FLOPs of its products."""

    def matmul_s(self, rows, inner, columns, batch=1):
        return 2 * batch * rows * inner * columns

    def pass_s(self, moved_bytes):
        return 0.0

    def exponentials_s(self, number):
        return 0.0


@pytest.mark.parametrize("name, tensor", [("llama3_8b", 1), ("llama3_8b", 2), ("gpt_7b", 1), ("gpt_7b", 2), ("mlp", 1)])
def test_planned_products_are_those_that_are_described(name, tensor):
    config = resolved(f"model={name}", "hardware=p4de", "parallel=pp4")
    config.parallel.tensor = tensor
    stack = get_stack("megatron")  # whose attention computes the half above the diagonal too, as is described
    for spec in describe(config.model):
        cost = layer_cost(spec, config, stack, CountingRates(), Group())
        flops = micro_batch(config) * forward_flops(spec, config.model, config.train.sequence) / tensor
        assert cost.forward.matmul == pytest.approx(flops, rel=1e-12), spec.name
        assert cost.backward_input.matmul + cost.backward_weight.matmul == pytest.approx(2 * flops, rel=1e-12)


def test_llama3_70b_on_512_a100s():
    """8 pipeline x 4 tensor ranks: matrices in four parts, norms whole on each; everything within 80 GiB."""
    config = resolved("model=llama3_70b", "parallel=megatron_8x4x16", "hardware=a100_80gb")
    assert check(config, here=False) == []
    config, _ = resolved_balance(config)
    ranks = ranks_memory(config, Layout.of(config))
    norms = (2 * 80 + 1) * 8192
    assert sum(rank["gradients"] for rank in ranks) == 4 * ((70_553_706_496 - norms) // 4 + norms)
    assert len(ranks) == 8 and max(rank["total"] for rank in ranks) < config.hardware.memory_bytes


def test_attention_inside_documents_is_planned_with_its_mask():
    """2 x 2,048 tokens on one of 4 tensor ranks, bfloat16: [2, 1, T, T] whole; keys and values of each query head."""
    config = resolved(
        "model=llama3_8b", "hardware=p4de", "parallel=pp2", "train.sequence=2048", "train.global_batch=16"
    )
    config.parallel.tensor = 4
    block = describe(config.model)[1]
    plain = layer_bytes(config, block)
    config.data.cross_documents = False
    assert layer_bytes(config, block) - plain == 2 * (2 * 2048 * 2048 + 2 * 2 * 2048 * (4096 - 1024) // 4)
    assert layer_bytes(config, block, checkpointed=True) == 4 * 2 * 2048 * 4096  # the mask is made again


@pytest.mark.parametrize("precision, stream, compute", [("float32", 4, 4), ("bfloat16", 4, 2)])
def test_bytes_that_a_block_keeps_on_cuda(precision, stream, compute):
    """By hand, a token, RMSNorm in one kernel: two norms' inputs and inverse roots; what q, k, v and gate, up read; q,
    the mixture, k, v; gate, its SiLU, up, their product; the log-sum-exp of each head; matrices in bfloat16."""
    D, K, F, H = 4096, 1024, 14336, 32
    config = resolved("model=llama3_8b", "hardware=p4de")
    block = describe(config.model)[1]
    token = stream * (2 * D + 2 + H) + compute * (2 * D + 2 * D + 2 * K + 4 * F)
    copies = 2 * (2 * D * D + 2 * D * K + 3 * D * F) if precision == "bfloat16" else 0
    assert activation_bytes(block, config.model, 2, 512, precision, False) == 2 * 512 * token + copies
    on_cpu = activation_bytes(block, config.model, 2, 512, precision, False, fused_norm=False)
    assert on_cpu == 2 * 512 * (token + 2 * stream * D) + copies
