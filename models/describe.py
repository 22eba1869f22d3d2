"""What each layer of a model holds and costs, told from its config: names, shapes, FLOPs, bytes. Imports no torch.

Shape letters: B micro-batch size, T sequence, D model (hidden), H heads, F inner width of the feed-forward,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, prod

from conf.schema import ModelConfig

FAMILIES = ("gpt", "llama", "mlp")
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
    norm = {"norm.weight": (D,)}
    if model.family == "gpt":
        embedding["embedding.position.weight"] = (model.positions, D)
        norm["norm.bias"] = (D,)
        block = _gpt_block(D, feedforward_width(model))
    elif model.family == "llama":
        block = _llama_block(D, feedforward_width(model), key_value_width(model))
    else:
        block = {"linear.weight": (D, D), "linear.bias": (D,)}
    specs = [LayerSpec("embedding", "embedding", embedding)]
    for i in range(model.blocks):
        specs.append(LayerSpec(f"block.{i}", "block", {f"block.{i}.{name}": shape for name, shape in block.items()}))
    if model.family != "mlp":
        specs.append(LayerSpec("norm", "norm", norm))
    tied = {"head.weight": "embedding.token.weight"} if model.tied else {}
    specs.append(LayerSpec("head", "head", {"head.weight": (V, D)}, tied))
    return specs


def feedforward_width(model: ModelConfig) -> int:
    """F: the inner width of a block's feed-forward. Unless the config says otherwise 4 x hidden; for a Llama, whose
    SwiGLU has three matrices, two thirds of that (arXiv 2002.05202, section 3), rounded up to a multiple of 64.
    """
    if model.feedforward is not None:
        return model.feedforward
    return ceil(8 * model.hidden / 3 / 64) * 64 if model.family == "llama" else 4 * model.hidden


def key_value_width(model: ModelConfig) -> int:
    """Columns of all keys of a token, and of all values: fewer than hidden where query heads share them (llama)."""
    if model.family != "llama":
        return model.hidden
    return model.hidden // model.heads * (model.key_value_heads or model.heads)


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


def is_hidden_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is a matrix inside a block: what optimizer=muon takes; embeddings and head are not."""
    return name.startswith("block.") and len(shape) == 2


