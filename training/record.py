"""The run folder's records: metrics.jsonl, TensorBoard events and result.json. Imports neither torch nor TensorBoard
until a run writes events.

    metrics.jsonl   one JSON object a line: a training step or a validation; not-a-number and infinite as "nan", "inf"
    events.out.*    TensorBoard: the same figures by step and by token, config and plan, HParams (training/events.py)
    result.json     written once, at the end, whatever the end: status, last figures, versions, overrides
"""

from __future__ import annotations

import atexit
import json
import math
import os
import platform
import statistics
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from conf.schema import RootConfig, from_dict, to_dict
from training import events, outcome, spent

STATUSES = ("completed", "stopped", "failed", "out_of_memory", "invalid", "skipped")

# TensorBoard's tag of each figure; the same for every engine, so that runs can be laid over each other
TAGS = {
    "loss": "loss/train",
    "validation_loss": "loss/validation",
    "bits_per_byte": "loss/bits_per_byte",
    "learning_rate": "optimizer/learning_rate",
    "gradient_norm": "optimizer/gradient_norm",
    "tokens_per_s": "throughput/tokens_per_s",
    "step_time_s": "throughput/step_time_s",
    "model_flops_per_s": "throughput/model_flops_per_s",
    "mfu": "throughput/mfu",
    "bubble_fraction": "bubble/fraction",
    "bubble_fraction_ideal": "bubble/ideal",
    "bubble_fraction_simulated": "bubble/simulated",
    "data_wait_s": "data/wait_s",
    "consumed_samples": "progress/consumed_samples",
    "consumed_tokens": "progress/consumed_tokens",
}

# those that are written against tokens as well, as over_tokens/loss/train
BY_TOKENS = ("loss", "validation_loss", "bits_per_byte", "learning_rate", "gradient_norm", "tokens_per_s", "mfu")

# the columns of TensorBoard's HParams tab: what a sweep is likely to vary; the whole config is in the TEXT tab
HPARAMS = {
    "model": "name blocks hidden heads vocabulary tied dropout",
    "parallel": "name engine schedule stages chunks interleave tensor data shard balance checkpoint",
    "optimizer": "name learning_rate schedule warmup_steps weight_decay clip_norm",
    "hardware": "name",
    "data": "name tokenizer",
    "train": "steps global_batch sequence accumulate seed precision",
    "emulate": "enabled",
}


# of result.json: what is a median over a run's steps
MEDIANS = (
    "tokens_per_s",
    "step_time_s",
    "mfu",
    "bubble_fraction",
    "bubble_fraction_ideal",
    "bubble_fraction_simulated",
)
MEDIANS += ("data_wait_s",)


