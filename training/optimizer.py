"""The update rule, the learning rate of each step, and clipping by a global norm that is the same for every cut."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn

from conf.schema import OptimizerConfig
from models.describe import is_hidden_matrix
from pipeline.engines.base import is_shared, own_part
from pipeline.placement import FIRST, Place
from training.parts import counted_here

SCHEDULES = ("cosine", "linear", "constant", "wsd")
# Rows of this length are summed by one thread each, so that sums do not depend on the number of threads; below 32,768
# elements torch sums in one thread.
ROW = 1024
# Adafactor's rate is relative to a parameter's root mean square, of which it takes at least this, so that zeros move
# (Shazeer and Stern 2018, arXiv 1804.04235, algorithm 4; torch's default).
ADAFACTOR_LEAST_SCALE = 1e-3


def decays(name: str, parameter: torch.Tensor, tied: dict[str, str] | None = None) -> bool:
    """Whether a parameter gets weight decay: matrices do; norms, biases (one dimension) and embeddings do not. A tied
    weight is its owner (`tied`: copy -> owner), so a head that is the embedding does not either."""
    owner = (tied or {}).get(name, name)
    return parameter.ndim >= 2 and not owner.startswith("embedding.")


def make_optimizer(
    config: OptimizerConfig, parameters: dict[str, nn.Parameter], tied: dict[str, str] | None = None
) -> torch.optim.Optimizer:
    """torch's own optimizer over named parameters, in groups with weight decay and without (`decays`).

    Each treats a parameter by itself, so that no cut changes a weight. AdamW and SGD are fused: one pass over each
    parameter and no temporaries of the model's size. muon is for the blocks' matrices, which it scales to the root mean
    square of AdamW's updates (Liu et al. 2025, arXiv 2502.16982, section 2.2): one learning rate and weight decay for
    it and for the AdamW of all other parameters. ValueError for an unknown name.
    """
    if config.name not in MAKERS:
        raise ValueError(f"optimizer.name={config.name} is unknown: use one of {', '.join(MAKERS)}")
    return MAKERS[config.name](config, parameters, tied or {})


def _groups(config: OptimizerConfig, parameters: dict[str, nn.Parameter], tied: dict[str, str]) -> list[dict]:
    """With weight decay and without; where ranks share parameters, for each mesh that they are shared over: torch's
    optimizers take no mixture."""
    meshes = dict.fromkeys(getattr(parameter, "device_mesh", None) for parameter in parameters.values()) or [None]
    groups = []
    for mesh in meshes:
        own = {name: p for name, p in parameters.items() if getattr(p, "device_mesh", None) == mesh}
        decayed = {name for name, parameter in own.items() if decays(name, parameter, tied)}
        groups.append({"params": [own[name] for name in own if name in decayed], "weight_decay": config.weight_decay})
        groups.append({"params": [own[name] for name in own if name not in decayed], "weight_decay": 0.0})
    return groups


def _adamw(config: OptimizerConfig, parameters: dict[str, nn.Parameter], tied: dict[str, str]) -> torch.optim.Optimizer:
    betas = (config.beta1, config.beta2)
    groups = _groups(config, parameters, tied)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.eps, fused=True)


def _sgd(config: OptimizerConfig, parameters: dict[str, nn.Parameter], tied: dict[str, str]) -> torch.optim.Optimizer:
    groups = _groups(config, parameters, tied)
    fused = not any(is_shared(parameter) for parameter in parameters.values())  # torch has no fused SGD of a DTensor
    return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, fused=fused)


def _adafactor(
    config: OptimizerConfig, parameters: dict[str, nn.Parameter], tied: dict[str, str]
) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(
        _groups(config, parameters, tied),
        lr=config.learning_rate,
        beta2_decay=-config.beta2_decay,
        eps=(config.eps, ADAFACTOR_LEAST_SCALE),
        d=config.update_rms,
    )


def _muon(config: OptimizerConfig, parameters: dict[str, nn.Parameter], tied: dict[str, str]) -> torch.optim.Optimizer:
    hidden = {name: p for name, p in parameters.items() if is_hidden_matrix(name, p.shape)}
    others = {name: p for name, p in parameters.items() if name not in hidden}
    muon = torch.optim.Muon(
        _groups(config, hidden, tied),
        lr=config.learning_rate,
        momentum=config.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return Together([muon, _adamw(config, others, tied)])


MAKERS = {"adamw": _adamw, "sgd": _sgd, "adafactor": _adafactor, "muon": _muon}


class Together(torch.optim.Optimizer):
    """Several optimizers, each with parameters of its own, as one: all their groups, and one state that they share."""

    def __init__(self, parts: list[torch.optim.Optimizer]):
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        for part in parts:
            assert not part.state, "parts are new"
            part.state = self.state

    @torch.no_grad()
    def step(self, closure=None) -> None:
        assert closure is None, "no caller here has one"
        for part in self.parts:
            part.step()


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Learning rate of step 0..steps-1. The peak is reached at the end of the warm-up, the final rate at the last step.

    Warm-up: peak * (step + 1) / warmup_steps. Then, with x going from 0 at the peak to 1 at the last step and
    final = final_fraction * peak:
    cosine: final + (peak - final) * (1 + cos(pi * x)) / 2 (Loshchilov and Hutter, SGDR, 2017, without restarts);
    linear: peak + (final - peak) * x;
    wsd: peak, then linear to final over the last decay_fraction of the steps (Hu et al., MiniCPM, 2024; the linear
    decay: Haegele et al., Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations, 2024);
    constant: peak. After the last step the final rate stays. ValueError for an unknown schedule.
    """
    assert config.warmup_steps is not None, "resolve() fills warmup_steps"
    if config.schedule not in SCHEDULES:
        raise ValueError(f"optimizer.schedule={config.schedule} is unknown: use one of {', '.join(SCHEDULES)}")
    peak, final = config.learning_rate, config.final_fraction * config.learning_rate
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    start = max(config.warmup_steps - 1, 0)  # the step at which the rate is at its peak and the decay starts
    if config.schedule == "wsd":
        start = max(start, steps - 1 - round(config.decay_fraction * steps))
    x = min(max(step - start, 0) / max(steps - 1 - start, 1), 1.0)
    if config.schedule == "constant":
        return peak
    if config.schedule == "cosine":
        return final + (peak - final) * (1 + math.cos(math.pi * x)) / 2
    return peak + (final - peak) * x


