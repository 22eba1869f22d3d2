"""The whole list of layers in one process, micro-batch by micro-batch: the reference every other engine is held to."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.action import Action, Schedule
from pipeline.engines.base import Batch, Engine


class SingleEngine(Engine):
    """Forward and backward of each micro-batch in order; plain autograd, no threads, no messages."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        row = [Action(0, kind, index) for index in range(self.chunks) for kind in "FB"]
        self.schedule = Schedule("single", 1, self.chunks, 1, [row])

    def step(self, batch: Batch, scale: float, *, last: bool = True) -> Tensor:
        self.scale = scale
        total = torch.zeros((), dtype=torch.float64, device=batch.inputs.device)
        for index, part in enumerate(batch.chunk(self.chunks)):
            forward = Action(0, "F", index)
            logits = self.clock.run(forward, self._forward, part, index == self.chunks - 1)
            loss = self.clock.extend(forward, self.scaled_loss, logits, part.targets)
            del logits  # the loss keeps what its backward needs
            self.clock.run(Action(0, "B", index), loss.backward)
            total += loss.detach().to(total)
        return total

    @torch.no_grad()
    def evaluate(self, batch: Batch, sequences: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=batch.inputs.device)
        for row in range(0, sequences, self.microbatch):
            rows = slice(row, row + self.microbatch)
            documents = None if batch.documents is None else batch.documents[rows]
            part = Batch(batch.inputs[rows], batch.targets[rows], documents=documents)
            total += self.loss(self._forward(part, True), part.targets).to(total)
        return total

    def _forward(self, part: Batch, is_last_microbatch: bool) -> Tensor:
        x = part.inputs
        for stage in self.stages.values():
            stage.is_last_microbatch = is_last_microbatch
            x = stage(x, part.keys, part.documents)
        return x
