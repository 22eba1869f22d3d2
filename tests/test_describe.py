"""The description of a model against the built modules: names, shapes, published sizes, FLOPs, bytes kept."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import models
from conf.schema import ModelConfig
from models.describe import (
    activation_bytes,
    describe,
    document_bytes,
    forward_flops,
    input_bytes,
    model_flops_per_token,
    num_parameters,
)


def make_model(family="gpt", **changes) -> ModelConfig:
    small = dict(name="small", family=family, blocks=3, hidden=64, heads=4, positions=48, vocabulary=96)
    return ModelConfig(**{**small, **changes})


# hidden, blocks, parameters of the published GPT-2 models (1,024 positions, 50,257 tokens, tied)
GPT2 = [(768, 12, 124_439_808), (1024, 24, 354_823_168), (1280, 36, 774_030_080), (1600, 48, 1_557_611_200)]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "model",
    [
        make_model(),
        make_model(feedforward=100, heads=1),
        make_model(blocks=0),
        make_model("llama", key_value_heads=2),
        make_model("mlp"),
        make_model("mlp", blocks=1),
        make_model(blocks=96, hidden=12288, heads=96, positions=2048, vocabulary=50257),
    ],
    ids=["gpt", "gpt_narrow", "gpt_no_blocks", "llama", "mlp", "mlp_one_block", "gpt3_175b"],
)
def test_every_name_and_shape_equals_the_built_module(model, tied):
    model.tied = tied
    specs, layers = describe(model), models.build(model, seed=0, device="meta")
    assert [spec.name for spec in specs] == [name for name, _ in layers]
    for spec, (name, module) in zip(specs, layers, strict=True):
        built = {f"{name}.{key}": tuple(parameter.shape) for key, parameter in module.named_parameters()}
        assert list(spec.parameters.items()) == list(built.items())
    tied_names = {key: owner for spec in specs for key, owner in spec.tied.items()}
    assert tied_names == ({"head.weight": "embedding.token.weight"} if tied else {})


@pytest.mark.parametrize("hidden, blocks, published", GPT2)
def test_published_gpt2_sizes(hidden, blocks, published):
    specs = describe(make_model(hidden=hidden, blocks=blocks, heads=hidden // 64, positions=1024, vocabulary=50257))
    assert num_parameters(specs) == published


# hidden, blocks, heads, inner width, parameters of the published models (8 heads of keys and values, 128,256 tokens)
LLAMA3 = [
    (4096, 32, 32, 14336, 8_030_261_248),
    (8192, 80, 64, 28672, 70_553_706_496),
    (16384, 126, 128, 53248, 405_853_388_800),
]


@pytest.mark.parametrize("hidden, blocks, heads, feedforward, published", LLAMA3)
def test_published_llama3_sizes(hidden, blocks, heads, feedforward, published):
    sizes = dict(hidden=hidden, blocks=blocks, heads=heads, feedforward=feedforward, key_value_heads=8, tied=False)
    assert num_parameters(describe(make_model("llama", positions=8192, vocabulary=128_256, **sizes))) == published


@pytest.mark.parametrize("tied", [True, False])
def test_number_of_parameters_in_closed_form(tied):
    D, L, P, V = 64, 3, 48, 96
    blocks, ends = 12 * L * D**2 + 13 * L * D, (V + P) * D + 2 * D
    assert num_parameters(describe(make_model(tied=tied))) == blocks + ends + (0 if tied else V * D)
    assert num_parameters(describe(make_model("mlp", tied=tied))) == L * (D**2 + D) + V * D * (1 if tied else 2)
    specs = describe(make_model(tied=tied))
    assert num_parameters(specs[-1:]) == V * D  # a copy on a rank of its own is memory of its own


def test_padded_vocabulary_rows_are_counted():
    plain, padded = (num_parameters(describe(make_model(vocabulary=rows))) for rows in (96, 128))
    assert padded - plain == 32 * 64


def test_unresolved_or_unknown_is_refused():
    with pytest.raises(ValueError, match="vocabulary"):
        describe(make_model(vocabulary=None))
    with pytest.raises(ValueError, match="resnet.*gpt, llama, mlp"):
        describe(make_model("resnet"))


def test_needs_no_torch():
    code = "import sys, models, models.describe, planning.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("T", [48, 17])
@pytest.mark.parametrize(
    "model",
    [
        make_model(),
        make_model(feedforward=100),
        make_model("llama", key_value_heads=2),
        make_model("llama", feedforward=100, heads=2),
        make_model("mlp"),
    ],
)
def test_forward_flops_equal_torchs_counter(model, T):
    B = 3
    x = torch.zeros(B, T, dtype=torch.int64, device="meta")
    for spec, (_, module) in zip(describe(model), models.build(model, seed=0, device="meta"), strict=True):
        with FlopCounterMode(display=False) as counter:
            x = module(x)
        assert counter.get_total_flops() == B * forward_flops(spec, model, T), spec.name


def test_model_flops_per_token_in_closed_form():
    """PaLM, appendix B: 6 N + 12 L D T, N without the look-up tables but with the head."""
    D, L, T, V = 64, 3, 48, 96
    assert model_flops_per_token(make_model(), T) == 6 * (12 * L * D**2 + V * D) + 12 * L * D * T
    assert model_flops_per_token(make_model("mlp"), T) == 6 * (L * D**2 + V * D)
    K, F = 2 * 16, 192  # two of four heads; 8 D / 3 rounded up to a multiple of 64
    matrices = L * (2 * D**2 + 2 * D * K + 3 * D * F) + V * D
    assert model_flops_per_token(make_model("llama", key_value_heads=2), T) == 6 * matrices + 12 * L * D * T


def saved_bytes(module, x, key, precision, documents=None) -> tuple[torch.Tensor, int]:
    """The layer's output, and the bytes of all storages that autograd keeps but parameters, the output's, and those
    that another micro-batch's forward keeps too (the table of rotary positions)."""
    _, others = kept_storages(module, x.clone(), None if key is None else key.clone(), precision, documents)
    y, storages = kept_storages(module, x, key, precision, documents)
    for outside in [*module.parameters(), y]:
        storages.pop(outside.untyped_storage().data_ptr(), None)
    return y, sum(storage.nbytes() for address, storage in storages.items() if address not in others)


