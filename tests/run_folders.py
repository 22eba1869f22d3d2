"""Run folders made up for tests of compare.py: the files that train.py leaves, with figures that a test chooses."""

from __future__ import annotations

import json
import math
from pathlib import Path

from composing import resolved

from conf.schema import to_dict
from pipeline.schedule import bubble_ideal, make_schedule
from pipeline.simulate import simulate

_base: dict = {}


def config(**values: object) -> dict:
    """resolved.json's content with these values: config(parallel__stages=4)."""
    if not _base:
        _base.update(to_dict(resolved("data=synthetic", "train.steps=40")))
    made = json.loads(json.dumps(_base))
    for key, value in values.items():
        group, _, name = key.partition("__")
        if name:
            made[group][name] = value
        else:
            made[group] = value
    return made


def write_run(
    folder: Path,
    *,
    status: str | None = "completed",
    steps: int = 40,
    step_time_s: float = 0.5,
    schedule: str = "1f1b",
    stages: int = 2,
    chunks: int = 8,
    timeline: bool = False,
    parts: bool = False,
    result: dict | None = None,
    **values: object,
) -> Path:
    """One run; status None: it has no result.json yet. The loss at step s is 2 + 3 exp(-s / 10) for every layout."""
    interleave = {"interleaved_1f1b": 2, "zb_v": 2}.get(schedule, 1)
    layout = {"parallel__schedule": schedule, "parallel__stages": stages, "parallel__chunks": chunks}
    made = config(**layout, parallel__interleave=interleave, **values)
    folder.mkdir(parents=True)
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps([f"parallel.stages={stages}"]))
    (folder / "resolved.json").write_text(json.dumps(made))
    tokens = made["train"]["global_batch"] * made["train"]["sequence"]
    lines = [_step(s, step_time_s, tokens, stages, parts) for s in range(1, steps + 1)]
    lines.append({"step": steps, "validation_loss": 2.5, "bits_per_byte": 3.6})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ideal = bubble_ideal(make_schedule(schedule, stages, chunks, interleave))
    predicted = {"step_time_s": 0.9 * step_time_s, "tokens_per_s": tokens / step_time_s / 0.9, "bubble_fraction": ideal}
    predicted["peak_memory_bytes"] = [2**28] * stages
    (folder / "plan.json").write_text(json.dumps({"predicted": predicted}))
    if timeline:
        (folder / "timeline.json").write_text(json.dumps(trace(schedule, stages, chunks, interleave)))
    if status is not None:
        found = {"status": status, "steps": steps, "loss": lines[-2]["loss"], "validation_loss": 2.5}
        found |= {"step_time_s": step_time_s, "tokens_per_s": tokens / step_time_s, "bubble_fraction": ideal + 0.02}
        found |= {"bubble_fraction_ideal": ideal, "peak_memory_bytes": [2**28 + r for r in range(stages)]}
        found |= {"predicted": predicted, "error": {"step_time_s": -0.1}, "overrides": [f"parallel.stages={stages}"]}
        if parts:
            found["time"] = lines[0]["time"]
        (folder / "result.json").write_text(json.dumps(found | (result or {})))
    return folder


def _step(step: int, step_time_s: float, tokens: int, stages: int, parts: bool) -> dict:
    made = {"step": step, "loss": 2 + 3 * math.exp(-step / 10), "step_time_s": step_time_s}
    made |= {"tokens_per_s": tokens / step_time_s, "consumed_tokens": step * tokens, "elapsed_s": step * step_time_s}
    made["memory_bytes"] = [2**27 + step] * stages
    if parts:
        share = {"compute_s": 0.7, "schedule_idle_s": 0.2, "exposed_communication_s": 0.05, "optimizer_s": 0.05}
        made["time"] = {key: [part * step_time_s] * stages for key, part in share.items()}
    return made


def trace(schedule: str, stages: int, chunks: int, interleave: int = 1) -> dict:
    """A timeline.json of two steps, the second as simulated with F = 10 ms; the first shorter by an action."""
    plan = make_schedule(schedule, stages, chunks, interleave)
    times = simulate(plan, forward=10_000)
    events: list[dict] = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "rank 0"}}]
    for step, offset in ((4, 0), (5, 5_000_000)):
        for rank, row in enumerate(plan.actions):
            for (stage, kind, microbatch), start, end in zip(row, times.start[rank], times.end[rank], strict=True):
                event = {"ph": "X", "name": f"{kind} {microbatch}", "pid": 0, "tid": rank, "ts": offset + start}
                event |= {"dur": end - start, "args": {"stage": stage, "microbatch": microbatch, "step": step}}
                events.append(event)
    return {"traceEvents": [event for event in events if event is not events[1]]}


def study(folder: Path) -> Path:
    """An experiment: four schedules on 2 and 4 stages by 4, 8 and 16 chunks, and every way in which a run can end."""
    number = 0
    for schedule, speed in (("gpipe", 1.0), ("1f1b", 1.02), ("interleaved_1f1b", 1.1), ("zb_h1", 1.08)):
        for stages in (2, 4):
            for chunks in (4, 8, 16):
                interleave = 2 if schedule == "interleaved_1f1b" else 1
                ideal = bubble_ideal(make_schedule(schedule, stages, chunks, interleave))
                seconds = 0.4 / (1 - ideal) / speed * (1 + 0.02 * chunks)
                swept = f"schedule={schedule}_stages={stages}_chunks={chunks}"
                name = f"2026-01-31_12-00-{number:02d}_{number:02d}_{swept}"
                first = chunks == 8 and stages == 4
                ending = {"gpipe": {4: "out_of_memory", 16: "stopped"}, "zb_h1": {4: "failed"}}.get(schedule, {})
                status = ending.get(chunks, "completed") if stages == 4 else "completed"
                bad = {"failure": f"rank 1 failed: RuntimeError: made up <{number}>"}
                write_run(
                    folder / name, schedule=schedule, stages=stages, chunks=chunks, step_time_s=seconds, parts=first,
                    timeline=first, status=status, steps=1 if status in ("failed", "out_of_memory") else 40,
                    result={"tokens_per_s": None, **bad} if status in ("failed", "out_of_memory") else None,
                )  # fmt: skip
                number += 1
    return folder
