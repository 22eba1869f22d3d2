"""Where a run's time goes: logged steps explained, some kept as timeline.json and timeline.png; on rank 0.

    metrics.jsonl   of a logged step: `time` (pipeline/bubble.py's parts, one number a rank), `where`, `data_wait_s`,
                    `bubble_fraction`, `bubble_fraction_ideal`, `bubble_fraction_simulated`
    timeline.json   every action of the steps of train.trace; opens in Perfetto (pipeline/trace.py). Replaced whole at
                    the 1st, 2nd, 4th, 8th … of them, and however the run ends: a kill leaves half of them or more
    timeline.png    one of them, drawn above the predicted step

Only rank 0's pipeline is gathered; its replicas, if there are any, do the same. All ranks of it call `after_step`, once
the step is over, so nothing of this is in a step's time.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import torch.distributed as dist

from conf.device import num_cores
from conf.names import named
from conf.schema import RootConfig, from_dict
from conf.words import count
from pipeline import picture, trace
from pipeline.bubble import Explanation, explain, repeated
from pipeline.engines.base import Engine
from pipeline.placement import num_ranks
from pipeline.schedule import Schedule, bubble_ideal
from pipeline.simulate import simulate
from pipeline.spans import DATA, RankStep
from planning.durations import durations
from training import clocks
from training.outcome import read_plan
from training.ranks import Ranks

if TYPE_CHECKING:
    from training.record import Recorder

WARM_UP = 2  # steps of this process that are not kept, unless they are asked for by number
INSIDE = "gathers, reductions inside a backward and tensor-parallel messages count as compute"
UNSEEN = "fairscale runs its stages itself: actions, waiting and messages are not told apart, and no bubble is measured"


class Tracer:
    """Gathers the steps that are logged or kept, explains them, and writes the timeline.

    Args:
        recorder: on rank 0, None on the others.
        done: steps before the first of this process.
    """

    def __init__(self, config: RootConfig, engine: Engine, ranks: Ranks, recorder: Recorder | None, done: int):
        self.config, self.engine, self.ranks, self.recorder = config, engine, ranks, recorder
        self.schedule = engine.schedule
        self.first = done + 1
        self.kept = kept_steps(config.train.trace, done, config.train.steps)
        self.group, self.members = _pipeline_of_rank_0(engine, ranks)
        self.clocks: clocks.Offsets | None = None
        self.unit = config.emulate.time_scale if config.emulate.enabled else 1.0  # seconds in one of those shown
        self.seen: list[tuple[int, list[RankStep], Explanation | None]] = []  # the steps kept so far
        self.events: list[dict] = []
        self.unwritten = False  # whether timeline.json lacks some of them
        if ranks.device.type == "cuda":
            from pipeline.engines.cuda_stamps import CudaStamps

            engine.clock.stamps = CudaStamps()

    def __enter__(self) -> Tracer:
        return self

    def __exit__(self, *error: object) -> None:
        """No further step: also after an exception timeline.json has what was kept."""
        self._write()

    def after_step(self, step: int, measured: RankStep) -> dict:
        """Of step number `step` (from 1): what its record in metrics.jsonl gets on rank 0, empty on other ranks and
        where the step is not looked at. All ranks call it."""
        keeps, every = step in self.kept, self.config.train.log_every
        if not self.config.train.trace:
            return {}
        if not (keeps or step == self.first or step % every == 0 or step == self.config.train.steps):
            return {}
        if self.ranks.rank not in self.members:
            return {}
        with self.ranks.together("the timeline"):
            steps = self._gather(measured)
            figures = {} if steps is None else self._look_at(step, steps, keeps)
            if self.group is not None:  # all begin the next step together: it is not to wait for this
                dist.barrier(self.group)
        return figures

    def _gather(self, measured: RankStep) -> list[RankStep] | None:
        """On rank 0: the step of every rank of its pipeline, on rank 0's clock."""
        if self.group is None:
            return [measured]
        if self.clocks is None or not self.clocks.shared:  # clocks of several machines drift
            self.clocks = clocks.align(self.group, self.members, self.ranks.rank)
        steps = [None] * len(self.members) if self.ranks.rank == 0 else None
        dist.gather_object(measured, steps, dst=0, group=self.group)
        if steps is None:
            return None
        return [step.moved(-offset) for step, offset in zip(steps, self.clocks.applied_s, strict=True)]

    def _look_at(self, step: int, steps: list[RankStep], keeps: bool) -> dict:
        waits = [sum(s.end_s - s.start_s for s in rank.spans if s.kind == DATA) for rank in steps]
        figures: dict = {"data_wait_s": max(waits)}
        explanation = None
        if self.schedule is not None:
            explanation = explain(self.schedule, steps)
            figures |= {
                "time": explanation.parts,
                "where": explanation.where,
                "bubble_fraction": explanation.bubble_fraction,
                "bubble_fraction_ideal": bubble_ideal(self.schedule),
                "bubble_fraction_simulated": explanation.bubble_fraction_simulated,
            }
        if keeps:
            self._keep(step, steps, explanation)
        return figures

    def _keep(self, step: int, steps: list[RankStep], explanation: Explanation | None) -> None:
        """Adds the step to those of timeline.json; the last one that is kept also draws timeline.png."""
        steps = [rank.scaled(1 / self.unit) for rank in steps]
        self.seen.append((step, steps, explanation))
        self.unwritten = True
        if not self.events:
            self.events = trace.names(
                f"{named('model', self.config.model)} {named('parallel', self.config.parallel)}", len(steps)
            )
        origin_s = min(rank.begin_s for rank in self.seen[0][1])
        self.events += trace.events(step, self.schedule, steps, origin_s)
        count = len(self.seen)
        if count & (count - 1) == 0 or step == max(self.kept):  # a long list is written a few times, not at each step
            self._write()
        if step == max(self.kept):
            self._draw()

    def _write(self) -> None:
        """timeline.json with all steps so far, whole or not at all; nothing where it has them."""
        if not self.unwritten:
            return
        self.unwritten = False
        text = json.dumps(trace.document(self.events, self._about()), separators=(",", ":"))
        partial = self.recorder.run_dir / f"timeline.json.{os.getpid()}.tmp"
        partial.write_text(text)
        os.replace(partial, self.recorder.run_dir / "timeline.json")

    def close(self) -> str | None:
        """Draws what was kept of a run that ended before all of it was; what is to be said of the measured bubble."""
        if self.seen and self.seen[-1][0] != max(self.kept):
            self._draw()
        parallel = self.config.parallel
        inside = parallel.tensor > 1 or (parallel.data > 1 and parallel.shard in ("gradients", "full"))
        notes = (self._note(), INSIDE if inside and self.schedule is not None and self.config.train.trace else None)
        return "; ".join(note for note in notes if note) or None

    def _draw(self) -> None:
        """timeline.png: of the steps kept, the one with the median flush."""
        if self.schedule is None:
            return
        step, steps, explanation = sorted(self.seen, key=lambda kept: kept[2].makespan_s)[len(self.seen) // 2]
        config, folder = self.config, self.recorder.run_dir
        planned, predicted = None, None
        plan = read_plan(folder)
        if "predicted" in plan:
            planned = planned_step(plan, self.schedule, config.train.accumulate)
            predicted = plan["predicted"]["bubble_fraction"]
        figures = {
            "measured": explanation.bubble_fraction,
            "simulated with the measured durations": explanation.bubble_fraction_simulated,
            "ideal": bubble_ideal(self.schedule),
            "predicted": predicted,
        }
        shown = ", ".join(f"{value:.3f} {name}" for name, value in figures.items() if value is not None)
        notes = [f"bubble_fraction  {shown}"] + ([note] if (note := self._note()) else [])
        parallel = config.parallel
        title = (
            f"{named('model', config.model)}  {named('parallel', parallel)}  {self.schedule.name}  "
            f"stages={parallel.stages} chunks={parallel.chunks} interleave={parallel.interleave}  step {step}"
        ) + ("  emulated" if config.emulate.enabled else "")
        picture.draw(folder / "timeline.png", self.schedule, steps, planned, title=title, notes=notes)

    def _about(self) -> dict:
        about = {"ranks": self.members, "steps": sorted(self.kept), "schedule": self.config.parallel.schedule}
        if self.clocks is not None:
            about["clocks"] = self.clocks.to_dict()
        if self.config.emulate.enabled:
            about["emulated"] = f"seconds of {self.config.hardware.name}; one took {self.unit:g} s here"
        return about | ({"note": note} if (note := self._note()) else {})

    def _note(self) -> str | None:
        notes = [UNSEEN if self.schedule is None else crowded(self.config)]
        if len(self.members) < self.ranks.world:
            notes.append(f"ranks here are those of rank 0's pipeline, {self.members} of all {self.ranks.world}")
        return "; ".join(note for note in notes if note) or None


def planned_step(plan: dict, schedule: Schedule, flushes: int) -> list[RankStep] | None:
    """The predicted step of a run's plan.json; None where a figure is missing."""
    try:
        planned = durations(from_dict(plan["config"]))
    except ValueError:
        return None
    last, whole = schedule.chunks - 1, repeated(schedule, flushes)

    def of(kind: str) -> list[list[float]]:
        columns = [index % schedule.chunks == last for index in range(whole.chunks)]
        return [[planned.of(stage, kind, is_last) for is_last in columns] for stage in range(schedule.num_stages)]

    kinds = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}
    timeline = simulate(
        whole,
        **{name: of(kind) for name, kind in kinds.items()},
        transfer_latency_s=planned.latency_s,
        transfer_s=planned.transfer_s,
    )
    return picture.planned_step(whole, timeline, planned.reduction_s, planned.optimizer_s)


