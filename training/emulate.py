"""An emulated run: a real one's launcher, loop, engine, schedule and folder, on hardware that is not there.

    plan.json `durations` ──► each rank's engine waits as long as its actions would take (pipeline/engines/emulated.py)
    metrics.jsonl, result.json, TensorBoard ◄── in seconds of the emulated hardware, marked `emulated`

There are no parameters, so nothing is learned, validated, updated or saved; no data are read. Memory is not measured:
it is under `predicted` only. A stop request or train.max_minutes cuts the step that it comes in: its waits end, its
messages are still exchanged, and it counts for nothing.
Where this machine came later to an action's end than `CREDIT_S`, the figures suffer: `emulation_lateness_s` (the worst
of the run, seconds of this machine) says by how much. `start_up_s`: from when the folder was written until all ranks
had connected, seconds of this machine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from conf.schema import RootConfig
from models.describe import model_flops_per_token
from pipeline.action import Action
from pipeline.engines.emulated import CREDIT_S, EmulatedEngine, Hardware
from pipeline.schedule import make_schedule
from pipeline.simulate import simulate
from pipeline.spans import OPTIMIZER, REDUCE, Timing
from planning import report
from planning.durations import Durations
from planning.predict import num_devices
from training import imbalance, launch
from training.checkpoint import Position
from training.loop import Outcome, Trainer, train
from training.outcome import read_plan
from training.ranks import Ranks
from training.record import Recorder

LONG_S = 1.0  # of this machine: a wait at a step's end that can be cut
LONGEST_S = 1e8  # of this machine: what torch and the kernel take as a time limit; three years
JITTER = 5  # standard deviations that no action is likely to be beyond


def run(config: RootConfig, run_dir: Path, ranks: Ranks, stop: launch.StopFlag) -> None:
    """The whole run, on each rank."""
    plan = read_plan(run_dir)
    trainer = EmulatedTrainer(config, ranks, None, lambda: stop.requested, planned=Durations(**plan["durations"]))
    recorder = EmulatedRecorder(run_dir, config, ranks.world) if ranks.rank == 0 else None
    try:
        result = train(trainer, recorder, NoCheckpoints(run_dir), Position())
        del result["peak_resident_bytes"]
        late = max(ranks.gather(trainer.engine.accelerator.lateness_s))
        if recorder is not None:
            if late > CREDIT_S:
                print(
                    f"this machine was up to {1e3 * late:.0f} ms late, of which {1e3 * CREDIT_S:.0f} ms do not count",
                    flush=True,
                )
            figures = {
                "split": plan["split"],
                "emulation_lateness_s": late,
                "start_up_s": trainer.ready_at - (run_dir / "resolved.json").stat().st_mtime,
            }
            recorder.finish(result.pop("status"), result | figures)
    finally:
        if recorder is not None:
            recorder.close()
        trainer.engine.close()


def stall_timeout_s(config: RootConfig, run_dir: Path, *, says: bool) -> float:
    """How long a rank waits for another until the run is taken for stalled, seconds of this machine: what is planned,
    and train.stall_timeout_s beyond it. says: print it where the plan alone is longer."""
    limit, planned = config.train.stall_timeout_s, longest_wait_s(config, Durations(**read_plan(run_dir)["durations"]))
    if says and planned > limit:
        print(
            f"a rank may wait for another through a step of {report.duration(planned)} by this machine's clock: "
            f"train.stall_timeout_s={limit:g} counts beyond it",
            flush=True,
        )
    return min(limit + planned, LONGEST_S)


def longest_wait_s(config: RootConfig, planned: Durations) -> float:
    """What no wait for another rank is longer than as long as all goes as planned: a step with what `config.emulate`
    plants, seconds of this machine. Every link counts as the slowest."""
    parallel, emulated = config.parallel, hardware(config, planned)
    schedule = make_schedule(parallel.schedule, parallel.stages, parallel.chunks, parallel.interleave)
    links = [pair for rank in range(parallel.stages - 1) for pair in ((rank, rank + 1), (rank + 1, rank))] or [(0, 0)]

    def of(kind: str) -> list[list[float]]:
        return [
            [
                emulated.duration(Action(stage, kind, chunk)) * (1 + JITTER * emulated.jitter) + emulated.host(rank)
                for chunk in range(parallel.chunks)
            ]
            for stage, rank in enumerate(schedule.rank_of)
        ]

    flush = simulate(
        schedule,
        forward=of("F"),
        backward=of("B"),
        backward_input=of("I"),
        backward_weight=of("W"),
        transfer_s=max(emulated.transfer(*pair) for pair in links),
        transfer_latency_s=max(emulated.latency(*pair) for pair in links),
    )
    ends_s = (planned.reduction_s + planned.optimizer_s) * config.emulate.time_scale
    return config.train.accumulate * flush.makespan + ends_s


def hardware(config: RootConfig, planned: Durations) -> Hardware:
    """The planned durations in this machine's seconds, with what `config.emulate` plants."""
    emulate, parallel = config.emulate, config.parallel
    scale = emulate.time_scale
    rank_of = make_schedule(parallel.schedule, parallel.stages, parallel.chunks, parallel.interleave).rank_of

    def duration(action: Action) -> float:
        factor = emulate.slow_factor if rank_of[action.stage] == emulate.slow_rank else 1.0
        return planned.of(action.stage, action.kind, action.microbatch == parallel.chunks - 1) * factor * scale

    def link(seconds: float):
        def of(sender: int, receiver: int) -> float:
            slow = emulate.slow_link is not None and {sender, receiver} == {emulate.slow_link, emulate.slow_link + 1}
            return seconds * scale * (emulate.slow_link_factor if slow else 1.0)

        return of

    return Hardware(
        duration,
        transfer=link(planned.transfer_s),
        latency=link(planned.latency_s),
        host=lambda rank: emulate.slow_host_s * scale if rank == emulate.slow_host else 0.0,
        jitter=emulate.jitter,
        seed=config.train.seed,
    )


