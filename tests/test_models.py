"""The built models against torch's own Transformer layers, published rules for initial weights, and closed forms."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as fn
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import models
from conf.schema import ModelConfig
from models.describe import describe
from models.dropout import keep_mask


def make_model(family="gpt", **changes) -> ModelConfig:
    small = dict(name="small", family=family, blocks=3, hidden=32, heads=4, positions=24, vocabulary=50)
    return ModelConfig(**{**small, **changes})


def build_random(model: ModelConfig, dtype=torch.float64) -> nn.ModuleDict:
    """All layers by name (dots as bars), every parameter random, so that no bias or norm hides behind a 0 or 1."""
    torch.manual_seed(1)
    layers = models.build(model, seed=0, dtype=dtype)
    for _, module in layers:
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.3)
    return nn.ModuleDict({name.replace(".", "|"): module for name, module in layers})


def forward(layers, x, key=None):
    for module in layers.values() if isinstance(layers, nn.ModuleDict) else (module for _, module in layers):
        x = module(x, key)
    return x


class Masked(nn.Module):
    """Stands in for a Dropout of torch's layer with a mask that is given."""

    def __init__(self, mask, probability):
        super().__init__()
        self.factor = mask / (1 - probability)

    def forward(self, x):
        return x * self.factor


def reference_logits(layers: nn.ModuleDict, model: ModelConfig, ids, key=None, probability=0.0):
    """The same weights in torch's nn.TransformerEncoderLayer (norm_first), dropout as given masks."""
    B, T = ids.shape
    masks = [torch.ones(1)] * 2 if key is None else None
    dropped = round(probability * 65536)

    def mask(layer, site):
        return masks[site] if masks else keep_mask(key, layer, site, T, model.hidden, dropped).double()

    embedding = layers["embedding"]
    x = embedding.token.weight[ids] + embedding.position.weight[torch.arange(T)]
    x = x * mask(0, 0) / (1 - probability)
    causal = nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
    for i in range(model.blocks):
        block = layers[f"block|{i}"]
        layer = nn.TransformerEncoderLayer(
            model.hidden, model.heads, model.feedforward or 4 * model.hidden, dropout=0.0, batch_first=True,
            activation=lambda t: fn.gelu(t, approximate="tanh"), norm_first=True, dtype=torch.float64,
        )  # fmt: skip
        layer.dropout1 = Masked(mask(i + 1, 0), probability)
        layer.dropout2 = Masked(mask(i + 1, 1), probability)
        pairs = [
            (layer.norm1, block.attention_norm),
            (layer.norm2, block.feedforward_norm),
            (layer.self_attn.out_proj, block.attention.projection),
            (layer.linear1, block.feedforward.up),
            (layer.linear2, block.feedforward.down),
        ]
        for theirs, ours in pairs:
            theirs.load_state_dict(ours.state_dict())
        for name in ("weight", "bias"):  # ours: head by head; torch's: all queries, all keys, all values
            rows = getattr(block.attention.qkv, name).unflatten(0, (model.heads, 3, -1)).transpose(0, 1).flatten(0, 2)
            getattr(layer.self_attn, f"in_proj_{name}").data.copy_(rows)
        x = layer(x, src_mask=causal, is_causal=True)
    x = fn.layer_norm(x, (model.hidden,), layers["norm"].weight, layers["norm"].bias)
    return x @ layers["head"].weight.T


@pytest.mark.parametrize("T", [24, 11, 1])
@pytest.mark.parametrize("changes", [{}, {"feedforward": 40, "heads": 1}], ids=["gpt", "narrow"])
def test_logits_equal_torchs_own_layers(changes, T):
    model = make_model(**changes)
    layers, ids = build_random(model), torch.randint(50, (3, T))
    with torch.no_grad():
        assert torch.allclose(forward(layers, ids), reference_logits(layers, model, ids), rtol=0, atol=1e-12)


def test_dropout_acts_on_embeddings_and_residual_branches():
    model = make_model(dropout=0.25)  # 0.25 is exact in steps of 1 / 65536
    layers, ids, key = build_random(model), torch.randint(50, (3, 24)), models.sample_keys(5, 6, torch.arange(3))
    with torch.no_grad():
        expected = reference_logits(layers, model, ids, key, 0.25)
        assert torch.allclose(forward(layers, ids, key), expected, rtol=0, atol=1e-12)
        assert not torch.allclose(forward(layers, ids), expected)