def kept_steps(wanted: int | list[int], done: int, last: int) -> set[int]:
    """The steps (from 1) of a process that goes on from `done` which timeline.json keeps: so many after warm-up, or in
    a short run the last ones; or those of the list."""
    if isinstance(wanted, int):
        first = max(done + 1, min(done + 1 + WARM_UP, last - wanted + 1))
        return set(range(first, min(last, first + wanted - 1) + 1))
    return set(wanted)


def crowded(config: RootConfig) -> str | None:
    """What is to be said of a measured bubble where ranks wait for cores; None where they do not."""
    ranks, cores = num_ranks(config.parallel), num_cores()
    if config.emulate.enabled or config.hardware.device != "cpu" or ranks <= cores:
        return None
    return (
        f"{ranks} ranks share {count(cores, 'core')}: they wait for a core as well, so the measured bubble means little"
    )


def _pipeline_of_rank_0(engine: Engine, ranks: Ranks) -> tuple[dist.ProcessGroup | None, list[int]]:
    """The ranks of rank 0's pipeline, and a group of theirs over gloo, whatever the training's messages run over."""
    if ranks.world == 1:
        return None, [0]
    members = [dist.get_process_group_ranks(engine.group)]
    dist.broadcast_object_list(members, src=0, device=ranks.device)
    return dist.new_group(members[0], backend="gloo"), members[0]
