"""TorchEngine on hardware that is not there: every action is a wait of the planned length, every message a few bytes.

    accelerator   of each rank: one action at a time, each from when it is free and the input is there, for its duration
    message       the time at which it was put on its link; it has arrived that time + transfer + latency later
    host          what Python and gloo do between two actions is this machine's, not the emulated one's, whose planned
                  durations have their own host time in them: up to CREDIT_S of it is not counted. What is more is, and
                  `lateness_s` tells

Clocks are `time.perf_counter`, which all processes of a machine share: an emulated run stays on one machine. No
parameters, no autograd. It fills and reads the caches and receive buffers of torch's stage (2.13), which are private;
tests/test_emulate.py fails when a new torch changes them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from pipeline.action import Action, Schedule
from pipeline.engines.base import Batch, Stage
from pipeline.engines.clock import Stamps
from pipeline.engines.torch_engine import TorchEngine
from pipeline.engines.torch_runtime import RunnableStage

CREDIT_S = 0.01  # an action counts as begun at most this much before this machine came to it
LOOK_S = 0.2  # how often a wait looks whether it is to end
LEAST_JITTERED = 0.1  # part of its duration that an action takes at least


@dataclass
class Hardware:
    """What is emulated; seconds of this machine's clock.

    duration: of an action on its own rank, without jitter. transfer, latency: of a message, by (from rank, to rank):
    how long it takes its link, and how much later it arrives. host: of a rank, before each of its actions.
    jitter: standard deviation of an action's duration, as part of it; seed: of the jitter.
    """

    duration: Callable[[Action], float]
    transfer: Callable[[int, int], float]
    latency: Callable[[int, int], float]
    host: Callable[[int], float] = lambda rank: 0.0
    jitter: float = 0.0
    seed: int = 0

    def draw(self, action: Action, flush: int) -> float:
        """How long it takes in this flush: keyed by seed, flush and action, so that a run can be repeated."""
        seconds = self.duration(action)
        if self.jitter:
            seconds *= max(LEAST_JITTERED, random.Random(f"{self.seed} {flush} {action}").gauss(1, self.jitter))
        return seconds


@dataclass
class Accelerator(Stamps):
    """The one of this rank. All times are moments of `time.perf_counter`. The rank's clock goes by it: a stamp says how
    far it has come, as an event in an accelerator's stream would."""

    hardware: Hardware
    rank: int
    free: float = 0.0  # when it is done with all that it was given
    ready: float = 0.0  # when the next action's input has arrived
    working: bool = False  # in a step
    interrupted: Callable[[], bool] = lambda: False  # asked during waits: whether they are to end
    cut: bool = False  # they were: all that is left of this step takes no time, and its times mean nothing
    flush: int = 0  # how many there were
    lateness_s: float = 0.0  # the longest that this machine came late to the end of an action
    links: dict[int, float] = field(default_factory=dict)  # to rank -> when the link is free

    def begin(self) -> None:
        """An optimizer step begins now, whatever was before."""
        self.working, self.free, self.ready, self.cut = True, time.perf_counter(), 0.0, False
        self.links.clear()

    def end(self) -> None:
        """The step is over."""
        self.working = False

    def now(self) -> float:
        """A stamp."""
        now = time.perf_counter()
        return max(self.free, self.ready, now - CREDIT_S) if self.working else now

    def receive(self, sent: float, sender: int) -> None:
        """Waits until the message that `sender` put on its link at `sent` has arrived."""
        self.ready = sent
        if sender != self.rank:
            self.ready += self.hardware.transfer(sender, self.rank) + self.hardware.latency(sender, self.rank)
        self._wait_until(self.ready)

    def issue(self) -> None:
        """Waits for the host, which takes its time once input and accelerator are there."""
        host = self.hardware.host(self.rank)
        if host:
            self.ready = max(self.ready, self.free) + host
            self._wait_until(self.ready)

    def compute(self, action: Action) -> None:
        """Waits as long as the action takes."""
        self.spend(self.hardware.draw(action, self.flush), self.ready)
        self.ready = 0.0

    def spend(self, seconds: float, ready: float = 0.0) -> None:
        """Waits until `seconds` of work that can begin at `ready` are done."""
        self.free = max(self.free, ready, time.perf_counter() - CREDIT_S) + seconds
        self._wait_until(self.free)
        self.lateness_s = max(self.lateness_s, time.perf_counter() - self.free)

    def send(self, receiver: int) -> float:
        """When the result of the last action is put on the link to another rank: when that is free."""
        sent = max(self.free, self.links.get(receiver, 0.0))
        self.links[receiver] = sent + self.hardware.transfer(self.rank, receiver)
        return sent

    def _wait_until(self, moment: float) -> None:
        """Sleeps and does not spin: other ranks need the core. A wait that is cut short leaves the order of actions
        and messages as it is, so that a rank which still waits gets what it waits for."""
        while not self.cut and (left := moment - time.perf_counter()) > 0:
            if self.interrupted():
                self.cut = True
                return
            time.sleep(min(left, LOOK_S))