class Recorder:
    """What rank 0 writes while it trains. `finish` ends it; a run that dies before is ended by `finish_failed`."""

    def __init__(self, run_dir: str | os.PathLike, config: RootConfig, done: int = 0):
        """done: steps that the run goes on from; what is recorded of later ones is taken back."""
        from torch.utils.tensorboard import SummaryWriter

        self.run_dir = Path(run_dir)
        self.started = time.time()
        self.tokens_per_step = config.train.global_batch * config.train.sequence
        self._done = done
        keep_steps(self.run_dir, done)
        kept = [record for kind in _read_metrics(self.run_dir / "metrics.jsonl") for record in kind]
        self._trained_s = max((record.get("elapsed_s", 0.0) for record in kept), default=0.0)
        self._metrics = open(self.run_dir / "metrics.jsonl", "a", buffering=1)  # a line is on disk when it is written
        again = any(self.run_dir.glob("events.out.tfevents.*"))
        self._events = SummaryWriter(str(self.run_dir), purge_step=done + 1 if again else None)
        self._flushed = 0.0
        atexit.register(self.close)  # an exception ends the process without `finish`
        for title, text in events.texts(self.run_dir, config).items():
            self._events.add_text(title, text)
        self._events.add_custom_scalars(events.LAYOUT)
        self._events.file_writer.add_summary(events.session_start(hparams(config)))
        for figures in kept:
            if not again:  # the run goes on from one in another folder: its curves come along
                self._scalars(figures)
            self._by_tokens(figures)  # again: purge_step takes back what has a larger number, and tokens are larger
        self._events.flush()

    def step(self, figures: dict[str, Any]) -> None:
        """Write one training step: `step` (from 1), `loss`, … as in TAGS; `memory_bytes` of each rank. It is marked
        with the steps that this start goes on from."""
        self._write(figures | {"started_after": self._done})

    def validation(self, step: int, figures: dict[str, Any]) -> None:
        """Write one validation after `step` steps: `validation_loss` (nats a token), `bits_per_byte`."""
        self._write({"step": step, **figures})

    def finish(self, status: str, figures: dict[str, Any] | None = None) -> dict:
        """End the run and write result.json: `figures` (`reason`, `split`, …) take the place of `summary`'s."""
        seconds = time.time() - self.started
        result = {"status": status, "seconds": seconds, **(figures or {})}
        measured = summary(self.run_dir) | result
        for tag, value in outcome.scalars(outcome.compared(self.run_dir, measured)).items():
            self._events.add_scalar(tag, value, measured["steps"])
        if (picture := events.picture(self.run_dir / "timeline.png", "timeline")) is not None:
            self._events.file_writer.add_summary(picture, measured["steps"])
        self._events.file_writer.add_summary(events.session_end(status))
        self.close()
        return write_result(self.run_dir, result)

    def close(self) -> None:
        """Put everything on disk and end no record; `finish` does it too."""
        atexit.unregister(self.close)
        self._metrics.close()
        self._events.close()

    def _write(self, figures: dict[str, Any]) -> None:
        figures = figures | {"elapsed_s": round(self._trained_s + time.time() - self.started, 3)}
        self._metrics.write(_to_json(figures) + "\n")
        self._scalars(figures)
        self._by_tokens(figures)
        if time.monotonic() - self._flushed > 1.0:  # so that TensorBoard and a kill -9 find the run up to date
            self._events.flush()
            self._flushed = time.monotonic()

    def _scalars(self, figures: dict[str, Any]) -> None:
        for tag, value in events.scalars(figures, TAGS).items():
            self._events.add_scalar(tag, value, figures["step"])

    def _by_tokens(self, figures: dict[str, Any]) -> None:
        """The same curves against tokens: runs with other batches can then be laid over each other."""
        for key, value in figures.items():
            if key in BY_TOKENS and value is not None:
                self._events.add_scalar(f"over_tokens/{TAGS[key]}", value, figures["step"] * self.tokens_per_step)


def keep_steps(run_dir: str | os.PathLike, done: int) -> None:
    """Take the lines of steps after `done` out of metrics.jsonl, and a last one cut short by a kill; all at once."""
    path = Path(run_dir) / "metrics.jsonl"
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= done:
                kept.append(line + "\n")
        except json.JSONDecodeError:
            continue
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(partial, "w") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


# --- result.json ---


def write_result(run_dir: str | os.PathLike, result: dict[str, Any]) -> dict:
    """Write RUN/result.json whole or not at all, and return it: the figures that metrics.jsonl holds, then `result`,
    which must have a `status`, then versions and overrides. Keys that are None are left out."""
    assert result["status"] in STATUSES, result["status"]
    run_dir = Path(run_dir)
    full = {"status": result["status"]} | summary(run_dir) | result
    full = {key: value for key, value in full.items() if value is not None}
    full |= outcome.compared(run_dir, full)
    full |= {"versions": versions(), "overrides": read_overrides(run_dir)}
    partial = run_dir / f"result.json.{os.getpid()}.tmp"
    partial.write_text(_to_json(full, indent=1) + "\n")
    os.replace(partial, run_dir / "result.json")
    return full


def read_result(run_dir: str | os.PathLike) -> dict | None:
    """RUN/result.json, or None while the run has not ended."""
    try:
        return json.loads((Path(run_dir) / "result.json").read_text())
    except FileNotFoundError:
        return None


