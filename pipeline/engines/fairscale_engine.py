"""fairscale.nn.Pipe: one process, fill-and-drain, a worker thread a device; several GPUs of one machine."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.engines.base import Batch, Engine, Stage
from pipeline.pipe import Pipe
from pipeline.spans import FLUSH

CPU_NOTE = (
    "fairscale on CPU: all stages share one worker thread, so they do not overlap and nothing is gained over "
    "parallel=single; on several GPUs of one machine they do overlap"
)


class FairscaleEngine(Engine):
    """All stages in this process, one on each of `devices`; backwards run in reversed micro-batch order.

    Activation checkpointing is fairscale's own, so the stages must come with checkpoint="never".
    """

    def __init__(
        self, stages: dict[int, Stage], *, devices: list[torch.device], checkpoint: str, chunks: int, **common
    ):
        super().__init__(stages, num_stages=len(stages), chunks=chunks, **common)
        self._loss_now = self.scaled_loss
        last = self.num_stages - 1
        modules = [_TupleStage(stage, self._last_loss if i == last else None) for i, stage in self.stages.items()]
        self._pipe = Pipe(modules, [1] * len(modules), devices=devices, chunks=chunks, checkpoint=checkpoint)

    def step(self, batch: Batch, scale: float, *, last: bool = True) -> Tensor:
        self.scale, self._loss_now = scale, self.scaled_loss
        with self.clock.span(FLUSH, FLUSH):
            losses = self._pipe(_tuple(batch))
            losses.sum().backward()
        return losses.detach().double().sum().cpu()

    @torch.no_grad()
    def evaluate(self, batch: Batch, sequences: int) -> Tensor:
        self._loss_now = self.loss
        self._pipe.eval()  # fairscale does not checkpoint then
        total = torch.zeros((), dtype=torch.float64)
        for row in range(0, sequences, self.chunks * self.microbatch):
            rows = slice(row, row + self.chunks * self.microbatch)
            documents = None if batch.documents is None else batch.documents[rows]
            part = Batch(batch.inputs[rows], batch.targets[rows], documents=documents)
            total += self._pipe(_tuple(part)).double().sum().cpu()
        self._pipe.train()
        return total

    def close(self) -> None:
        self._pipe.close()

    def _last_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self._loss_now(logits, targets)


def _tuple(batch: Batch) -> tuple[Tensor, ...]:
    return tuple(t for t in (batch.inputs, batch.targets, batch.keys, batch.documents) if t is not None)


class _TupleStage(nn.Module):
    """A stage in fairscale's contract: what later stages need (targets, dropout keys [B], documents [B, T]) travels
    with the activations.

    The last stage gives its micro-batch's loss, shape [1], so that logits never outlive their micro-batch's graph.
    """

    def __init__(self, stage: Stage, loss) -> None:
        super().__init__()
        self.stage, self.loss = stage, loss

    def forward(self, values: tuple[Tensor, ...]):
        x, targets, *extra = values
        x = self.stage(x, **{"key" if tensor.dim() == 1 else "documents": tensor for tensor in extra})
        return (x, targets, *extra) if self.loss is None else self.loss(x, targets).reshape(1)
