"""Logits and gradients against transformers' LlamaForCausalLM and GPT2LMHeadModel with the same random weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as fn
from torch import Tensor, nn

import models
from conf.schema import ModelConfig

transformers = pytest.importorskip(
    "transformers", "5", reason="pip install 'transformers>=5' to compare with its models"
)

ROUNDING = 1e-5  # relative, float32
VOCABULARY, HIDDEN, BLOCKS, HEADS, POSITIONS = 50, 32, 3, 4, 64
LLAMA = {  # ours: theirs; block.i and layers.i before the names in blocks
    "attention_norm.weight": "input_layernorm.weight",
    "attention.q.weight": "self_attn.q_proj.weight",
    "attention.k.weight": "self_attn.k_proj.weight",
    "attention.v.weight": "self_attn.v_proj.weight",
    "attention.projection.weight": "self_attn.o_proj.weight",
    "feedforward_norm.weight": "post_attention_layernorm.weight",
    "feedforward.gate.weight": "mlp.gate_proj.weight",
    "feedforward.up.weight": "mlp.up_proj.weight",
    "feedforward.down.weight": "mlp.down_proj.weight",
}
GPT = {  # weights of matrices are [in, out] there
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.projection": "attn.c_proj",
    "feedforward_norm": "ln_2",
    "feedforward.up": "mlp.c_fc",
    "feedforward.down": "mlp.c_proj",
}


def randomised(theirs: nn.Module) -> nn.Module:
    """Every parameter random, so that no bias or norm hides behind a 0 or 1."""
    torch.manual_seed(1)
    for name, parameter in theirs.named_parameters():
        is_norm = parameter.dim() == 1 and name.endswith("weight")
        nn.init.normal_(parameter, mean=1.0 if is_norm else 0.0, std=0.2)
    return theirs.eval()


def llama(tied: bool, key_value_heads: int, scaling: float = 1.0) -> tuple[nn.Module, ModelConfig]:
    scaled = dict(factor=scaling, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    rope = {"rope_type": "default"} if scaling == 1 else {"rope_type": "llama3", **scaled}
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=BLOCKS, num_attention_heads=HEADS,
        num_key_value_heads=key_value_heads, intermediate_size=72, max_position_embeddings=POSITIONS,
        tie_word_embeddings=tied, rms_norm_eps=1e-3, rope_parameters={"rope_theta": 20_000.0, **rope},
    )  # fmt: skip
    model = ModelConfig(
        name="m", family="llama", blocks=BLOCKS, hidden=HIDDEN, heads=HEADS, key_value_heads=key_value_heads,
        feedforward=72, positions=POSITIONS, vocabulary=VOCABULARY, tied=tied, norm_eps=1e-3, rope_theta=20_000.0,
        rope_scaling=scaling,
    )  # fmt: skip
    return randomised(transformers.LlamaForCausalLM(config)), model


def llama_names(model: ModelConfig) -> dict[str, str]:
    blocks = {f"block.{i}.{a}": f"model.layers.{i}.{b}" for i in range(model.blocks) for a, b in LLAMA.items()}
    ends = {"embedding.token.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    return ends | blocks | {"head.weight": "model.embed_tokens.weight" if model.tied else "lm_head.weight"}


def gpt(tied: bool) -> tuple[nn.Module, ModelConfig]:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=BLOCKS, n_head=HEADS, n_positions=POSITIONS,
        tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = ModelConfig(
        name="m", family="gpt", blocks=BLOCKS, hidden=HIDDEN, heads=HEADS, positions=POSITIONS, vocabulary=VOCABULARY,
        tied=tied,
    )  # fmt: skip
    return randomised(transformers.GPT2LMHeadModel(config)), model


def gpt_names(model: ModelConfig) -> dict[str, str]:
    pairs = {f"block.{i}.{a}": f"transformer.h.{i}.{b}" for i in range(model.blocks) for a, b in GPT.items()}
    pairs["norm"] = "transformer.ln_f"
    names = {f"{a}.{kind}": f"{b}.{kind}" for a, b in pairs.items() for kind in ("weight", "bias")}
    names |= {"embedding.token.weight": "transformer.wte.weight", "embedding.position.weight": "transformer.wpe.weight"}
    return names | {"head.weight": "transformer.wte.weight" if model.tied else "lm_head.weight"}


def as_ours(name: str, value: Tensor) -> Tensor:
    """Their parameter (or its gradient) in this project's layout."""
    if ".c_" in name and value.dim() == 2:
        value = value.T  # [in, out] there
    if ".c_attn." in name:  # all queries, keys, values there; here head by head
        value = value.unflatten(0, (3, HEADS, HIDDEN // HEADS)).transpose(0, 1).flatten(0, 2)
    return value


def built(model: ModelConfig, names: dict[str, str], theirs: nn.Module) -> dict[str, nn.Module]:
    """Our layers with their weights; rows of a padded vocabulary that they do not have stay random."""
    layers = dict(models.build(model, seed=0))
    values = theirs.state_dict()
    for name, module in layers.items():
        for own, parameter in module.named_parameters():
            value = as_ours(names[f"{name}.{own}"], values[names[f"{name}.{own}"]])
            parameter.data.normal_()[: len(value)] = value
    return layers


def forward(layers: dict[str, nn.Module], ids: Tensor) -> Tensor:
    x = ids
    for module in layers.values():
        x = module(x)
    return x


def distance(got: Tensor, expected: Tensor) -> float:
    return float(((got - expected).norm() / expected.norm()).detach())


CASES = {
    "llama, no shared heads": (lambda: llama(tied=False, key_value_heads=4), llama_names),
    "llama, two shared, tied": (lambda: llama(tied=True, key_value_heads=2), llama_names),
    "llama, one shared": (lambda: llama(tied=False, key_value_heads=1), llama_names),
    "llama 3.1": (lambda: llama(tied=False, key_value_heads=2, scaling=8.0), llama_names),
    "gpt, tied": (lambda: gpt(tied=True), gpt_names),
    "gpt, untied": (lambda: gpt(tied=False), gpt_names),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients(case):
    make, naming = CASES[case]
    theirs, model = make()
    names = naming(model)
    layers = built(model, names, theirs)
    ids, targets = torch.randint(VOCABULARY, (2, 3, POSITIONS))
    logits, expected = forward(layers, ids), theirs(ids).logits
    assert distance(logits, expected) < ROUNDING
    for each in (logits, expected):
        fn.cross_entropy(each.flatten(0, 1), targets.flatten()).backward()
    gradients = {names[f"{n}.{own}"]: p.grad for n, module in layers.items() for own, p in module.named_parameters()}
    if model.tied:
        owner = names["head.weight"]
        gradients[owner] = layers["head"].weight.grad + layers["embedding"].token.weight.grad
    for name, parameter in theirs.named_parameters():
        assert distance(gradients[name], as_ours(name, parameter.grad)) < 10 * ROUNDING, name


@pytest.mark.parametrize("case", ["llama, two shared, tied", "llama, one shared", "gpt, tied"])
def test_padded_rows_change_no_other_logit(case):
    make, naming = CASES[case]
    theirs, model = make()
    model.vocabulary = 64
    layers = built(model, naming(model), theirs)
    ids = torch.randint(VOCABULARY, (3, POSITIONS))
    with torch.no_grad():
        logits = forward(layers, ids)
        assert logits.shape[-1] == 64
        assert distance(logits[..., :VOCABULARY], theirs(ids).logits) < ROUNDING
