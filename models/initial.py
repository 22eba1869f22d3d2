"""Builds any part of a model's list of layers, with initial weights keyed by (seed, parameter name).

No weight depends on which other layers the process builds, so every cut starts from the same model.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from conf.schema import ModelConfig
from models import gpt, llama, mlp
from models.describe import describe

_MAKE_LAYER = {"gpt": gpt.make_layer, "llama": llama.make_layer, "mlp": mlp.make_layer}
_PIECE = 1 << 22  # elements drawn at a time: the extra memory when the weight itself cannot be drawn in place


def build(
    model: ModelConfig,
    *,
    seed: int,
    start: int = 0,
    stop: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> list[tuple[str, nn.Module]]:
    """Layers start..stop (exclusive; None: to the end) of the list as (name, module), only those allocated.

    f"{layer name}.{parameter name}" is the canonical name. device="meta" gives shapes without memory. ValueError for
    an unknown family or an unresolved vocabulary.
    """
    layers = []
    for index, spec in list(enumerate(describe(model)))[start:stop]:
        with torch.device("meta"):  # torch's own initial weights would be drawn only to be overwritten
            module = _MAKE_LAYER[model.family](model, spec.kind, index).to(dtype)
        if torch.device(device).type != "meta":
            module = module.to_empty(device=device)
            for name, parameter in module.named_parameters():
                canonical = f"{spec.name}.{name}"
                initialise(parameter, spec.tied.get(canonical, canonical), model, seed)
        layers.append((spec.name, module))
    return layers


@torch.no_grad()
def initialise(parameter: Tensor, name: str, model: ModelConfig, seed: int) -> None:
    """Fills `parameter` in place with the initial weight of `name` (a tied copy: its owner's name).

    GPT-2, and llama likewise: normal of model.initializer_std, divided by sqrt(2 x blocks) for what is added to the
    residual stream (Radford et al. 2019, section 2.3); an mlp's blocks: sqrt(2 / D), which keeps the variance through
    ReLU (He et al. 2015). Norms 1, biases 0. Drawn on the CPU in float32 from a generator of the name's own, then cast:
    the same values for every dtype and device.
    """
    if parameter.dim() == 1:
        parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        return
    std = model.initializer_std
    if model.family == "mlp" and name.startswith("block."):
        std = (2 / model.hidden) ** 0.5
    elif name.endswith(("attention.projection.weight", "feedforward.down.weight")):
        std /= (2 * model.blocks) ** 0.5
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    flat = parameter.view(-1)
    for begin in range(0, flat.numel(), _PIECE):
        piece = flat[begin : begin + _PIECE]
        if piece.dtype == torch.float32 and piece.device.type == "cpu":
            piece.normal_(0.0, std, generator=generator)
        else:
            piece.copy_(torch.empty(piece.shape, dtype=torch.float32).normal_(0.0, std, generator=generator))
