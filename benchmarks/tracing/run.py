"""What tracing costs, and where the time of a real two-core step goes under every schedule.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 benchmarks/tracing/run.py overhead
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 benchmarks/tracing/run.py decomposition

Each writes overhead.csv or decomposition.csv beside this file and its table into the README there; a number behind the
name is the n, in place of 100 and 15. Whole optimizer steps of train.py's own loop (training.loop.Trainer), data and
update included; candidates take one step in turn, so that all meet the same noise.
"""

from __future__ import annotations

import csv
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from conf.resolve import resolve
from conf.schema import RootConfig, register
from pipeline.bubble import PARTS
from pipeline.engines.clock import Clock
from pipeline.schedule import SCHEDULES, Action
from planning.balance import resolved_balance
from training.data import prepare
from training.loop import Trainer
from training.ranks import Ranks
from training.spent import LABELS, typical
from training.timeline import Tracer

WARMUP = 3  # steps that are not counted
REPEATS = {"overhead": 100, "decomposition": 15}
STEPS = 10_000  # of the configuration: more than are run


def configured(*overrides: str) -> RootConfig:
    """As train.py would run it on two cores."""
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = OmegaConf.to_object(compose("config", ["data=synthetic", f"train.steps={STEPS}", *overrides]))
    return resolved_balance(resolve(config))[0]


class Candidate:
    """One configuration's trainer and tracer."""

    def __init__(self, config: RootConfig, folder: Path):
        rank, world = dist.get_rank(), dist.get_world_size()
        ranks = Ranks(rank, world, rank, torch.device("cpu"))
        corpus = prepare(config.data, sequence=config.train.sequence)
        self.trainer = Trainer(config, ranks, corpus, lambda: False)
        recorder = SimpleNamespace(run_dir=folder) if rank == 0 else None
        self.tracer = Tracer(config, self.trainer.engine, ranks, recorder, 0)
        self.done = 0

    def step(self, traced: bool, *, keep: bool = False) -> tuple[float, float, float, dict]:
        """Seconds of the step and of this thread's core in it, of what tracing does after it, and what it found."""
        dist.barrier()
        clock = self.trainer.engine.clock
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        if traced:
            clock.begin()
        self.trainer.step(self.done)
        if traced:
            measured = clock.end()
        end, cpu = time.perf_counter(), time.thread_time() - begin_cpu
        self.done += 1
        if not traced:
            return end - begin, cpu, 0.0, {}
        self.tracer.config.train.log_every = 1
        self.tracer.kept = {self.done, STEPS} if keep else {STEPS}  # the picture is drawn at the last one
        self.tracer.seen.clear()  # timeline.json of one step each time
        self.tracer.events.clear()
        figures = self.tracer.after_step(self.done, measured)
        return end - begin, cpu, time.perf_counter() - end, figures


def overhead(folder: Path, repeats: int) -> list[dict]:
    """Steps with and without, in turn; the order within a pair changes. The default run of `python train.py`."""
    candidate = Candidate(configured(), folder)
    for _ in range(WARMUP):
        candidate.step(True, keep=True)
    wall: dict[bool, list[float]] = {False: [], True: []}
    core: dict[bool, list[float]] = {False: [], True: []}
    after: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(repeats):
        keep = pair % 4 < 2
        for traced in (True, False) if pair % 2 else (False, True):
            seconds, cpu, later, _ = candidate.step(traced, keep=keep)
            wall[traced].append(seconds)
            core[traced].append(cpu)
            if traced:
                after[keep].append(later)
    rows = [compared("step", wall), compared("step, this rank's core", core)]
    rows.append(dict.fromkeys(rows[0], "") | {"what": "the stamps of one action, least of n"} | stamps())
    for keep, name in ((False, "after a logged step"), (True, "after a kept step")):
        rows.append(dict.fromkeys(rows[0], "") | {"what": name, "n": len(after[keep]), "on_ms": ms(after[keep])})
    return rows


