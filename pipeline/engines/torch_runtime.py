"""All that touches private parts of torch.distributed.pipelining (2.13): runs a list of our actions, and times it.

`_PipelineScheduleRuntime` takes any list of compute actions and adds the sends and receives itself. It is private, so
it is met here only; tests/test_torch_runtime.py fails loudly when a new torch changes what is relied on.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_send_recv,
    _add_unshard_reshard,
    _PipelineScheduleRuntime,
)

from pipeline.action import Action
from pipeline.engines.base import Batch
from pipeline.engines.clock import Clock
from pipeline.spans import REDUCE


def backward_input(output: Tensor, gradient: Tensor | None, x: Tensor, parameters: list[Tensor]) -> list:
    """I of one stage, as the runtime does it: `x.grad`, and what `backward_weight` goes on from.

    gradient: of the output; None for the loss.
    """
    return stage_backward_input([output], None if gradient is None else [gradient], [x], iter(parameters))[1]


def backward_weight(parameters: list[Tensor], groups: list) -> None:
    """W of one stage: adds to the parameters' gradients."""
    stage_backward_weight(iter(parameters), groups)


class RunnableStage(PipelineStage):
    """A PipelineStage that tells its module which micro-batch it works on, and times itself."""

    def __init__(self, *args, chunks: int, clock: Clock, reduces_each: bool = False, **kwargs):
        """reduces_each: data ranks add up the gradients of each micro-batch; else of all, when `reduces` is set."""
        super().__init__(*args, **kwargs)
        self._last_chunk, self._clock = chunks - 1, clock
        self._reduces_each, self.reduces = reduces_each, True

    def before(self, action: Action) -> None:
        """Called when the input of `action` is there, just before it runs, outside its time. One that waits for more
        than torch's message says so by `self._clock.arrived()`."""

    def forward_one_chunk(self, fwd_chunk_id, args, kwargs=None, save_forward_output=True):
        self.submod.is_last_microbatch = fwd_chunk_id == self._last_chunk
        action = Action(self.stage_index, "F", fwd_chunk_id)
        self._clock.arrived()
        self.before(action)
        output = self._clock.run(action, super().forward_one_chunk, fwd_chunk_id, args, kwargs, save_forward_output)
        if self.is_last and not self.has_backward:
            self.fwd_cache.pop(fwd_chunk_id)  # evaluation: torch would keep the logits of every micro-batch
        return output

    def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, last_backward=False):
        action = Action(self.stage_index, "B" if full_backward else "I", bwd_chunk_id)
        self._clock.arrived()
        self.before(action)
        return self._clock.run(action, super().backward_one_chunk, bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id, last_backward=False):
        action = Action(self.stage_index, "W", bwd_chunk_id)
        self.before(action)
        return self._clock.run(action, super().backward_weight_one_chunk, bwd_chunk_id, last_backward)

    def backward_maybe_with_nosync(self, backward_type, bwd_kwargs, last_backward=False):
        if not (self._reduces_each and isinstance(self.submod, FSDPModule)):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        assert backward_type == "full", "one stage has no use for a backward in two parts"
        self.submod.set_is_last_backward(True)
        self.submod.set_reshard_after_backward(False)
        self.submod.set_requires_gradient_sync(True)
        return stage_backward(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]), None

    def perform_reduce_grad(self, grad_scale_factor):
        """Where the schedule is done with a stage; a flush that is not a step's last leaves gradients as they are."""
        label = f"gradients of stage {self.stage_index} over data ranks"
        reduces = isinstance(self.submod, FSDPModule)
        if self.reduces:
            with self._clock.span(REDUCE, label) if reduces else contextlib.nullcontext():
                super().perform_reduce_grad(grad_scale_factor)

    def get_fwd_send_ops(self, fwd_chunk_id):
        self._clock.sends()
        return _Sends(super().get_fwd_send_ops(fwd_chunk_id), self._clock.sent)

    def get_bwd_send_ops(self, bwd_chunk_id):
        self._clock.sends()
        return _Sends(super().get_bwd_send_ops(bwd_chunk_id), self._clock.sent)