def test_mlp_logits():
    model = make_model("mlp")
    layers, ids = build_random(model), torch.randint(50, (3, 9))
    x = layers["embedding"].token.weight[ids]
    for i in range(3):
        x = torch.relu(x @ layers[f"block|{i}"].linear.weight.T + layers[f"block|{i}"].linear.bias)
    assert torch.allclose(forward(layers, ids), x @ layers["head"].weight.T, rtol=0, atol=1e-12)


def test_no_token_sees_a_later_one():
    layers, ids = build_random(make_model()), torch.randint(50, (1, 24))
    changed = ids.clone()
    changed[0, 10] = (ids[0, 10] + 1) % 50
    differs = (forward(layers, ids) != forward(layers, changed))[0].any(-1)
    assert not differs[:10].any() and differs[10:].all()


# ---- initial weights -------------------------------------------------------------------------------------------------


def canonical(layers) -> dict[str, torch.Tensor]:
    return {f"{name}.{own}": p.detach() for name, module in layers for own, p in module.named_parameters()}


@pytest.mark.parametrize("family", ["gpt", "llama", "mlp"])
def test_initial_weights_do_not_depend_on_the_cut_or_the_dtype(family):
    model = make_model(family)
    whole = canonical(models.build(model, seed=3))
    for start in range(len(describe(model))):
        part = models.build(model, seed=3, start=start, stop=start + 1)
        assert [name for name, _ in part] == [describe(model)[start].name]
        assert all(torch.equal(value, whole[name]) for name, value in canonical(part).items())
    for dtype in (torch.float64, torch.bfloat16):
        other = canonical(models.build(model, seed=3, dtype=dtype))
        assert all(torch.equal(value, whole[name].to(dtype)) for name, value in other.items())


def test_initial_weights_differ_by_name_and_seed():
    first, second = (canonical(models.build(make_model(tied=False), seed=seed)) for seed in (0, 1))
    drawn = [value.flatten()[:64] for weights in (first, second) for value in weights.values() if value.dim() == 2]
    for i, one in enumerate(drawn):
        assert all(abs(float(torch.corrcoef(torch.stack([one, two]))[0, 1])) < 0.6 for two in drawn[:i])


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_starts_as_its_owner(tied):
    weights = canonical(models.build(make_model(tied=tied), seed=0))
    assert torch.equal(weights["head.weight"], weights["embedding.token.weight"]) == tied


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_initial_weights_follow_gpt2(family):
    """Radford et al. 2019: normal, std 0.02; residual projections divided by sqrt(number of residual branches)."""
    model = make_model(family, hidden=256, vocabulary=1000, positions=512, tied=False)
    for name, value in canonical(models.build(model, seed=0)).items():
        if name.endswith("bias"):
            assert not value.any()
        elif value.dim() == 1:
            assert (value == 1).all()
        else:
            std = 0.02 / (math.sqrt(6) if name.endswith(("projection.weight", "down.weight")) else 1)
            spread = 5 / math.sqrt(2 * value.numel())  # five standard errors of a sample's standard deviation
            assert float(value.std()) == pytest.approx(std, rel=spread), name
            assert abs(float(value.mean())) < 5 * std / math.sqrt(value.numel())
            assert float(value.abs().max()) > 4 * std  # a normal's tail, not cut off


def test_building_leaves_torchs_generator_alone():
    before = torch.get_rng_state()
    models.build(make_model(), seed=0)
    assert torch.equal(before, torch.get_rng_state())


