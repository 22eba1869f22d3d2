"""What one layer costs one rank for one micro-batch: forward, backward for the input, for the weights. No torch.

Shape letters: B micro-batch size, T sequence, D hidden, F inner width, H heads, K columns of all keys (and as many of
values), V vocabulary, t tensor ranks.
Each layer is a list of matrix products, element-wise passes (bytes read and written) and messages among tensor ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from math import log
from typing import NamedTuple

from conf.schema import RootConfig
from models.describe import DTYPE_BYTES, LayerSpec, feedforward_width, key_value_width
from pipeline.placement import num_ranks
from planning.links import Group
from planning.memory import micro_batch
from planning.rates import Rates
from planning.stack import Stack


class Matmul(NamedTuple):
    """[rows, inner] x [inner, columns], `batch` times. Without weights I has both gradients."""

    rows: float
    inner: float
    columns: float
    batch: float = 1
    weights: bool = True
    part: float = 1.0  # of the product that is computed: a causal kernel skips half


class Pass(NamedTuple):
    """Element-wise work: bytes moved by the forward, by the backward for the input, and by that for the weights; and
    the exponentials (tanh, erf) that forward and backward take, each."""

    forward: float
    backward: float
    weights: float = 0.0
    exponentials: float = 0.0


class Message(NamedTuple):
    """Bytes that tensor ranks all-reduce (with sequence parallelism gather and scatter: the same bytes) each way.

    arXiv 1909.08053, figure 4; arXiv 2205.05198, section 4.2.2.
    """

    forward: float
    backward: float


@dataclass(frozen=True)
class Cost:
    """Seconds, by what they go into."""

    matmul: float = 0.0
    elementwise: float = 0.0
    tensor: float = 0.0  # communication among tensor ranks

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.matmul + other.matmul, self.elementwise + other.elementwise, self.tensor + other.tensor)

    def __mul__(self, number: int) -> Cost:
        return Cost(self.matmul * number, self.elementwise * number, self.tensor * number)

    def corrected(self, ratio: float) -> Cost:
        return Cost(self.matmul * ratio, self.elementwise * ratio, self.tensor)

    @property
    def total(self) -> float:
        return self.matmul + self.elementwise + self.tensor


@dataclass(frozen=True)
class LayerCost:
    """F, I and W of a layer; `attention` is the part of F that selective recomputation repeats."""

    forward: Cost
    backward_input: Cost
    backward_weight: Cost
    attention: Cost = Cost()

    def __add__(self, other: LayerCost) -> LayerCost:
        return LayerCost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(LayerCost)))

    def __mul__(self, number: int) -> LayerCost:
        return LayerCost(*(getattr(self, f.name) * number for f in fields(LayerCost)))


Op = Matmul | Pass | Message


def layer_cost(spec: LayerSpec, config: RootConfig, stack: Stack, device: Rates, tensor: Group) -> LayerCost:
    """The layer's seconds on one rank for one micro-batch. config: resolved."""
    shape = _Shape.of(config, stack)
    ops = layer_ops(spec, config, stack)
    if stack.weight_copies and shape.compute < 4:
        ops.append(_weight_copies(spec, shape))
    elif spec.kind in ("block", "head"):  # the gradients of a micro-batch are added to those of the others
        ops.append(Pass(0, 0, 3 * stack.gradient_bytes * _matrix_elements(spec) / shape.t))
    if spec.kind == "embedding" and stack.name == "torch":  # its gradient is dense: cleared, filled, added to the sum
        ops.append(Pass(0, 0, 4 * DTYPE_BYTES["float32"] * _matrix_elements(spec) / shape.t))
    core = list(_attention(shape)) if spec.kind == "block" and config.model.family != "mlp" else []
    whole = [*_seconds(ops, stack, device, tensor), _seconds(core, stack, device, tensor)[0]]
    hardware, parallel, ratio = config.hardware, config.parallel, 1.0
    if points := hardware.corrections.get(spec.kind):
        ratio = correction(points, forward_flops(ops))
    if num_ranks(parallel) > 1:
        ratio *= 1 + (hardware.rank_slowdown or 0.0)
    return LayerCost(*(cost.corrected(ratio) for cost in whole))


