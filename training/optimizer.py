"""The update rule, the learning rate of each step, and clipping by a global norm that is the same for every cut."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn

from conf.schema import OptimizerConfig

SCHEDULES = ("cosine", "linear", "constant", "wsd")
# Rows of this length are summed by one thread each, so that sums do not depend on the number of threads; below 32,768
# elements torch sums in one thread.
ROW = 1024


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Whether a parameter gets weight decay: matrices do, norms and biases (one dimension) do not."""
    return parameter.ndim >= 2


def make_optimizer(config: OptimizerConfig, parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """torch's AdamW or SGD over named parameters, in two groups: with weight decay and without.

    Fused: one pass over each parameter and no temporaries of the model's size. ValueError for an unknown name.
    """
    groups = [
        {"params": [p for n, p in parameters.items() if decays(n, p)], "weight_decay": config.weight_decay},
        {"params": [p for n, p in parameters.items() if not decays(n, p)], "weight_decay": 0.0},
    ]
    if config.name == "adamw":
        betas = (config.beta1, config.beta2)
        return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.eps, fused=True)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, fused=True)
    raise ValueError(f"optimizer.name={config.name} is unknown: use adamw or sgd")


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
) -> torch.Tensor:
    """Norm of the whole model's gradient, float64 scalar on the parameters' device, the same bits for every cut.

    `parameters` are this rank's; `order` lists the whole model's names, of which each but the `tied` copies (copy ->
    owner; counted once, by the owner) lives on one rank of `group` (None: all are here). Each rank puts its squared
    norms at their places, the sum over ranks adds only zeros to them, and every rank sums the same numbers in the same
    order. A missing gradient counts as 0. Collective: every rank of the group calls it.
    """
    device = next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
    squares = torch.zeros(len(order), dtype=torch.float64, device=device)
    for place, name in enumerate(order):
        if name in parameters and name not in tied and parameters[name].grad is not None:
            squares[place] = squared_norm(parameters[name].grad)
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