@dataclass(kw_only=True)
class EmulatedTrainer(Trainer):
    """Steps that only take time."""

    planned: Durations
    may_be_cut: bool = True

    def __post_init__(self) -> None:
        config, ranks, parallel = self.config, self.ranks, self.config.parallel
        schedule = make_schedule(parallel.schedule, parallel.stages, parallel.chunks, parallel.interleave)
        self.engine = EmulatedEngine(schedule, hardware(config, self.planned), rank=ranks.rank)
        self.engine.clock.board = ranks.board
        self.engine.accelerator.interrupted = self._is_interrupted
        self.watch = Watch(config, ranks)
        self.tokens_per_step = config.train.global_batch * config.train.sequence
        self.flops_per_step = self.tokens_per_step * model_flops_per_token(config.model, config.train.sequence)
        self.engine.connect()
        if ranks.world > 1:
            dist.barrier()
        self.ready_at = time.time()

    def step(self, step: int) -> Outcome:
        accelerator, clock, scale = self.engine.accelerator, self.engine.clock, self.config.emulate.time_scale
        # past the reduction a wait is cut only where it is so long that another reduction is nothing beside it
        ends_long = (self.planned.reduction_s + self.planned.optimizer_s) * scale > LONG_S
        self.may_be_cut = True
        for _ in range(self.config.train.accumulate):
            self.engine.flush()
        with clock.span(REDUCE, "the step's figures"):
            stop, out_of_time, cut, accelerator.free = self._agree()
            accelerator.cut, self.may_be_cut = cut, ends_long
            accelerator.spend(self.planned.reduction_s * scale)
        with clock.span(OPTIMIZER, OPTIMIZER):
            accelerator.spend(self.planned.optimizer_s * scale)
        if ends_long:
            stop, out_of_time, cut, _ = self._agree()
        accelerator.end()
        return Outcome(None, None, None, stop, out_of_time, [], cut=cut)

    def _agree(self) -> tuple[bool, bool, bool, float]:
        """One reduction: stop requests, whether time is over (by rank 0's clock, or one that cut a wait), whether waits
        were cut, when the last accelerator is free."""
        accelerator, ranks = self.engine.accelerator, self.ranks
        out_of_time = (ranks.rank == 0 or accelerator.cut) and self._is_out_of_time()
        times = [accelerator.free if rank == ranks.rank else 0.0 for rank in range(ranks.world)]
        flags = [float(flag) for flag in (self.stop_requested(), out_of_time, accelerator.cut)]
        stop, out, cut, *times = ranks.sum([*flags, *times])
        return stop > 0, out > 0, cut > 0, max(times)

    def _is_interrupted(self) -> bool:
        return self.may_be_cut and (self.stop_requested() or self._is_out_of_time())

    def _is_out_of_time(self) -> bool:
        limit = self.config.train.max_minutes
        return bool(limit) and time.monotonic() - self.started > 60 * limit

    def validate(self) -> None:
        return None


class Watch(imbalance.Watch):
    """What it finds is in seconds of the emulated hardware."""

    def after_step(self, timings: list[Timing]) -> None:
        scale = self.config.emulate.time_scale
        super().after_step([timing.read(lambda time: None if time is None else time / scale) for timing in timings])


class NoCheckpoints:
    """Stands in for training.checkpoint.Checkpoints: there is nothing to save."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir

    def due(self, step: int) -> bool:
        return False

    def save(self, position: Position, wait: bool) -> None: ...

    def poll(self) -> None: ...

    def figures(self) -> None: ...


class EmulatedRecorder(Recorder):
    """Takes figures in this machine's seconds, and writes them in the emulated hardware's."""

    def __init__(self, run_dir: Path, config: RootConfig, world: int):
        super().__init__(run_dir, config)
        self._scale = config.emulate.time_scale
        self._mfu = self._scale * world / num_devices(config)  # a process stands for all tensor and data ranks

    def step(self, figures: dict[str, Any]) -> None:
        super().step(self._converted(figures))

    def finish(self, status: str, figures: dict[str, Any] | None = None) -> dict:
        return super().finish(status, (figures or {}) | {"emulated": True})

    def _converted(self, figures: dict[str, Any]) -> dict[str, Any]:
        known = {key: value for key, value in figures.items() if value is not None and value != []}
        if "mfu" in known:
            known["mfu"] *= self._mfu
        return scaled(known, self._scale) | {"emulated": True}


def scaled(figures: Any, scale: float, unit: str = "") -> Any:
    """Figures whose names end in _s (at any depth) divided by `scale`, those that end in _per_s times it."""
    if isinstance(figures, dict):
        return {key: scaled(value, scale, _unit(key) or unit) for key, value in figures.items()}
    if isinstance(figures, list):
        return [scaled(value, scale, unit) for value in figures]
    if unit and isinstance(figures, float):
        return figures * scale if unit == "rate" else figures / scale
    return figures


def _unit(name: str) -> str:
    return "rate" if name.endswith("_per_s") else "time" if name.endswith("_s") else ""