def layer_ops(spec: LayerSpec, config: RootConfig, stack: Stack) -> list[Op]:
    """What the layer does; what its weights' gradients take besides is layer_cost's."""
    makers = {"embedding": _embedding, "block": _block, "norm": _norm, "head": _head}
    if config.model.family != "gpt":
        makers["block"] = {"llama": _llama_block, "mlp": _mlp_block}[config.model.family]
    return list(makers[spec.kind](_Shape.of(config, stack)))


def forward_flops(ops: list[Op]) -> float:
    """Of a layer's matrix products on one rank, for one micro-batch."""
    products = (op for op in ops if isinstance(op, Matmul))
    return sum(2 * op.rows * op.inner * op.columns * op.batch * op.part for op in products)


def correction(points: list[list[float]], flops: float) -> float:
    """Measured / planned seconds between calibrated layers, linear in the logarithm of FLOPs; beyond them the last."""
    (least, ratio), *_ = points
    for (left, start), (right, end) in pairwise(points):
        if flops > left:
            ratio = start + (end - start) * min(1.0, log(flops / left) / log(right / left))
    return ratio if flops > least else points[0][1]


@dataclass(frozen=True)
class _Shape:
    tokens: int  # B x T
    shared: float  # tokens whose norms and residuals this rank computes: 1/t of them with sequence parallelism
    B: int
    T: int
    D: int
    F: int
    H: int
    K: int
    V: int
    t: int
    compute: int  # bytes of an element in matrix products
    stream: int  # bytes of an element of the residual stream
    dropout: bool
    fused: bool
    attention_dropout: bool

    @classmethod
    def of(cls, config: RootConfig, stack: Stack) -> _Shape:
        model, train, parallel = config.model, config.train, config.parallel
        B = micro_batch(config)
        compute = DTYPE_BYTES[train.precision]
        t = parallel.tensor
        return cls(
            tokens=B * train.sequence,
            shared=B * train.sequence / (t if parallel.sequence_parallel else 1),
            B=B,
            T=train.sequence,
            D=model.hidden,
            F=feedforward_width(model),
            H=model.heads,
            K=key_value_width(model),
            V=model.vocabulary,
            t=t,
            compute=compute,
            stream=stack.stream_bytes if compute == 2 else compute,
            dropout=model.dropout > 0,
            fused=stack.fused_attention,
            attention_dropout=stack.attention_dropout and model.dropout > 0,
        )


def _block(s: _Shape) -> Iterator[Op]:
    n, t = s.tokens, s.t
    yield from _norm(s)
    yield Matmul(n, s.D, 3 * s.D / t)
    yield from _attention(s)
    yield Matmul(n, s.D / t, s.D)
    yield from _residual(s)
    yield from _norm(s)
    yield Matmul(n, s.D, s.F / t)
    inner = n * s.F / t
    yield Pass(2 * inner * s.compute, 3 * inner * s.compute, exponentials=inner)  # GELU
    yield Matmul(n, s.F / t, s.D)
    yield from _residual(s)
    for _ in range(2):  # after attention and feed-forward; in the backward, before them
        yield Message(n * s.D * s.compute, n * s.D * s.compute)


def _llama_block(s: _Shape) -> Iterator[Op]:
    n, t = s.tokens, s.t
    yield from _norm(s)
    yield Matmul(n, s.D, s.D / t)
    yield Matmul(n, s.D, s.K / t)
    yield Matmul(n, s.D, s.K / t)
    rotated = n * (s.D + s.K) / t * s.compute
    yield Pass(2 * rotated, 2 * rotated)  # queries and keys by their positions
    yield from _attention(s)
    yield Matmul(n, s.D / t, s.D)
    yield from _residual(s)
    yield from _norm(s)
    yield Matmul(n, s.D, s.F / t)
    yield Matmul(n, s.D, s.F / t)
    inner = n * s.F / t
    yield Pass(3 * inner * s.compute, 5 * inner * s.compute, exponentials=inner)  # SiLU of the gate, times the other
    yield Matmul(n, s.F / t, s.D)
    yield from _residual(s)
    for _ in range(2):  # after attention and feed-forward; in the backward, before them
        yield Message(n * s.D * s.compute, n * s.D * s.compute)


