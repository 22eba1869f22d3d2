"""Tensor parallelism: for each family the plan by which torch shares a layer among the ranks of a mesh dimension.

Column- and row-parallel products, a vocabulary-parallel embedding and head (Shoeybi et al., Megatron-LM, arXiv
1909.08053), and, with sequence parallelism, norms, dropout and the residual stream on a part of the sequence
(Korthikanti et al., arXiv 2205.05198). Layers take and give plain tensors: [B, T, D] whole on every rank, or
[B, T / t, D], a part.
Shape letters: B micro-batch size, T sequence, D model (hidden), V vocabulary, t tensor ranks.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from models.dropout import Dropout

# products that each rank has some columns of, and those whose rows follow
_COLUMNS = {
    "gpt": ("attention.qkv", "feedforward.up"),
    "llama": ("attention.q", "attention.k", "attention.v", "feedforward.gate", "feedforward.up"),
}
_ROWS = ("attention.projection", "feedforward.down")


def parallelize(module: nn.Module, kind: str, family: str, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Shares one layer among the ranks of the one-dimensional `mesh`, in place; each keeps its part of what it has.

    `kind`: embedding, block, norm or head. Every rank must hold the same whole weights: nothing is sent. The head then
    gives its logits as a DTensor [B, T, V], a part of the vocabulary on each rank: for torch's loss_parallel.
    """
    stream = Shard(1) if sequence_parallel else Replicate()
    plan = _plan(module, kind, family, stream)
    if plan:
        parallelize_module(module, mesh, plan, src_data_rank=None)
        _free_the_rest(module)
    if sequence_parallel:
        for part in module.modules():
            if isinstance(part, Dropout):
                part.part = mesh.get_local_rank()


def _plan(module: nn.Module, kind: str, family: str, stream: Replicate | Shard) -> ParallelStyle | dict | None:
    sequence = isinstance(stream, Shard)
    if kind == "head":
        return ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False)
    if kind == "norm":
        return SequenceParallel(use_local_output=True) if sequence else None
    if kind == "embedding":
        plan = {"token": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)}
        return plan | ({"position": _PartOfPositions()} if sequence and hasattr(module, "position") else {})
    # the input is gathered once for all the products that read it, and its gradient reduced once
    plan = {
        "attention": PrepareModuleInput(input_layouts=(stream, None), desired_input_layouts=(Replicate(), None)),
        "feedforward": PrepareModuleInput(input_layouts=stream, desired_input_layouts=Replicate()),
    }
    plan |= {name: ColwiseParallel() for name in _COLUMNS[family]}
    plan |= {name: RowwiseParallel(output_layouts=stream) for name in _ROWS}
    if sequence:
        plan |= {f"{name}_norm": SequenceParallel(use_local_output=True) for name in ("attention", "feedforward")}
    return plan


class _PartOfPositions(ParallelStyle):
    """A table that every rank has and of which each reads its own rows: their gradients are parts of the sum."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, output_fn=self._local)

    @staticmethod
    def _local(module: nn.Module, rows: DTensor, device_mesh: DeviceMesh) -> torch.Tensor:
        return rows.to_local(grad_placements=[Partial()])


@torch.no_grad()
def _free_the_rest(module: nn.Module) -> None:
    """A rank's part may be a view that keeps the whole weight in memory: it gets a storage of its own."""
    for parent in module.modules():
        for name, parameter in parent.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                own = parameter.to_local()
                if own.untyped_storage().nbytes() > own.numel() * own.element_size() and own.device.type != "meta":
                    own = own.clone(memory_format=torch.contiguous_format)
                    shared = DTensor.from_local(
                        own, parameter.device_mesh, parameter.placements, run_check=False,
                        shape=parameter.shape, stride=parameter.stride(),
                    )  # fmt: skip
                    parent.register_parameter(name, nn.Parameter(shared, requires_grad=parameter.requires_grad))
