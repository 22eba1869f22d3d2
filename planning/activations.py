"""What tensor and sequence parallelism leave of a layer's activations on one rank. Imports no torch.

Shape letters: B micro-batch size, T sequence, D hidden, F inner width, H heads, t tensor ranks.
"""

from __future__ import annotations

from math import ceil, prod

from conf.schema import ModelConfig
from models.describe import DTYPE_BYTES, LayerSpec, activation_bytes, feedforward_width

# What tensor ranks share of a layer's parameters: columns or rows of each matrix, with the biases of columns
# (arXiv 1909.08053, section 3). The others (norms, positions, biases after a sum) are whole on every rank.
SHARED = (
    "token.weight qkv.weight qkv.bias projection.weight up.weight up.bias down.weight head.weight linear.weight"
).split()


def tensor_elements(spec: LayerSpec, tensor: int) -> int:
    """Elements of the layer's parameters on one of `tensor` ranks."""
    if tensor == 1:
        return sum(map(prod, spec.parameters.values()))
    return sum(
        ceil(prod(shape) / tensor) if name.endswith(tuple(SHARED)) else prod(shape)
        for name, shape in spec.parameters.items()
    )


def block_parts(
    *, B: int, T: int, D: int, F: int, H: int, stream: int, compute: int, dropout: bool, fused: bool
) -> tuple[int, int]:
    """Bytes that a GPT block keeps of one micro-batch: what every tensor rank holds whole (only sequence parallelism
    shares it), and what tensor ranks share. The norms' statistics are left out.

    stream, compute: bytes of an element of the residual stream and of the operands of matrix products. With 2 and 2,
    dropout and scores that are not fused these are the 10 and the 24 + 5 a s / h of arXiv 2205.05198, section 4.
    """
    tokens = B * T
    whole = 2 * stream * tokens * D  # inputs of the two norms
    whole += 2 * compute * tokens * D  # inputs of qkv and up
    whole += 2 * tokens * D if dropout else 0  # masks, one byte an element
    shared = compute * tokens * (4 * D + 2 * F)  # q, k, v, the attention's output; before and after GELU
    if fused:
        shared += stream * tokens * H  # the log-sum-exp of each row of scores
    else:  # softmax, its dropout's mask, and what comes out of it
        shared += B * H * T * T * (compute + (1 + compute if dropout else 0))
    return whole, shared


def rank_activation_bytes(
    spec: LayerSpec,
    model: ModelConfig,
    micro_batch: int,
    sequence: int,
    precision: str,
    checkpointed: bool,
    tensor: int = 1,
    sequence_parallel: bool = False,
) -> int:
    """models.describe.activation_bytes on one of `tensor` ranks."""
    held = activation_bytes(spec, model, micro_batch, sequence, precision, checkpointed)
    if tensor == 1:
        return held
    compute = DTYPE_BYTES[precision]
    shared = 0
    if not checkpointed and spec.kind == "block" and model.family == "gpt":
        _, shared = block_parts(
            B=micro_batch,
            T=sequence,
            D=model.hidden,
            F=feedforward_width(model),
            H=model.heads,
            stream=4 if precision == "bfloat16" else compute,
            compute=compute,
            dropout=model.dropout > 0,
            fused=True,
        )
    if not checkpointed and precision == "bfloat16" and spec.kind in ("block", "head"):  # copies of the matrices
        shared += compute * sum(prod(shape) for shape in spec.parameters.values() if len(shape) == 2)
    whole = held - shared
    if sequence_parallel and spec.kind != "embedding":  # every rank looks up all ids
        whole /= tensor
    return ceil(whole + shared / tensor)