def _norm(s: _Shape) -> Iterator[Op]:
    cast = (s.stream + s.compute) if s.stream != s.compute else 0
    elements = s.shared * s.D
    yield Pass(elements * (2 * s.stream + cast), elements * (3 * s.stream + cast))


def _residual(s: _Shape) -> Iterator[Op]:
    """Dropout of the branch and its addition to the stream."""
    elements = s.shared * s.D
    mask = 1 if s.dropout else 0
    yield Pass(elements * (s.compute + 2 * s.stream + mask), elements * (s.stream + s.compute + mask))


def _attention(s: _Shape) -> Iterator[Op]:
    heads, width = s.B * s.H / s.t, s.D / s.H
    part = 0.5 if s.fused else 1.0
    yield Matmul(s.T, width, s.T, heads, weights=False, part=part)
    yield Matmul(s.T, s.T, width, heads, weights=False, part=part)
    scores = heads * s.T**2
    if s.fused:  # in the same kernel as the products: nothing moved; again in the backward
        yield Pass(0, 0, exponentials=part * scores)
        return
    yield Pass(2 * s.compute * scores, 3 * s.compute * scores)  # scale, mask and softmax in one kernel
    if s.attention_dropout:
        yield Pass((2 * s.compute + 1) * scores, (2 * s.compute + 1) * scores)


def _embedding(s: _Shape) -> Iterator[Op]:
    elements = s.tokens * s.D
    yield Pass(elements * 3 * s.stream, 0, elements * 3 * s.stream)  # two look-ups and their sum; added up backward
    yield Message(elements * s.compute, 0)


def _head(s: _Shape) -> Iterator[Op]:
    """The product, then the loss in float32: cast, maximum, exponentials and their sum; once more backward."""
    loss = max(4, s.compute)
    logits = s.tokens * s.V / s.t
    yield Matmul(s.tokens, s.D, s.V / s.t)
    yield Pass(logits * (s.compute + 4 * loss), logits * (s.compute + 2 * loss))
    yield Message(3 * s.tokens * loss, s.tokens * s.D * s.compute)


def _mlp_block(s: _Shape) -> Iterator[Op]:
    yield Matmul(s.tokens, s.D, s.D)
    yield Pass(2 * s.tokens * s.D * s.compute, 3 * s.tokens * s.D * s.compute)


def _matrix_elements(spec: LayerSpec) -> int:
    return sum(shape[0] * shape[1] for shape in spec.parameters.values() if len(shape) == 2)


def _weight_copies(spec: LayerSpec, s: _Shape) -> Pass:
    """Autocast: float32 weights are read and written in 16 bits; 16-bit gradients are cast and added in float32."""
    elements = _matrix_elements(spec) / s.t if spec.kind in ("block", "head") else 0
    return Pass(elements * (4 + s.compute), 0, elements * (s.compute + 3 * 4 + 4))


def _seconds(ops: list[Op], stack: Stack, device: Rates, tensor: Group) -> tuple[Cost, Cost, Cost]:
    """F, I and W."""
    matmul, elementwise, messages = [0.0] * 3, [0.0] * 3, [0.0] * 3
    for op in ops:
        if isinstance(op, Matmul):
            rows, inner, columns, batch, weights, part = op
            matmul[0] += device.matmul_s(rows, inner, columns, batch) * part
            matmul[1] += device.matmul_s(rows, columns, inner, batch) * part
            matmul[2 if weights else 1] += device.matmul_s(inner, rows, columns, batch) * part
        elif isinstance(op, Pass):
            special = device.exponentials_s(op.exponentials)
            for i, moved in enumerate(op[:3]):
                traffic = device.pass_s(moved) * stack.elementwise if moved else 0.0
                elementwise[i] += max(traffic, special if i < 2 else 0.0)
        else:
            for i, message in enumerate(op):
                messages[i] += tensor.all_reduce_s(message)
    return tuple(Cost(*parts) for parts in zip(matmul, elementwise, messages, strict=True))