def test_building_allocates_the_layer_once():
    code = """
from conf.schema import ModelConfig
import models, torch
from training.ranks import Ranks
model = ModelConfig(name="m", family="gpt", blocks=4, hidden=1536, heads=12, positions=64, vocabulary=256)
models.build(model, seed=0, start=0, stop=1)
ranks = Ranks(0, 1, 0, torch.device("cpu"))
ranks.start_counting_memory()
layers = models.build(model, seed=0, start=2, stop=4)
print(ranks.peak_memory_bytes() / sum(4 * p.numel() for _, module in layers for p in module.parameters()))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 1.1


# ---- loss, backward, precision ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_token_loss_is_a_sum_in_float32_or_better(dtype):
    logits, targets = torch.randn(2, 5, 7, dtype=dtype) * 3, torch.randint(7, (2, 5))
    loss = models.token_loss(logits, targets)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    log_probabilities = logits.double() - torch.logsumexp(logits.double(), -1, keepdim=True)
    expected = -log_probabilities.gather(-1, targets[..., None]).sum()
    assert float(loss) == pytest.approx(float(expected), rel=1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("family", ["gpt", "llama", "mlp"])
def test_split_backward_gives_the_same_gradients(family):
    """Zero-bubble schedules: the gradient of the input first, those of the weights later."""
    model = make_model(family, dropout=0.25)
    layers, key = build_random(model), models.sample_keys(0, 0, torch.arange(3))
    blocks = [layers[f"block|{i}"] for i in range(3)]
    parameters = [p for block in blocks for p in block.parameters()]

    def run(x):
        for block in blocks:
            x = block(x, key)
        return x

    x, gradient = torch.randn(3, 24, 32, dtype=torch.float64, requires_grad=True), torch.randn(3, 24, 32).double()
    expected = torch.autograd.grad(run(x), [x, *parameters], gradient)
    output = run(x)
    (input_gradient,), groups = stage_backward_input([output], [gradient], [x], iter(parameters))
    assert torch.equal(input_gradient, expected[0])
    stage_backward_weight(iter(parameters), groups)
    assert all(torch.equal(p.grad, value) for p, value in zip(parameters, expected[1:], strict=True))


@pytest.mark.parametrize("family", ["gpt", "llama", "mlp"])
def test_bfloat16_autocast_trains_float32_weights(family):
    model = make_model(family, dropout=0.1)
    layers, ids = models.build(model, seed=0), torch.randint(50, (3, 24))
    key = models.sample_keys(0, 0, torch.arange(3))
    exact = models.token_loss(forward(layers, ids, key), ids)
    with torch.autocast("cpu", torch.bfloat16):
        logits = forward(layers, ids, key)
        loss = models.token_loss(logits, ids)
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(exact.detach()), rel=0.01)
    loss.backward()
    for _, module in layers:
        assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in module.parameters())


def train(model: ModelConfig, tokens, steps, learning_rate):
    """Last loss in nats a token of plain Adam on tokens [N, T + 1]."""
    layers = models.build(model, seed=0)
    optimizer = torch.optim.Adam([p for _, module in layers for p in module.parameters()], learning_rate)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = models.token_loss(forward(layers, tokens[:, :-1]), tokens[:, 1:]) / tokens[:, 1:].numel()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def markov_chain(symbols, N, T):
    """Tokens [N, T + 1] of a chain with known transitions, and the conditional entropy of this very sample, nats."""
    generator = torch.Generator().manual_seed(0)
    transitions = torch.rand(symbols, symbols, generator=generator) ** 4
    tokens = torch.randint(symbols, (N, 1), generator=generator)
    for _ in range(T):
        tokens = torch.cat([tokens, torch.multinomial(transitions[tokens[:, -1]], 1, generator=generator)], 1)
    counts = torch.zeros(symbols, symbols).index_put_(
        (tokens[:, :-1].flatten(), tokens[:, 1:].flatten()), torch.ones(N * T), accumulate=True
    )
    frequencies = counts / counts.sum(1, keepdim=True)
    return tokens, float(-(counts * frequencies.clamp_min(1e-9).log()).sum() / counts.sum())


@pytest.mark.parametrize("blocks", [1, 4])
def test_mlp_learns_the_bigrams(blocks):
    """Its floor is exact: no model of one token is below the counts' conditional entropy."""
    tokens, floor = markov_chain(symbols=12, N=32, T=64)
    loss = train(make_model("mlp", blocks=blocks, vocabulary=12), tokens, 300, 3e-3)
    assert floor <= loss + 1e-6 and loss < floor + 0.03


def test_gpt_learns_what_one_token_cannot_tell():
    """Each sequence repeats four random symbols six times: all but 3 of its 23 targets follow from the past."""
    tokens = torch.randint(16, (64, 4), generator=torch.Generator().manual_seed(0)).repeat(1, 6)
    loss = train(make_model(vocabulary=16, blocks=2), tokens, 200, 3e-3)
    assert loss < 3 / 23 * math.log(16) + 0.1
