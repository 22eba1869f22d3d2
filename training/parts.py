"""What a rank holds of parameters that ranks share: which parts to count once, and how to put them together."""

from __future__ import annotations

from torch import Tensor

from pipeline.engines.base import is_shared
from pipeline.placement import Place


def counted_here(parameter: Tensor, where: Place) -> bool:
    """Whether the rank at `where` adds what it holds to a sum over all ranks: every part of a shared parameter once,
    what several ranks hold the same of by the first of them."""
    split: set[str] = set()
    if is_shared(parameter):
        names = parameter.device_mesh.mesh_dim_names
        split = {name for name, kind in zip(names, parameter.placements, strict=True) if not kind.is_replicate()}
    return all(rank == 0 or name in split for name, rank in (("data", where.data), ("tensor", where.tensor)))


def whole(tensor: Tensor) -> Tensor:
    """All of it, on every rank that shares it; these call it together."""
    return tensor.full_tensor() if is_shared(tensor) else tensor
