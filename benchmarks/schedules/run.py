"""Step time and bubble of every schedule on two ranks: measured, simulated from measured durations, and torch's own.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 benchmarks/schedules/run.py

Every candidate is built once; then, `REPEATS` times, each runs one step in turn, so that all meet the same noise.
Prints a table and writes results.csv beside this file. A step: from the first F to the last B or W on any rank, without
optimizer; against torch: the call of step() from the first rank's start to the last one's end, for both.
"""

from __future__ import annotations

import csv
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import models
from conf.schema import ModelConfig
from models.describe import describe
from models.loss import token_loss
from pipeline.engines.base import Batch, Stage
from pipeline.engines.torch_engine import TorchEngine
from pipeline.partition import split_stages
from pipeline.schedule import SCHEDULES, make_schedule
from pipeline.simulate import simulate

REPEATS, WARMUP = 9, 2
STAGES, MICROBATCH, SEQUENCE = 2, 4, 128
# 16 equal blocks and a small head, so that the figures are of the schedules and not of the cut
MODEL = ModelConfig(
    name="bench", family="gpt", blocks=16, hidden=128, heads=4, feedforward=512, positions=128, vocabulary=256,
    tied=False,
)  # fmt: skip
TORCH = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
    "looped_bfs": schedules.ScheduleLoopedBFS,
    "zb_h1": schedules.ScheduleInterleavedZeroBubble,
    "zb_v": schedules.ScheduleZBVZeroBubble,
    "dualpipe_v": schedules.ScheduleDualPipeV,
}


def make_stages(schedule) -> dict[int, Stage]:
    layers = [layer.name for layer in describe(MODEL)]
    cut = split_stages("uniform", schedule.num_stages, layers)
    own = [stage for stage, rank in enumerate(schedule.rank_of) if rank == dist.get_rank()]
    starts = {stage: layers.index(cut[stage][0]) for stage in own}
    return {s: Stage(models.build(MODEL, seed=0, start=a, stop=a + len(cut[s]))) for s, a in starts.items()}


class Ours:
    """The project's engine, with the clock on."""

    def __init__(self, name: str, chunks: int):
        self.schedule = make_schedule(name, STAGES, chunks)
        self.engine = TorchEngine(
            make_stages(self.schedule),
            schedule=self.schedule,
            boundary=(SEQUENCE, MODEL.hidden),
            dtype=torch.float32,
            device=torch.device("cpu"),
            microbatch=MICROBATCH,
            loss=token_loss,
            tied={},
        )
        self.engine.clock.on = True
        self.durations: dict[tuple[int, str], list[float]] = {}
        self.steps, self.bubbles, self.calls = [], [], []

    def step(self, inputs, targets, keep: bool) -> None:
        clock = self.engine.clock
        clock.timings.clear()
        for parameter in self.engine.parameters.values():
            parameter.grad = None
        start = time.perf_counter()
        self.engine.step(Batch(inputs, targets), 1.0 / inputs.numel())
        call = call_time(start)
        own = [(str(t.action), t.action.stage, t.action.kind, t.start_s, t.end_s) for t in clock.timings]
        everyone = [None] * STAGES
        dist.all_gather_object(everyone, own)
        if not keep:
            return
        for row in everyone:
            for _, stage, kind, start, end in row:
                self.durations.setdefault((stage, kind), []).append(end - start)
        makespan = max(t[4] for row in everyone for t in row) - min(t[3] for row in everyone for t in row)
        busy = [sum(end - start for *_, start, end in row) for row in everyone]
        self.steps.append(makespan)
        self.calls.append(call)
        self.bubbles.append(statistics.mean(1 - b / makespan for b in busy))

    def simulated(self):
        def medians(kind: str):
            stages = range(self.schedule.num_stages)
            return [statistics.median(self.durations.get((stage, kind), [0.0])) for stage in stages]

        kinds = dict(forward="F", backward="B", backward_input="I", backward_weight="W")
        return simulate(self.schedule, **{key: medians(kind) for key, kind in kinds.items()})