def finish_failed(run_dir: str | os.PathLike, status: str, config: RootConfig | None = None, **figures: Any) -> dict:
    """End a run in place of the rank that could not: result.json, and the end of the HParams session in an event file
    of its own; with the session's beginning when the run never wrote one and its configuration is known (`config`, or
    RUN/resolved.json)."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    resolved = Path(run_dir) / "resolved.json"
    if config is None and resolved.exists():
        config = from_dict(json.loads(resolved.read_text()))
    if config is not None and config.emulate.enabled:
        figures = {"emulated": True, **figures}
    begun = any(Path(run_dir).glob("events.out.tfevents.*"))
    start = [] if begun or config is None else [events.session_start(hparams(config))]
    writer = EventFileWriter(str(run_dir), filename_suffix=".end")
    for message in [*start, events.session_end(status)]:
        writer.add_event(Event(wall_time=time.time(), summary=message))
    writer.close()
    return write_result(run_dir, {"status": status, **figures})


def summary(run_dir: str | os.PathLike) -> dict[str, Any]:
    """A run's figures so far, from its metrics.jsonl: the last ones, medians of speed after warm-up, peak memory."""
    steps, validations = _read_metrics(Path(run_dir) / "metrics.jsonl")
    result: dict[str, Any] = {"steps": steps[-1]["step"] if steps else 0}
    if steps:
        result["loss"] = steps[-1].get("loss")
    if validations:
        result |= {key: validations[-1].get(key) for key in ("validation_loss", "bits_per_byte")}
    # of the newest start alone: those before may have run in another layout, or on another machine
    newest = [step for step in steps if step.get("started_after") == steps[-1].get("started_after")]
    # the first steps allocate memory and connect ranks: they are no measure of speed
    steady = newest[max(1, len(newest) // 10) :] or newest
    for key in MEDIANS:
        values = [step[key] for step in steady if isinstance(step.get(key), (int, float))]
        if values:
            result[key] = statistics.median(values)
    if timed := [step for step in steady if step.get("time")]:
        result |= spent.typical(timed)
    memory = [step["memory_bytes"] for step in newest if step.get("memory_bytes")]
    if memory:
        result["peak_memory_bytes"] = [max(rank) for rank in zip(*memory, strict=True)]
    return result


def _read_metrics(path: Path) -> tuple[list[dict], list[dict]]:
    """The training steps and the validations of a metrics.jsonl; a last line cut short by a kill is left out."""
    steps, validations = [], []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            figures = json.loads(line)
        except json.JSONDecodeError:
            continue
        (validations if "validation_loss" in figures else steps).append(figures)
    return steps, validations


def read_overrides(run_dir: str | os.PathLike) -> list[str]:
    """What the user typed for this run, from RUN/.hydra/overrides.yaml; empty when nothing was."""
    import yaml

    path = Path(run_dir) / ".hydra" / "overrides.yaml"
    return (yaml.safe_load(path.read_text()) or []) if path.exists() else []


def versions() -> dict[str, str]:
    """The versions that a run's figures depend on."""
    packages = ("torch", "fairscale", "numpy", "hydra-core", "tensorboard")
    return {"python": platform.python_version(), **{package: metadata.version(package) for package in packages}}


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(_strict(value), indent=indent, allow_nan=False)


def _strict(value: Any) -> Any:
    """JSON has no NaN and no infinity: written as the strings that float() reads back."""
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


# --- TensorBoard's HParams columns ---


def hparams(config: RootConfig) -> dict[str, int | float | str]:
    """The HParams columns of a run, e.g. "parallel.chunks": 8; booleans and null as words, which the tab shows."""
    values = to_dict(config)
    picked = {f"{group}.{key}": values[group][key] for group, keys in HPARAMS.items() for key in keys.split()}
    return {key: _column(value) for key, value in picked.items()}


def _column(value: Any) -> int | float | str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, (int, float)) else str(value)
