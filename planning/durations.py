"""How long each action of a run takes by the planner, for what emulates the hardware. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from conf.schema import RootConfig
from pipeline.placement import num_ranks
from planning.links import links
from planning.rates import rates
from planning.stack import get_stack
from planning.step import Layout, after_flushes, stage_times


@dataclass(frozen=True)
class Durations:
    """Seconds of the planned hardware. Lists have one entry a model stage, for one micro-batch of it."""

    forward: list[float]
    backward: list[float]  # whole
    backward_input: list[float]
    backward_weight: list[float]
    last: dict[str, list[float]]  # of the last micro-batch, where that differs: except_last does not recompute it
    transfer_s: float  # that a message takes its link, and no other message can
    latency_s: float  # until it arrives after that
    reduction_s: float  # once a step, after the last flush: what data ranks and the two copies of a tied weight send
    optimizer_s: float  # then the update

    def of(self, stage: int, kind: str, last: bool) -> float:
        """Of one action; `last`: of the last micro-batch."""
        name = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}[kind]
        every = getattr(self, name)
        return (self.last.get(name, every) if last else every)[stage]

    def to_dict(self) -> dict:
        return asdict(self)


def durations(config: RootConfig, stack: str = "torch") -> Durations:
    """Of a resolved configuration whose balance is a list, with the torch engine: what `planning.step.step_time` puts
    together. Tensor and data ranks and sharding are in the figures of their pipeline rank.

    ValueError: the hardware file lacks a figure.
    """
    software, parallel = get_stack(stack), config.parallel
    device = rates(config.hardware, config.train.precision, ranks_here=num_ranks(config.parallel))
    paths, layout = links(config.hardware, parallel), Layout.of(config)
    times = stage_times(config, layout, software, device, paths)
    after = after_flushes(config, layout, software, device, paths)
    return Durations(
        times.forward,
        times.backward,
        times.backward_input,
        times.backward_weight,
        times.last(parallel),
        times.transfer_s,
        times.latency_s,
        after["data_parallel"] + after["tied_weight"],
        after["optimizer"],
    )