class Theirs:
    """torch's own class over the same layers."""

    def __init__(self, name: str, chunks: int):
        placed = make_schedule(name, STAGES, chunks)
        self.modules = make_stages(placed)
        stages = [PipelineStage(m, i, placed.num_stages, torch.device("cpu")) for i, m in self.modules.items()]
        single = issubclass(TORCH[name], schedules.PipelineScheduleSingle)
        self.schedule = TORCH[name](
            stages[0] if single else stages,
            chunks,
            loss_fn=lambda logits, targets: token_loss(logits, targets) / (chunks * MICROBATCH * SEQUENCE),
            scale_grads=False,
        )
        self.first, self.last = 0 in self.modules, placed.num_stages - 1 in self.modules
        self.calls = []

    def step(self, inputs, targets, keep: bool) -> None:
        for module in self.modules.values():
            module.zero_grad()
        start = time.perf_counter()
        # losses are asked for: without the list torch's classes keep them from step to step
        self.schedule.step(
            *([inputs] if self.first else []),
            target=targets if self.last else None,
            losses=[] if self.last else None,
            return_outputs=False,
        )
        call = call_time(start)
        if keep:
            self.calls.append(call)


def call_time(start: float) -> float:
    """From the first rank's start of step() to the last one's return, which is now; perf_counter is one clock for all
    processes of a Linux machine."""
    spans = [None] * STAGES
    dist.all_gather_object(spans, (start, time.perf_counter()))
    return max(end for _, end in spans) - min(begin for begin, _ in spans)


def spread(values: list[float], scale: float, digits: int) -> str:
    """Median [least .. most]."""
    low, high = min(values) * scale, max(values) * scale
    return f"{statistics.median(values) * scale:.{digits}f} [{low:.{digits}f}..{high:.{digits}f}]"


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for chunks in (8, 16):
        inputs = torch.randint(0, MODEL.vocabulary, (chunks * MICROBATCH, SEQUENCE), generator=torch.manual_seed(0))
        ours = {name: Ours(name, chunks) for name in SCHEDULES}
        theirs = {name: Theirs(name, chunks) for name in TORCH}
        for repeat in range(WARMUP + REPEATS):
            for candidate in (*ours.values(), *theirs.values()):
                dist.barrier()
                candidate.step(inputs, inputs, keep=repeat >= WARMUP)
        if dist.get_rank() == 0:
            rows += [row(name, chunks, ours, theirs) for name in SCHEDULES]
    if dist.get_rank() == 0:
        with open(Path(__file__).with_name("results.csv"), "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        print(f"n = {REPEATS}; median [least..most]")
        for line in [list(rows[0]), *(list(r.values()) for r in rows)]:
            print(" | ".join(str(value) for value in line))
    dist.destroy_process_group()


def row(name: str, chunks: int, ours: dict[str, Ours], theirs: dict[str, Theirs]) -> dict:
    mine, predicted = ours[name], ours[name].simulated()
    measured = statistics.median(mine.steps)
    base = statistics.median(ours["1f1b"].steps)
    own = theirs.get(name)
    work = sum(map(sum, mine.durations.values())) / (REPEATS * STAGES)
    ratio = "" if own is None else statistics.median(a / b for a, b in zip(mine.calls, own.calls, strict=True))
    return {
        "schedule": name,
        "chunks": chunks,
        "step_ms": spread(mine.steps, 1e3, 0),
        "simulated_step_ms": f"{predicted.makespan * 1e3:.0f}",
        "measured_over_simulated": f"{measured / predicted.makespan:.3f}",
        "bubble": spread(mine.bubbles, 1, 3),
        "simulated_bubble": f"{predicted.bubble_fraction:.3f}",
        "call_ms": spread(mine.calls, 1e3, 0),
        "torch_call_ms": "" if own is None else spread(own.calls, 1e3, 0),
        "ours_over_torch": ratio and f"{ratio:.3f}",
        "over_1f1b": f"{measured / base:.3f}",
        "compute_a_rank_ms": f"{work * 1e3:.0f}",
    }


if __name__ == "__main__":
    main()
