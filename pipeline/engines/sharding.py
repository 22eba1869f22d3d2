"""Data parallelism by torch's FSDP2: what a data rank holds of each layer, and when gradients are added up.

    none        every data rank holds everything; one all-reduce of the gradients a step (torch's replicate)
    optimizer   weights, gradients and optimizer state live in parts; one gather and one reduce-scatter a step (ZeRO-1's
                memory for the optimizer: whole weights and gradients are there from first forward to last backward)
    gradients   as optimizer, and each micro-batch's gradients are reduced at once (ZeRO-2)
    full        as gradients for the weights too: gathered anew for each layer's forward and backward (ZeRO-3)

Rajbhandari et al., arXiv 1910.02054, for the levels; Zhao et al., arXiv 2304.11277, for FSDP.
"""

from __future__ import annotations

import warnings

from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

# torch warns of layers whose output is a view (of a collective's result), on which an operation in place would lose
# FSDP's hook: a layer's output is never changed in place here
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def share(module: nn.Module, mesh: DeviceMesh, level: str) -> None:
    """Makes the ranks of the one-dimensional `mesh` data ranks of `module`, in place; for each layer, then for the
    stage that holds them. Every rank must hold the same weights. Gradients are sums over data ranks, not means: the
    loss is scaled by the tokens of all."""
    if level == "none":
        replicate(module, mesh=mesh)
    else:
        fully_shard(module, mesh=mesh, reshard_after_forward=level == "full")
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