def squared_norm(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of squares as a float64 scalar; its bits depend on the tensor (and kind of device) only, not on threads.

    Norms of rows of 1,024 elements in float32 (float64 for float64), their squares added in float64: as fast as float32
    alone, without a copy in float64, and exact to about 1e-9 for float32 (bfloat16: 2e-7), where one float32 sum over
    40 million elements on CPU is off by 5e-3.
    """
    flat = tensor.detach().reshape(-1)
    dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
    whole = len(flat) // ROW * ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
    squares = torch.cat([rows, rest[None]]).double().square()
    while len(squares) > ROW:
        whole = len(squares) // ROW * ROW
        squares = torch.cat([squares[:whole].view(-1, ROW).sum(1), squares[whole:]])
    return squares.sum()


@torch.no_grad()
def global_norm(
    parameters: dict[str, nn.Parameter],
    order: list[str],
    tied: dict[str, str],
    group: dist.ProcessGroup | None,
    where: Place = FIRST,
) -> torch.Tensor:
    """Norm of the whole model's gradient, float64 scalar on the parameters' device, the same bits for every cut.

    `parameters` are this rank's; `order` lists the whole model's names, of which each but the `tied` copies (copy ->
    owner; counted once, by the owner) lives on one rank of `group` (None: all are here). Each rank puts its squared
    norms at their places, the sum over ranks adds only zeros to them, and every rank sums the same numbers in the same
    order. A missing gradient counts as 0. Collective: every rank of the group calls it.
    `where`: this rank's place in a layout with data or tensor ranks; their parts of a gradient are added up, and what
    several hold the same of is counted once.
    """
    device = next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
    squares = torch.zeros(len(order), dtype=torch.float64, device=device)
    for place, name in enumerate(order):
        if name in parameters and name not in tied and parameters[name].grad is not None:
            if counted_here(parameters[name], where):
                squares[place] = squared_norm(own_part(parameters[name].grad))
    if group is not None:
        dist.all_reduce(squares, group=group)
    return squares.sum().sqrt()


@torch.no_grad()
def clip_(parameters: dict[str, nn.Parameter], norm: torch.Tensor | float, clip_norm: float) -> None:
    """Multiplies all gradients by min(1, clip_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ does.

    A norm that is not finite spoils the gradients: the caller looks at it first.
    """
    scale = clip_norm / (float(norm) + 1e-6)
    if scale >= 1:
        return
    for parameter in parameters.values():
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
