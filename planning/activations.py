"""What tensor and sequence parallelism leave of a layer's activations on one rank. Imports no torch."""

from __future__ import annotations

from math import ceil, prod

from conf.schema import ModelConfig
from models.describe import LayerSpec, activation_bytes, activation_parts

# What tensor ranks share of a layer's parameters: columns or rows of each matrix, with the biases of columns
# (arXiv 1909.08053, section 3). The others (norms, positions, biases after a sum) are whole on every rank.
SHARED = (
    "token.weight qkv.weight qkv.bias q.weight k.weight v.weight projection.weight gate.weight up.weight up.bias "
    "down.weight head.weight linear.weight"
).split()


def tensor_elements(spec: LayerSpec, tensor: int) -> int:
    """Elements of the layer's parameters on one of `tensor` ranks."""
    if tensor == 1:
        return sum(map(prod, spec.parameters.values()))
    return sum(
        ceil(prod(shape) / tensor) if name.endswith(tuple(SHARED)) else prod(shape)
        for name, shape in spec.parameters.items()
    )


def rank_activation_bytes(
    spec: LayerSpec,
    model: ModelConfig,
    micro_batch: int,
    sequence: int,
    precision: str,
    checkpointed: bool,
    tensor: int = 1,
    sequence_parallel: bool = False,
    fused_norm: bool = True,
) -> int:
    """models.describe.activation_bytes on one of `tensor` ranks."""
    held = activation_bytes(spec, model, micro_batch, sequence, precision, checkpointed, fused_norm)
    if tensor == 1:
        return held
    shared = 0 if checkpointed else activation_parts(spec, model, micro_batch, sequence, precision, fused_norm)[1]
    whole = held - shared
    if sequence_parallel and spec.kind != "embedding":  # every rank looks up all ids
        whole /= tensor
    return ceil(whole + shared / tensor)