def _llama_block(D: int, F: int, key_value_width: int) -> dict[str, tuple[int, ...]]:
    return {
        "attention_norm.weight": (D,),
        "attention.q.weight": (D, D),
        "attention.k.weight": (key_value_width, D),
        "attention.v.weight": (key_value_width, D),
        "attention.projection.weight": (D, D),
        "feedforward_norm.weight": (D,),
        "feedforward.gate.weight": (F, D),
        "feedforward.up.weight": (F, D),
        "feedforward.down.weight": (D, F),
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
    if spec.kind == "block" and model.family != "mlp":
        flops += 4 * sequence**2 * model.hidden
    return flops


def model_flops_per_token(model: ModelConfig, sequence: int) -> float:
    """FLOPs a trained token for the model-FLOP/s utilisation (mfu): forward, and twice that for the backward.

    PaLM's convention (appendix B): 6 for each parameter in a matrix product (the head included, look-ups not) plus
    12 L D T for attention, its causal half not taken off; recomputation by activation checkpointing is not counted.
    """
    return 3 * sum(forward_flops(spec, model, sequence) for spec in describe(model)) / sequence


def activation_bytes(
    spec: LayerSpec,
    model: ModelConfig,
    micro_batch: int,
    sequence: int,
    precision: str,
    checkpointed: bool,
    fused_norm: bool = True,
) -> int:
    """Bytes that the layer keeps from the forward of one micro-batch until its backward.

    A layer counts its input and what it makes inside, never its output (the next layer's input), so a sum over layers
    counts nothing twice. `precision` is float32, float64 or bfloat16 (autocast: the residual stream stays float32,
    inputs of matrix products are kept as bfloat16, and so is the bfloat16 copy of each matrix, once a micro-batch).
    `checkpointed`: only the input and the dropout keys. `fused_norm`: see activation_parts. The loss belongs to no
    layer (planning.memory counts it).
    """
    if checkpointed:
        keys = 8 * micro_batch if model.dropout else 0
        return input_bytes(spec, model, micro_batch, sequence, precision) + keys
    return sum(activation_parts(spec, model, micro_batch, sequence, precision, fused_norm))


def activation_parts(
    spec: LayerSpec, model: ModelConfig, micro_batch: int, sequence: int, precision: str, fused_norm: bool = True
) -> tuple[int, int]:
    """The bytes of a layer that is not checkpointed: what every tensor-parallel rank holds whole (only sequence
    parallelism shares it), and what tensor ranks share.

    fused_norm: RMSNorm is one kernel, as on CUDA; torch's on CPU keeps the normalised tensor beside its input. The
    table of rotary positions is one for all layers and micro-batches, and counted nowhere.
    """
    tokens, D = micro_batch * sequence, model.hidden
    compute = DTYPE_BYTES[precision]
    stream = 4 if precision == "bfloat16" else compute
    copies = 2 * _matrix_elements(spec) if precision == "bfloat16" else 0
    # RMSNorm: the inverse root mean square; LayerNorm: the mean and the inverse standard deviation
    per_token = 1 + (0 if fused_norm else D) if model.family == "llama" else 2
    statistics = stream * tokens * per_token
    if spec.kind == "embedding":
        return tokens * (8 + (D if model.dropout else 0)), 0  # the ids; a mask of one byte an element
    if spec.kind == "norm":
        return stream * tokens * D + statistics, 0
    if spec.kind == "head" or model.family == "mlp":
        return compute * tokens * D, copies
    whole, shared = block_parts(
        B=micro_batch,
        T=sequence,
        D=D,
        F=feedforward_width(model),
        H=model.heads,
        stream=stream,
        compute=compute,
        dropout=model.dropout > 0,
        fused=True,
        key_value_width=key_value_width(model),
        gated=model.family == "llama",
    )
    return whole + 2 * statistics, shared + copies


def document_bytes(
    spec: LayerSpec, model: ModelConfig, micro_batch: int, sequence: int, precision: str, tensor: int = 1
) -> int:
    """What the layer keeps on one of `tensor` ranks beside activation_bytes where attention stays inside its document:
    a mask, whole on every rank, in the operands' precision; a Llama's keys and values anew for each query head."""
    if spec.kind != "block" or model.family == "mlp":
        return 0
    repeated = 2 * micro_batch * sequence * (model.hidden - key_value_width(model)) // tensor
    return DTYPE_BYTES[precision] * (micro_batch * sequence**2 + repeated)


def block_parts(
    *,
    B: int,
    T: int,
    D: int,
    F: int,
    H: int,
    stream: int,
    compute: int,
    dropout: bool,
    fused: bool,
    key_value_width: int | None = None,
    gated: bool = False,
) -> tuple[int, int]:
    """Bytes that a block keeps of one micro-batch, whole and shared as in activation_parts: a GPT's, or (gated, with
    key_value_width columns of keys and as many of values) a Llama's. What the norms make for themselves is left out.

    stream, compute: bytes of an element of the residual stream and of the operands of matrix products. With 2 and 2,
    dropout and scores that are not fused these are the 10 and the 24 + 5 a s / h of arXiv 2205.05198, section 4.
    """
    tokens = B * T
    whole = 2 * stream * tokens * D  # inputs of the two norms
    whole += 2 * compute * tokens * D  # what comes out of them: inputs of q, k, v and of gate and up
    whole += 2 * tokens * D if dropout else 0  # masks, one byte an element
    shared = compute * tokens * 2 * (D + (D if key_value_width is None else key_value_width))  # q, k, v, their mixture
    shared += compute * tokens * (4 if gated else 2) * F  # before and after GELU; gate, SiLU of it, up, the product
    if fused:
        shared += stream * tokens * H  # the log-sum-exp of each row of scores
    else:  # softmax, its dropout's mask, and what comes out of it
        shared += B * H * T * T * (compute + (1 + compute if dropout else 0))
    return whole, shared


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