def kept_storages(module, x, key, precision, documents) -> tuple[torch.Tensor, dict]:
    """The layer's output, and every storage that autograd keeps, by address."""
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        y = module(x, key, documents)
    return y, {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in kept}


@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("family", ["gpt", "llama", "mlp"])
def test_activation_bytes_equal_what_autograd_keeps(family, dropout, precision):
    B, T = 4, 40
    model = make_model(family, dropout=dropout, key_value_heads=2)
    key = models.sample_keys(0, 0, torch.arange(B))
    dtype = torch.float64 if precision == "float64" else torch.float32
    x = torch.randint(model.vocabulary, (B, T))
    for spec, (name, module) in zip(describe(model), models.build(model, seed=0, dtype=dtype), strict=True):
        assert x.numel() * x.element_size() == input_bytes(spec, model, B, T, precision), name
        x, measured = saved_bytes(module, x, key, precision)
        predicted = activation_bytes(spec, model, B, T, precision, checkpointed=False, fused_norm=False)
        assert measured == pytest.approx(predicted, rel=1e-12), name
        x = x.detach().requires_grad_()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("family, key_value_heads", [("gpt", 4), ("llama", 4), ("llama", 1)])
def test_attention_inside_documents_keeps_its_mask(family, key_value_heads, precision):
    B, T = 4, 40
    model = make_model(family, key_value_heads=key_value_heads)
    spec, (_, block) = describe(model)[1], models.build(model, seed=0)[1]
    x, documents = torch.randn(B, T, 64, requires_grad=True), torch.arange(T).div(7, rounding_mode="floor").expand(B, T)
    plain, masked = (saved_bytes(block, x, None, precision, given)[1] for given in (None, documents))
    assert masked - plain == document_bytes(spec, model, B, T, precision)


def test_a_checkpointed_layer_keeps_its_input_and_the_keys():
    B, T = 4, 40
    for spec in describe(make_model(dropout=0.1)):
        kept = activation_bytes(spec, make_model(dropout=0.1), B, T, "float32", checkpointed=True)
        assert kept == (8 * B * T if spec.kind == "embedding" else 4 * B * T * 64) + 8 * B