class Runtime(_PipelineScheduleRuntime):
    """Executes lists of actions, one list a rank; losses are kept by micro-batch, in whatever order forwards run."""

    def __init__(self, stages: list[RunnableStage], chunks: int, loss_fn, actions: list[list[Action]], clock: Clock):
        super().__init__(stages, chunks, loss_fn=loss_fn, scale_grads=False)  # scaled once, in Engine.scaled_loss
        self._losses: dict[int, Tensor] = {}
        self._clock = clock
        rank_of = {action.stage: rank for rank, row in enumerate(actions) for action in row}
        backward = {(a.stage, a.microbatch): a for row in actions for a in row if a.kind in "BI"}
        self.fwd_recv_ops = _Receives(lambda key: clock.waits(Action(key[0], "F", key[1]), rank_of[key[0] - 1]))
        self.bwd_recv_ops = _Receives(lambda key: clock.waits(backward[key], rank_of[key[0] + 1]))
        # torch's text form of an action is ours: 2F0, with F, B, I and W meaning the same
        lists = {rank: [_Action.from_str(str(action)) for action in row] for rank, row in enumerate(actions)}
        if any(action.kind != "F" for row in actions for action in row):
            self._prepare_schedule_with_comms(lists)
        else:
            self._prepare_forward_only(lists)

    def _prepare_forward_only(self, lists: dict[int, list[_Action]]) -> None:
        """As `_prepare_schedule_with_comms`, which refuses a list without backwards."""
        rank_of = {action.stage_index: rank for rank, row in lists.items() for action in row}
        self.stage_index_to_group_rank = rank_of
        for stage in self._stages:
            stage.stage_index_to_group_rank = rank_of
        lists = {rank: _add_unshard_reshard(row) for rank, row in lists.items()}
        self.pipeline_order_with_comms = _add_send_recv(lists, rank_of.__getitem__, self._num_stages)

    # torch appends losses in the order of the forwards and reads them by micro-batch: wrong for other orders
    def _maybe_compute_loss(self, stage, output, target_mbs, mb_index, loss_kwargs=None):
        if stage.is_last:
            action = Action(stage.stage_index, "F", mb_index)
            self._losses[mb_index] = self._clock.extend(action, self._compute_loss, output, target_mbs[mb_index])

    def _maybe_get_loss(self, stage, mb_index):
        return self._losses[mb_index] if stage.is_last else None

    def _update_losses(self, stages, losses):
        pass

    def run(self, batch: Batch, *, train: bool, reduces: bool = True) -> Tensor:
        """One flush; float64 sum of the losses, added in micro-batch order (0 where the last stage is not here).
        reduces: data ranks add up their gradients at its end."""
        args = () if batch.inputs is None else (batch.inputs,)
        extra = {"key": batch.keys, "documents": batch.documents}
        for stage in self._stages:
            stage.reduces = reduces
        call = self.step if train else self.eval
        call(*args, target=batch.targets, return_outputs=False, **{k: v for k, v in extra.items() if v is not None})
        total = torch.zeros((), dtype=torch.float64, device=self._stages[0].device)
        for index in sorted(self._losses):
            total += self._losses[index].detach().to(total)
        self._losses.clear()
        return total


class _Sends(list):
    """Operations that torch goes through to start them; when it has come to the end, that is told."""

    def __init__(self, operations, done):
        super().__init__(operations)
        self._done = done

    def __iter__(self):
        yield from super().__iter__()
        self._done()


class _Receives(dict):
    """(stage, micro-batch) -> receives under way. torch pops an entry when it is about to wait for it: that is told."""

    def __init__(self, about_to_wait):
        super().__init__()
        self._about_to_wait = about_to_wait

    def pop(self, key):
        self._about_to_wait(key)
        return super().pop(key)
