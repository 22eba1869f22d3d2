"""What every engine has in common: the batch, a stage as one module, the scaled loss, tied gradients, the contract."""

# B micro-batch size   N sequences of a flush (chunks * B)   T sequence   D model   V vocabulary

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from pipeline.action import Schedule
from pipeline.engines.clock import Clock

NamedLayers = list[tuple[str, nn.Module]]
LossFunction = Callable[[Tensor, Tensor], Tensor]  # logits [B, T, V], targets [B, T] -> sum over tokens, a scalar


@dataclass
class Batch:
    """The sequences of one flush. A rank has only what its stages need; the rest is None."""

    inputs: Tensor | None  # token ids, int64 [N, T]: the rank with the first stage
    targets: Tensor | None  # token ids, int64 [N, T]: the rank with the last stage
    keys: Tensor | None = None  # dropout keys, int64 [N]: every rank; None = no dropout
    documents: Tensor | None = None  # document of each token, int64 [N, T]: every rank; None = attention may cross them

    def chunk(self, chunks: int) -> list[Batch]:
        """Micro-batches in order, equal where `chunks` divides N."""
        whole = (self.inputs, self.targets, self.keys, self.documents)
        pieces = [[None] * chunks if tensor is None else tensor.tensor_split(chunks) for tensor in whole]
        return [Batch(*piece) for piece in zip(*pieces, strict=True)]


class Stage(nn.Module):
    """A contiguous run of named layers as one module: x -> x, with autocast and activation checkpointing inside.

    Args:
        layers: (canonical name, module) pairs; a module is called as module(x, key), or module(x, key, documents).
        precision: "bfloat16" enters autocast here, inside the stage, since a worker thread would lose it outside.
        checkpoint, interval: see `ParallelConfig`; units of `interval` consecutive blocks are recomputed together.
    """

    def __init__(
        self, layers: NamedLayers, *, precision: str = "float32", checkpoint: str = "never", interval: int = 1
    ):
        super().__init__()
        self.names = [name for name, _ in layers]
        self.layers = nn.ModuleList(module for _, module in layers)
        self.autocast = precision == "bfloat16"
        self.checkpoint = checkpoint
        self.units = _units(self.names, interval if checkpoint != "never" else 1)
        self.is_last_microbatch = False  # set by the engine before each forward; read by checkpoint="except_last"

    def canonical_parameters(self) -> dict[str, nn.Parameter]:
        return {
            f"{name}.{own}": parameter
            for name, module in zip(self.names, self.layers, strict=True)
            for own, parameter in module.named_parameters()
        }

    def forward(self, x: Tensor, key: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        extra = (key,) if documents is None else (key, documents)
        saves = self.checkpoint == "never" or (self.checkpoint == "except_last" and self.is_last_microbatch)
        saves = saves or not torch.is_grad_enabled()
        context = torch.autocast(x.device.type, torch.bfloat16) if self.autocast else contextlib.nullcontext()
        with context:
            for unit in self.units:
                if saves or not self.names[unit[0]].startswith("block."):
                    x = self._run(unit, x, *extra)
                else:  # masks are keyed, so there is no generator state to keep for the second forward
                    x = recompute(self._run, unit, x, *extra, use_reentrant=False, preserve_rng_state=False)
        # messages have one dtype whatever the cut (bfloat16 -> float32 -> bfloat16 is exact); logits stay as they are
        return x.float() if self.autocast and x.dtype == torch.bfloat16 and self.names[-1] != "head" else x

    def _run(self, unit: list[int], x: Tensor, *extra: Tensor | None) -> Tensor:
        for index in unit:
            x = self.layers[index](x, *extra)
        return x


def _units(names: list[str], interval: int) -> list[list[int]]:
    units: list[list[int]] = []
    for index, name in enumerate(names):
        joins = name.startswith("block.") and units and names[units[-1][0]].startswith("block.")
        if joins and len(units[-1]) < interval:
            units[-1].append(index)
        else:
            units.append([index])
    return units


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that ranks share (a DTensor); the tensor itself where they do not. No copy."""
    return tensor.to_local() if is_shared(tensor) else tensor


def is_shared(tensor: Tensor | None) -> bool:
    """Whether it is a DTensor, told without importing the module that has it."""
    return hasattr(tensor, "placements")


class Engine:
    """One way to run micro-batches through the stages that this process holds.

    `step` and `evaluate` of all ranks are called together. Gradients accumulate in `.grad` of `parameters`, under
    canonical names, until the caller clears them.
    """

    def __init__(
        self,
        stages: dict[int, Stage],
        *,
        num_stages: int,
        chunks: int,
        microbatch: int,
        loss: LossFunction,
        tied: dict[str, str],
    ):
        self.stages = dict(sorted(stages.items()))  # model stage -> module, those of this process
        self.num_stages = num_stages
        self.chunks = chunks
        self.microbatch = microbatch  # B, sequences
        self.loss = loss
        self.tied = tied  # copy's canonical name -> owner's
        self.parameters = {n: p for stage in self.stages.values() for n, p in stage.canonical_parameters().items()}
        self.needs_inputs = 0 in self.stages
        self.needs_targets = num_stages - 1 in self.stages
        self.scale = 1.0
        self.clock = Clock()
        self.schedule: Schedule | None = None  # what the ranks execute; None: actions are not seen

    def step(self, batch: Batch, scale: float, *, last: bool = True) -> Tensor:
        """Forward and backward of one flush; gradients are added up.

        Args:
            batch: this rank's part of N = chunks * B sequences.
            scale: what a token's loss is multiplied by, once, here: 1 / (tokens of the whole optimizer step). No other
                place scales loss or gradient.
            last: the step's last flush: data ranks add up their gradients in it.

        Returns:
            float64 scalar: the scaled loss of the flush on the rank that holds the last stage, 0 elsewhere.
        """
        raise NotImplementedError

    def evaluate(self, batch: Batch, sequences: int) -> Tensor:
        """float64 scalar: sum of the token losses of N = `sequences` sequences (any number) on the rank that holds
        the last stage, 0 elsewhere. May be called before, between and after steps."""
        raise NotImplementedError

    def scaled_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The one place where loss, and so gradient, is scaled."""
        return self.loss(logits, targets) * self.scale

    def sum_tied_gradients(self) -> None:
        """Gives both copies of a tied weight the sum of both gradients, and every tensor rank the whole gradient of a
        weight that it shares; all ranks call it, after the last backward."""
        for parameter in self.parameters.values():
            gradient = parameter.grad
            if is_shared(gradient) and gradient.placements != parameter.placements:
                parameter.grad = gradient.redistribute(placements=parameter.placements)
        for copy, owner in self.tied.items():
            here = [own_part(self.parameters[name].grad) for name in (owner, copy) if name in self.parameters]
            if len(here) == 2:
                here[0].add_(here[1])
                here[1].copy_(here[0])
            elif here:  # a sum of two numbers is the same in either order: the same bits as in one process
                here[0].add_(self.exchange(here[0]))

    def exchange(self, tensor: Tensor) -> Tensor:
        """What the rank at the other end of the pipeline has in place of `tensor`; both ends call it."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends what the engine started."""
