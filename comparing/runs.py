"""Run folders as plain values: found, read and given a status; half-written and older ones too, never an exception.

result.json      status and last figures; missing while a run goes on, or when it was killed
resolved.json    the configuration that ran; .hydra/config.yaml where a job was refused before
metrics.jsonl    one object a step; of a long run an even choice of POINTS lines is parsed
plan.json        what was predicted
timeline.json    actions of some steps (comparing/timeline.py)
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from conf.words import count

POINTS = 300  # lines of metrics.jsonl that are parsed, at most, beside the validations
MARKS = ("result.json", "resolved.json", "metrics.jsonl", ".hydra")  # what makes a folder a run
ENDED_WELL = ("completed", "stopped")
# figures of result.json that are lists with an entry a rank, and the one number that a table shows of them
LISTS = {"peak_memory_bytes": max, "peak_resident_bytes": max}


@dataclass(eq=False)
class Run:
    """One run folder. `config` is flat ("parallel.stages": 2), and empty where none can be read."""

    path: Path
    status: str  # of result.json; or running, unfinished (killed, or on another machine), unreadable
    config: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)  # result.json, or what metrics.jsonl says so far
    plan: dict[str, Any] = field(default_factory=dict)
    steps: list[dict] = field(default_factory=list)  # of metrics.jsonl, an even choice, the last one included
    validations: list[dict] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    note: str = ""  # why it did not end well, or what is missing

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def evaluates(self) -> bool:
        """A run of `train.py evaluate=RUN`: it trained nothing, its figures are `evaluation.…`."""
        return self.config.get("evaluate") is not None or isinstance(self.result.get("evaluation"), dict)

    @property
    def ended_well(self) -> bool:
        return self.status in ENDED_WELL and (number(self.figures.get("tokens_per_s")) or 0) > 0

    @cached_property
    def figures(self) -> dict[str, Any]:
        """What tables and plots show, by result.json's names; lists as their largest entry; errors as "error.NAME"."""
        found = {key: value for key, value in self.result.items() if isinstance(value, (int, float, str))}
        if self.evaluates:  # what a plan predicts is a step of training
            found.pop("steps", None)
            held_out = _dict(self.result.get("evaluation")).items()
            found |= {f"evaluation.{key}": value for key, value in held_out if isinstance(value, (int, float, str))}
            return found | {"evaluation.run": _last_part(found.get("evaluation.run") or self.config.get("evaluate"))}
        for key, one in LISTS.items():
            values = [value for value in map(number, _list(self.result.get(key))) if value is not None]
            if values:
                found[key] = one(values)
        for part, seconds in _dict(self.result.get("time")).items():
            values = [value for value in map(number, _list(seconds)) if value is not None]
            if values:
                found[f"time.{part}"] = statistics.mean(values)
        for group in ("predicted", "error"):
            for key, value in _dict(self.result.get(group) or (self.plan.get(group))).items():
                values = [v for v in map(number, value if isinstance(value, list) else [value]) if v is not None]
                if values:
                    found[f"{group}.{key}"] = max(values, key=abs if group == "error" else None)
        found.setdefault("bubble_fraction_ideal", self.ideal_bubble())
        found["micro_batch"] = self.micro_batch()
        return {key: value for key, value in found.items() if value is not None}

    def micro_batch(self) -> int | None:
        """Sequences of one micro-batch, on one replica; None where nothing was trained."""
        batch, chunks = (self.config.get(key) for key in ("train.global_batch", "parallel.chunks"))
        accumulate, data = (self.config.get(key, 1) for key in ("train.accumulate", "parallel.data"))
        if self.evaluates or not all(
            isinstance(value, int) and value > 0 for value in (batch, chunks, accumulate, data)
        ):
            return None
        size, rest = divmod(batch, accumulate * chunks * data)
        return size if size and not rest else None

    def ideal_bubble(self) -> float | None:
        """The schedule's bubble when every stage takes the same time, for runs that did not write it."""
        engine, stages = self.config.get("parallel.engine"), self.config.get("parallel.stages")
        if engine == "single" or stages == 1:
            return 0.0
        schedule = "gpipe" if engine == "fairscale" else self.config.get("parallel.schedule")
        return _ideal(schedule, stages, self.config.get("parallel.chunks"), self.config.get("parallel.interleave"))


