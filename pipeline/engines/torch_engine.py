"""torch.distributed.pipelining, one process a rank: the main engine. Runs the very list of actions of a Schedule."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel

from pipeline.engines.base import Batch, Engine, LossFunction, Stage
from pipeline.engines.torch_runtime import RunnableStage, Runtime
from pipeline.schedule import Action, Schedule


class TorchEngine(Engine):
    """Each rank of `group` holds the stages that the schedule places there.

    Args:
        stages: model stage -> module, those of this rank.
        schedule: what every rank executes, in this order.
        boundary: shape of one sequence between stages, (T, D); dtype: of these messages.
        device: of this rank.
        group: the pipeline ranks, in order; None = all.
        vocabulary_parallel: the last stage's logits are shared among tensor ranks, by vocabulary.
        reduces_each: data ranks add up their gradients after each micro-batch, not in the last of a step.
        Others as `Engine`.

    Raises ValueError for compiled layers under a schedule with I and W: their backward cannot be split (torch issue
    161904), and fails in the middle of a step.
    """

    def __init__(
        self,
        stages: dict[int, Stage],
        *,
        schedule: Schedule,
        boundary: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        vocabulary_parallel: bool = False,
        reduces_each: bool = False,
        **common,
    ):
        if schedule.splits_backward:
            _refuse_compiled(stages, schedule)
        self._resources = contextlib.ExitStack()
        if vocabulary_parallel:
            self._resources.enter_context(loss_parallel())  # until close(): backward needs it too
            common["loss"] = _of_shared_logits(common["loss"])
        super().__init__(stages, num_stages=schedule.num_stages, chunks=schedule.chunks, **common)
        self.reduces_each = reduces_each
        self.schedule, self.boundary, self.dtype, self.device = schedule, boundary, dtype, device
        self.group = group if group is not None else dist.group.WORLD
        self._runtimes: dict[tuple[int, int, bool], Runtime] = {}

    def exchange(self, tensor: Tensor) -> Tensor:
        first, last = self.schedule.rank_of[0], self.schedule.rank_of[-1]
        other = last if dist.get_rank(self.group) == first else first
        received = torch.empty_like(tensor)
        operations = [
            dist.P2POp(dist.isend, tensor, group=self.group, group_peer=other),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=other),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received

    def step(self, batch: Batch, scale: float, *, last: bool = True) -> Tensor:
        self.scale = scale
        return self._runtime(self.chunks, self.microbatch, train=True).run(batch, train=True, reduces=last)

    @torch.no_grad()
    def evaluate(self, batch: Batch, sequences: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        row = 0
        while row < sequences:
            microbatch = min(self.microbatch, sequences - row)
            chunks = min(self.chunks, (sequences - row) // microbatch)
            rows = slice(row, row + chunks * microbatch)
            part = Batch(
                batch.inputs[rows] if self.needs_inputs else None,
                batch.targets[rows] if self.needs_targets else None,
                documents=None if batch.documents is None else batch.documents[rows],
            )
            total += self._runtime(chunks, microbatch, train=False).run(part, train=False)
            row = rows.stop
        return total

    def _runtime(self, chunks: int, microbatch: int, *, train: bool) -> Runtime:
        """Shapes of a torch stage are fixed, so there is one runtime for each; all share the modules."""
        key = (chunks, microbatch, train)
        if key not in self._runtimes:
            actions = self.schedule.actions if train else forward_only(self.schedule, chunks)
            stages = [self._runnable(index, chunks, microbatch, train) for index in self.stages]
            loss = self.scaled_loss if train else self.loss
            self._runtimes[key] = Runtime(stages, chunks, loss, actions, self.clock)
        return self._runtimes[key]

    def _runnable(self, index: int, chunks: int, microbatch: int, train: bool) -> RunnableStage:
        message = torch.empty(microbatch, *self.boundary, dtype=self.dtype, device="meta", requires_grad=train)
        # torch never looks at the ids' length, which under sequence parallelism is not the message's
        tokens = torch.empty(microbatch, self.boundary[0], dtype=torch.int64, device="meta")
        return RunnableStage(
            self.stages[index],
            index,
            self.num_stages,
            self.device,
            input_args=tokens if index == 0 else message,
            output_args=message,  # of the last stage nothing is sent: its shape is not used
            group=self.group,
            chunks=chunks,
            clock=self.clock,
            reduces_each=self.reduces_each,
        )

    def close(self) -> None:
        self._resources.close()


def _of_shared_logits(loss: LossFunction) -> LossFunction:
    """The same number on every tensor rank, as a plain tensor."""
    return lambda logits, targets: loss(logits, targets).full_tensor()


def forward_only(schedule: Schedule, chunks: int) -> list[list[Action]]:
    """The forwards alone, stage by stage on each rank: for evaluation, with its own number of micro-batches."""
    rows: list[list[Action]] = [[] for _ in range(schedule.stages)]
    for stage, rank in enumerate(schedule.rank_of):
        rows[rank] += [Action(stage, "F", index) for index in range(chunks)]
    return rows


def _refuse_compiled(stages: dict[int, Stage], schedule: Schedule) -> None:
    for stage in stages.values():
        for name, layer in zip(stage.names, stage.layers, strict=True):
            if any(hasattr(module, "_orig_mod") for module in layer.modules()):  # what torch.compile wraps
                raise ValueError(
                    f"{name} is compiled, and schedule {schedule.name} splits the backward into I and W, which "
                    f"torch.compile does not support: leave the layers uncompiled, or take 1f1b or interleaved_1f1b"
                )