def stamps(n: int = 20, actions: int = 1000) -> dict:
    """What the clock does around an action that waits and sends, in processor time."""
    seconds = {}
    for on in (False, True):
        clock, action, times = Clock(), Action(0, "F", 0), []
        for _ in range(n):
            if on:
                clock.begin()
            begin = time.process_time()
            for _ in range(actions):
                clock.waits(action, 0)
                clock.arrived()
                clock.run(action, int)
                clock.sends()
                clock.sent()
            times.append((time.process_time() - begin) / actions)
        seconds[on] = min(times)
    figures = {"off_ms": seconds[False], "on_ms": seconds[True], "difference_ms": seconds[True] - seconds[False]}
    return {"n": n} | {name: f"{value * 1e3:.4f}" for name, value in figures.items()}


def compared(what: str, seconds: dict[bool, list[float]]) -> dict:
    """Without and with tracing, and the median of the differences within pairs."""
    untraced = statistics.median(seconds[False])
    middle, low, high = interval([on - off for off, on in zip(seconds[False], seconds[True], strict=True)])
    return {
        "what": what,
        "n": len(seconds[True]),
        "off_ms": ms(seconds[False]),
        "on_ms": ms(seconds[True]),
        "difference_ms": f"{middle * 1e3:.2f} [{low * 1e3:.2f}..{high * 1e3:.2f}]",
        "overhead": f"{middle / untraced:.2%} [{low / untraced:.2%}..{high / untraced:.2%}]",
    }


def ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f}"


def interval(values: list[float]) -> tuple[float, float, float]:
    """The median, and the order statistics that hold it with 95 % probability (binomial, normal approximation)."""
    ordered, n = sorted(values), len(values)
    reach = 0.98 * n**0.5
    low, high = max(0, int(n / 2 - reach)), min(n - 1, int(n / 2 + reach))
    return statistics.median(ordered), ordered[low], ordered[high]


def decomposition(folder: Path, repeats: int) -> list[dict]:
    """Every schedule at 2 stages and 8 micro-batches of 4 x 128 tokens; 16 equal blocks of width 128, a small head."""
    model = "model.blocks=16 model.hidden=128 model.heads=4 model.vocabulary=256 model.tied=false".split()
    batch = "train.sequence=128 train.global_batch=32 parallel.chunks=8 parallel.balance=uniform".split()
    candidates = {
        name: Candidate(configured(*model, *batch, f"parallel.schedule={name}"), folder) for name in SCHEDULES
    }
    found: dict[str, list[dict]] = {name: [] for name in SCHEDULES}
    for repeat in range(WARMUP + repeats):
        for name, candidate in candidates.items():
            seconds, _, _, figures = candidate.step(True)
            if repeat >= WARMUP:
                found[name].append(figures | {"step_time_s": seconds})
    return [row(name, steps) for name, steps in found.items()] if dist.get_rank() == 0 else []


def row(name: str, steps: list[dict]) -> dict:
    time = typical(steps)["time"]
    step = [sum(rank) for rank in zip(*time.values(), strict=True)]
    whole = statistics.mean(step)

    def median(key: str) -> str:
        return f"{statistics.median(s[key] for s in steps):.3f}"

    worst = max(abs(sum(r[0] for r in s["time"].values()) / s["step_time_s"] - 1) for s in steps)
    return {
        "schedule": name,
        "n": len(steps),
        "step_ms": f"{statistics.median(s['step_time_s'] for s in steps) * 1e3:.0f}",
        **{LABELS[part]: f"{statistics.mean(time[part]) / whole:.1%}" for part in PARTS},
        "bubble measured": median("bubble_fraction"),
        "simulated": median("bubble_fraction_simulated"),
        "ideal": median("bubble_fraction_ideal"),
        "worst sum": f"{worst:.2%}",
    }


def publish(what: str, rows: list[dict]) -> None:
    """Prints the table, and puts it into the README between its marks."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    table = "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
    table += f"\n\nLoad average of the last minute, the two ranks included: {os.getloadavg()[0]:.1f}.\n"
    print(table)
    readme = Path(__file__).with_name("README.md")
    before, mark, rest = readme.read_text().partition(f"<!-- {what} -->\n")
    readme.write_text(before + mark + table + rest[rest.index(f"<!-- end of {what} -->") :])


def main(what: str, repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        rows = {"overhead": overhead, "decomposition": decomposition}[what](Path(folder), repeats)
    if dist.get_rank() == 0:
        with open(Path(__file__).with_name(f"{what}.csv"), "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        publish(what, rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else REPEATS[sys.argv[1]])