@cache
def _ideal(schedule: Any, stages: Any, chunks: Any, interleave: Any) -> float | None:
    from pipeline.schedule import SCHEDULES, bubble_ideal, make_schedule

    if (
        not isinstance(schedule, str)
        or schedule not in SCHEDULES
        or not isinstance(stages, int)
        or not isinstance(chunks, int)
    ):
        return None  # a schedule of the user's own is code: not run here
    try:
        return bubble_ideal(make_schedule(schedule, stages, chunks, interleave))
    except (ValueError, TypeError):  # no layout; an interleave that is no number
        return None


def number(value: Any) -> float | None:
    """The value where it is a finite number, else None ("nan" and "inf" are written as words)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if value == value and abs(value) != float("inf") else None


def _last_part(folder: Any) -> str:
    return Path(str(folder)).name


def _list(value: Any) -> list:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict:
    return value if isinstance(value, dict) else {}


# --- finding ---


def find(folders: Iterable[Path]) -> list[Path]:
    """The run folders in or below these, in the order of their names, each once. Hidden folders are not searched.

    Raises ValueError for a folder that is not there, or when there is no run in any.
    """
    folders, found = list(folders), {}
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder{_meant(folder)}")
        for path in _walk(folder):
            found.setdefault(path.resolve(), path)
    if not found:
        raise ValueError(f"no run in {', '.join(map(str, folders))}: a run folder holds {' or '.join(MARKS)}")
    return list(found.values())


def is_run(folder: Path) -> bool:
    return any((folder / mark).exists() for mark in MARKS)


def _walk(folder: Path) -> Iterator[Path]:
    if is_run(folder):
        yield folder
        return
    try:
        below = sorted(
            entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False) and entry.name[0] != "."
        )
    except OSError:
        return
    for path in below:
        yield from _walk(Path(path))


def _meant(folder: Path) -> str:
    here = Path("experiments", folder)
    if here.is_dir():
        return f"; did you mean {here}?"
    try:
        names = sorted(entry.name for entry in folder.parent.iterdir() if entry.is_dir() and entry.name[0] != ".")
    except OSError:
        return ""
    return f"; {folder.parent} holds {', '.join(names[:10])}" if names else ""


# --- reading ---


def read_all(paths: Iterable[Path]) -> list[Run]:
    """Every run, whatever state it is in."""
    locked = _locked_files()
    return [read(path, locked) for path in paths]


def read(path: Path, locked: set[str] | None = None) -> Run:
    """One run folder. locked: device and inode of locked files, as `_locked_files` gives."""
    run = Run(path, "unfinished")
    result, flaw = _json(path / "result.json")
    plan, _ = _json(path / "plan.json")
    run.plan, run.steps, run.validations = plan or {}, *read_metrics(path / "metrics.jsonl")
    run.config, missing = _config(path)
    if result is not None and isinstance(result.get("status"), str):
        run.status, run.result = result["status"], result
        older = result.get("error") if isinstance(result.get("error"), str) else ""  # its name before `failure`
        run.note = str(result.get("failure") or older or result.get("reason") or "")
    else:
        run.result = _so_far(run)
        if flaw or result is not None:
            run.status, run.note = "unreadable", f"result.json {flaw or 'has no status'}"
        else:
            run.status, run.note = _alive(path, run, _locked_files() if locked is None else locked)
    if missing:
        run.note = "; ".join(filter(None, [run.note, missing]))
    run.overrides = [str(o) for o in _list(run.result.get("overrides"))] or _overrides(path)
    return run


def read_metrics(path: Path) -> tuple[list[dict], list[dict]]:
    """An even choice of POINTS training steps, the last one included, and all validations; broken lines left out."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]  # what has no line end yet is being written
    except OSError:
        return [], []
    steps = [line for line in lines if b'"validation_loss"' not in line]
    if len(steps) > POINTS:
        steps = [steps[round(i * (len(steps) - 1) / (POINTS - 1))] for i in range(POINTS)]
    validations = [line for line in lines if b'"validation_loss"' in line][-10 * POINTS :]
    return list(_parsed(steps)), list(_parsed(validations))


def _parsed(lines: Iterable[bytes]) -> Iterator[dict]:
    for line in lines:
        try:
            figures = json.loads(line)
        except ValueError:
            continue
        if isinstance(figures, dict) and isinstance(figures.get("step"), int):
            yield figures