class _Waits(PipelineStage):
    """What computes in torch's stage, here a wait: stands in for PipelineStage below RunnableStage, which times it."""

    accelerator: Accelerator
    rank_of: list[int]  # of each model stage

    def forward_one_chunk(self, fwd_chunk_id, args, kwargs=None, save_forward_output=True):
        self.accelerator.compute(Action(self.stage_index, "F", fwd_chunk_id))
        message = self._message(self.stage_index + 1)
        self.fwd_cache[fwd_chunk_id] = ((message,), [])
        return message

    def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, last_backward=False):
        self.accelerator.compute(Action(self.stage_index, "B" if full_backward else "I", bwd_chunk_id))
        del self.fwd_cache[bwd_chunk_id]
        self.bwd_cache[bwd_chunk_id] = (self._message(self.stage_index - 1),)

    def backward_weight_one_chunk(self, bwd_chunk_id, last_backward=False):
        self.accelerator.compute(Action(self.stage_index, "W", bwd_chunk_id))

    def _message(self, stage: int) -> Tensor:
        """To the rank of this stage: when it was sent."""
        sent = self.accelerator.free
        if 0 <= stage < self.num_stages and self.rank_of[stage] != self.accelerator.rank:
            sent = self.accelerator.send(self.rank_of[stage])
        return torch.tensor([sent], dtype=torch.float64)


class EmulatedStage(RunnableStage, _Waits):
    """A stage of which only the waiting is left."""

    def before(self, action: Action) -> None:
        infos, sender = None, action.stage
        if action.kind == "F" and not self.is_first:
            infos, sender = self.args_recv_info, action.stage - 1
        elif action.kind in "BI" and not self.is_last:
            infos, sender = self.grad_recv_info, action.stage + 1
        if infos is not None:
            self.accelerator.receive(float(infos[action.microbatch][0].buffer), self.rank_of[sender])
            self._clock.arrived()
        self.accelerator.issue()


class EmulatedEngine(TorchEngine):
    """The rank's stages as waits.

    Args:
        schedule: what every rank executes.
        rank: of the pipeline.
        group: the pipeline ranks, in order; None = all.
    """

    def __init__(self, schedule: Schedule, hardware: Hardware, *, rank: int, group=None):
        self.accelerator = Accelerator(hardware, rank)
        super().__init__(
            {stage: Stage([]) for stage, owner in enumerate(schedule.rank_of) if owner == rank},
            schedule=schedule,
            boundary=(1, 1),
            dtype=torch.float64,
            device=torch.device("cpu"),
            group=group,
            microbatch=1,
            loss=lambda output, target: torch.zeros(()),
            tied={},
        )
        self.clock.stamps = self.accelerator

    def connect(self) -> None:
        """One flush that takes no time: ranks get to know each other before the first step is timed."""
        hardware = self.accelerator.hardware
        self.accelerator.hardware = Hardware(lambda action: 0.0, lambda sender, receiver: 0.0, lambda s, r: 0.0)
        self.flush()
        self.accelerator.hardware, self.accelerator.lateness_s = hardware, 0.0

    def flush(self) -> None:
        """One flush of the pipeline."""
        self.accelerator.flush += 1
        tokens = torch.zeros(self.chunks, 1, dtype=torch.int64)
        self.step(Batch(tokens if self.needs_inputs else None, tokens if self.needs_targets else None), 0.0)

    def _runnable(self, index: int, chunks: int, microbatch: int, train: bool) -> EmulatedStage:
        message = torch.empty(1, dtype=torch.float64, device="meta", requires_grad=train)
        stage = EmulatedStage(
            self.stages[index],
            index,
            self.num_stages,
            self.device,
            input_args=message,
            output_args=message,
            group=self.group,
            chunks=chunks,
            clock=self.clock,
        )
        stage.accelerator, stage.rank_of = self.accelerator, self.schedule.rank_of
        return stage
