"""What each layer of a model holds and costs, told from its config: names, shapes, FLOPs, bytes. Imports no torch.

Shape letters: B micro-batch size, T sequence, D model (hidden), F inner width of the feed-forward, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from conf.schema import ModelConfig

FAMILIES = ("gpt", "mlp")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True)
class LayerSpec:
    """One layer of the list: the names are those of its parameters in a checkpoint, whatever the cut."""

    name: str  # embedding, block.0 ... block.N-1, norm, head
    kind: str  # embedding | block | norm | head
    parameters: dict[str, tuple[int, ...]]  # canonical name -> shape
    tied: dict[str, str] = field(default_factory=dict)  # name of a copy -> name of its owner


def describe(model: ModelConfig) -> list[LayerSpec]:
    """The layers of `model` in order. ValueError for an unknown family or a vocabulary that is not yet resolved."""
    if model.family not in FAMILIES:
        raise ValueError(f"model.family={model.family} is not known; known: {', '.join(FAMILIES)}")
    if model.vocabulary is None:
        raise ValueError("model.vocabulary is null; resolve the config first, or give the number of tokens")
    D, V = model.hidden, model.vocabulary
    embedding = {"embedding.token.weight": (V, D)}
    if model.family == "gpt":
        embedding["embedding.position.weight"] = (model.positions, D)
        block = _gpt_block(D, feedforward_width(model))
    else:
        block = {"linear.weight": (D, D), "linear.bias": (D,)}
    specs = [LayerSpec("embedding", "embedding", embedding)]
    for i in range(model.blocks):
        specs.append(LayerSpec(f"block.{i}", "block", {f"block.{i}.{name}": shape for name, shape in block.items()}))
    if model.family == "gpt":
        specs.append(LayerSpec("norm", "norm", {"norm.weight": (D,), "norm.bias": (D,)}))
    tied = {"head.weight": "embedding.token.weight"} if model.tied else {}
    specs.append(LayerSpec("head", "head", {"head.weight": (V, D)}, tied))
    return specs


def feedforward_width(model: ModelConfig) -> int:
    """F: the inner width of a GPT block's feed-forward, 4 x hidden unless the config says otherwise."""
    return 4 * model.hidden if model.feedforward is None else model.feedforward


def _gpt_block(D: int, F: int) -> dict[str, tuple[int, ...]]:
    return {
        "attention_norm.weight": (D,),
        "attention_norm.bias": (D,),
        "attention.qkv.weight": (3 * D, D),
        "attention.qkv.bias": (3 * D,),
        "attention.projection.weight": (D, D),
        "attention.projection.bias": (D,),
        "feedforward_norm.weight": (D,),
        "feedforward_norm.bias": (D,),
        "feedforward.up.weight": (F, D),
        "feedforward.up.bias": (F,),
        "feedforward.down.weight": (D, F),
        "feedforward.down.bias": (D,),
    }


def num_parameters(specs: list[LayerSpec]) -> int:
    """Parameters of these layers, a tied weight counted once (a copy whose owner is not among them counts)."""
    shapes: dict[str, tuple[int, ...]] = {}
    for spec in specs:
        shapes.update({spec.tied.get(name, name): shape for name, shape in spec.parameters.items()})
    return sum(prod(shape) for shape in shapes.values())


def _matrix_elements(spec: LayerSpec) -> int:
    """Elements of the weights that a matrix product reads (an embedding only looks up)."""
    if spec.kind == "embedding":
        return 0
    return sum(prod(shape) for shape in spec.parameters.values() if len(shape) == 2)


def forward_flops(spec: LayerSpec, model: ModelConfig, sequence: int) -> int:
    """FLOPs of the layer's forward on one sequence of `sequence` tokens: matrix products only, a multiply-add is 2.

    Attention counts the whole T x T square (scores and weighted sum: 4 T^2 D), also above the causal diagonal, as
    torch's FlopCounterMode and the PaLM paper (appendix B) do.
    """
    flops = 2 * sequence * _matrix_elements(spec)
    if spec.kind == "block" and model.family == "gpt":
        flops += 4 * sequence**2 * model.hidden
    return flops


def model_flops_per_token(model: ModelConfig, sequence: int) -> float:
    """FLOPs a trained token for the model-FLOP/s utilisation (mfu): forward, and twice that for the backward.

    PaLM's convention (appendix B): 6 for each parameter in a matrix product (the head included, look-ups not) plus
    12 L D T for attention, its causal half not taken off; recomputation by activation checkpointing is not counted.
    """
    return 3 * sum(forward_flops(spec, model, sequence) for spec in describe(model)) / sequence


def activation_bytes(
    spec: LayerSpec, model: ModelConfig, micro_batch: int, sequence: int, precision: str, checkpointed: bool
) -> int:
    """Bytes that the layer keeps from the forward of one micro-batch until its backward.

    A layer counts its input and what it makes inside, never its output (the next layer's input), so a sum over layers
    counts nothing twice. `precision` is float32, float64 or bfloat16 (autocast: the residual stream stays float32,
    inputs of matrix products are kept as bfloat16, and so is the bfloat16 copy of each matrix, once a micro-batch).
    `checkpointed`: only the input and the dropout keys. The loss belongs to no layer (planning.memory counts it).
    """
    B, T, D = micro_batch, sequence, model.hidden
    compute = DTYPE_BYTES[precision]
    stream = 4 if precision == "bfloat16" else compute
    tokens = B * T
    if checkpointed:
        return input_bytes(spec, model, B, T, precision) + (8 * B if model.dropout else 0)
    mask = tokens * D if model.dropout else 0  # one byte an element
    copies = 2 * _matrix_elements(spec) if precision == "bfloat16" else 0
    statistics = 2 * stream * tokens  # a norm's mean and inverse standard deviation
    if spec.kind == "embedding":
        return 8 * tokens + mask  # the ids
    if spec.kind == "norm":
        return stream * tokens * D + statistics
    if spec.kind == "head" or model.family == "mlp":
        return compute * tokens * D + copies
    F = feedforward_width(model)
    streams = 2 * (stream * tokens * D + statistics)  # inputs of the two norms
    # inputs of qkv and up, q k v, the attention's output (the projection's input); before and after GELU
    matrices = compute * tokens * ((1 + 1 + 3 + 1) * D + 2 * F)
    logsumexp = stream * tokens * model.heads  # of each row of attention scores
    return streams + matrices + logsumexp + 2 * mask + copies


def input_bytes(spec: LayerSpec, model: ModelConfig, micro_batch: int, sequence: int, precision: str) -> int:
    """Bytes of the layer's input for one micro-batch (a message, where it opens a stage); token ids are int64."""
    tokens = micro_batch * sequence
    if spec.kind == "embedding":
        return 8 * tokens
    if precision != "bfloat16":
        return tokens * model.hidden * DTYPE_BYTES[precision]
    # autocast keeps embeddings, residuals and norms in float32; only an mlp's Linear hands on bfloat16
    after_linear = model.family == "mlp" and model.blocks > 0 and spec.name != "block.0"
    return tokens * model.hidden * (2 if after_linear else 4)