def _json(path: Path) -> tuple[dict | None, str]:
    """The object in a file and ""; None and what is wrong with it; None and "" where there is no file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"cannot be read: {error.strerror}"
    except ValueError:
        return None, "is damaged"
    return (value, "") if isinstance(value, dict) else (None, "is no object")


def _config(path: Path) -> tuple[dict[str, Any], str]:
    """The flat configuration, and what is missing."""
    values, flaw = _json(path / "resolved.json")
    if values is not None:
        return _of_what_ran(dict(_flat(values))), ""
    composed = _yaml(path / ".hydra" / "config.yaml")
    if not isinstance(composed, dict):
        return {}, f"resolved.json {flaw}" if flaw else "no configuration"
    # refused before it was resolved: what was to be chosen for the user is not known, and differs from nothing
    known = {key: value for key, value in _flat(composed) if value is not None}
    if known.get("hardware.name") == "auto":
        known = {key: value for key, value in known.items() if not key.startswith("hardware.")}
    return _of_what_ran(known), ""


def _of_what_ran(config: dict[str, Any]) -> dict[str, Any]:
    """`evaluate` as the name of the run evaluated, and only of runs that do; these have no number of steps."""
    evaluated = config.pop("evaluate", None)
    if evaluated is None:
        return config
    config.pop("train.steps", None)
    return config | {"evaluate": _last_part(evaluated)}


def _flat(values: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:  # a list by its text: values are compared and grouped
            yield f"{prefix}{key}", json.dumps(value).replace(" ", "") if isinstance(value, list) else value


def _yaml(path: Path) -> Any:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster where libyaml is there
    try:
        return yaml.load(path.read_bytes(), loader)
    except (OSError, yaml.YAMLError):
        return None


def _overrides(path: Path) -> list[str]:
    return [str(override) for override in _list(_yaml(path / ".hydra" / "overrides.yaml"))]


# --- a run that has not ended ---


def _so_far(run: Run) -> dict[str, Any]:
    """Figures of result.json's names from the steps that there are; as training.record.summary computes them."""
    found: dict[str, Any] = {}
    if run.validations:
        found = {key: run.validations[-1].get(key) for key in ("validation_loss", "bits_per_byte")}
    if not run.steps:
        return found
    found |= {"steps": run.steps[-1]["step"], "loss": run.steps[-1].get("loss")}
    steady = run.steps[max(1, len(run.steps) // 10) :] or run.steps
    for key in ("tokens_per_s", "step_time_s", "mfu", "bubble_fraction", "bubble_fraction_ideal", "data_wait_s"):
        values = [value for value in (number(step.get(key)) for step in steady) if value is not None]
        if values:
            found[key] = statistics.median(values)
    memory = [step["memory_bytes"] for step in run.steps if _list(step.get("memory_bytes"))]
    if memory:
        same = [ranks for ranks in memory if len(ranks) == len(memory[-1])]
        found["peak_memory_bytes"] = [max(rank) for rank in zip(*same, strict=True)]
    return {key: value for key, value in found.items() if value is not None}


def _alive(path: Path, run: Run, locked: set[str]) -> tuple[str, str]:
    """running, when a process here holds the run's lock; else unfinished, with when it last wrote."""
    total = run.config.get("train.steps")
    done = run.steps[-1]["step"] if run.steps else 0
    progress = f"{done} of {count(total, 'step')}" if total else count(done, "step")
    if run.evaluates:
        progress = f"evaluation of {run.config['evaluate']}"
    try:
        status = (path / "logs" / "lock").stat()
        if f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}" in locked:
            return "running", progress
    except OSError:
        pass
    times = []
    for file in (path / "metrics.jsonl", path / "resolved.json", path / ".hydra", path):
        try:
            times.append(file.stat().st_mtime)
        except OSError:
            continue
    ago = max(0.0, time.time() - max(times, default=time.time()))
    return "unfinished", f"{progress}, last written {_ago(ago)} ago, no result.json"


def _ago(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _locked_files() -> set[str]:
    """Device and inode, as /proc/locks writes them, of the files that a process of this machine holds locked."""
    try:
        return {word for line in Path("/proc/locks").read_text().splitlines() for word in line.split()[5:6]}
    except OSError:
        return set()
