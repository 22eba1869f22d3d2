"""A table of layouts, one a row, into predicted step times, and how far they are from measured ones. No torch.

    python plan.py points=table.csv output=predicted.csv

Columns, and the keys they become:

    gpu             hardware: a file of conf/hardware/              num_gpus  tensor x stages x data (checked)
    gpus_per_node   hardware.devices_per_node                       layers    model.blocks
    hidden          model.hidden                                    heads     model.heads
    seq             train.sequence, model.positions                 vocab     model.vocabulary, padded to 128 x tensor
    tensor          parallel.tensor                                 stages    parallel.stages
    data            parallel.data                                   interleave  parallel.interleave
    microbatch      chunks = global_batch / (data x microbatch)     global_batch  train.global_batch
    schedule        parallel.schedule; a remark after a blank is left out ("interleaved 1F1B (…)": interleaved_1f1b)
    recompute       parallel.checkpoint: none never, full always, selective selective
    precision       train.precision: fp16 and bf16 are bfloat16 (the same rates), fp32 float32
    step_time_s     measured, seconds; optional
    source          optional; errors are also told by it
    sequence_parallel   optional: true or false; without it, selective recomputation has it (arXiv 2205.05198)
    stack           optional: one of planning/stack.py; without it, plan.py's `stack`

Models are GPTs with 4 x hidden, tied embeddings and dropout 0.1.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from conf.check import check
from conf.resolve import padded_vocabulary, resolve
from conf.schema import (
    DataConfig,
    HardwareConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RootConfig,
    TrainConfig,
)
from planning.stack import Stack, get_stack
from planning.step import step_time

NEEDED = (
    "gpu gpus_per_node num_gpus layers hidden heads seq vocab tensor stages data interleave microbatch global_batch "
    "schedule recompute precision"
).split()
RECOMPUTE = {"none": "never", "full": "always", "selective": "selective"}
PRECISION = {"fp16": "bfloat16", "bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32"}


class BadCell(ValueError):
    """What is wrong with a row, and in which column."""

    def __init__(self, column: str, message: str):
        super().__init__(f"column {column}: {message}")


@dataclass(frozen=True)
class Point:
    """One row: a configuration, and what was measured."""

    row: dict[str, str]
    config: RootConfig  # resolved
    stack: Stack
    measured_s: float | None


def read_table(path: str | Path) -> list[dict[str, str]]:
    """The rows. ValueError for a file that is not there, is empty or no table, or lacks a needed column."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets begin a file with a mark
            reader = csv.DictReader(file, skipinitialspace=True)
            rows, columns = list(reader), reader.fieldnames or []
    except OSError as error:
        raise ValueError(f"points={path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"points={path} is no table of comma-separated UTF-8 text: {error}") from error
    if twice := [column for column in dict.fromkeys(columns) if columns.count(column) > 1]:
        raise ValueError(f"points={path} has the column {twice[0]} {columns.count(twice[0])} times: keep one of them")
    if not rows:
        raise ValueError(f"points={path} has no rows")
    missing = [column for column in NEEDED if column not in rows[0]]
    if missing:
        raise ValueError(f"points={path} lacks the columns {', '.join(missing)}; needed are {', '.join(NEEDED)}")
    return rows


def read_point(row: dict[str, str], stack: Stack, hardware_of: Callable[[str], HardwareConfig]) -> Point:
    """One row as a configuration. hardware_of: a gpu's figures. ValueError (BadCell where one column is at fault)."""
    if None in row or None in row.values():
        raise BadCell("all", "the row has another number of cells than the header")
    n = {name: _whole(row, name) for name in NEEDED if name not in ("gpu", "schedule", "recompute", "precision")}
    t, p, d = n["tensor"], n["stages"], n["data"]
    if t * p * d != n["num_gpus"]:
        raise BadCell("num_gpus", f"{n['num_gpus']} is not tensor {t} x stages {p} x data {d} = {t * p * d}")
    if n["global_batch"] % (d * n["microbatch"]):
        unit = d * n["microbatch"]
        raise BadCell("global_batch", f"{n['global_batch']} is not divisible by data x microbatch = {unit}")
    recompute = _known(row, "recompute", RECOMPUTE)
    config = RootConfig(
        model=_model(n),
        parallel=ParallelConfig(
            name=f"{p}x{t}x{d}",
            schedule=_schedule(row["schedule"], n["interleave"]),
            stages=p,
            tensor=t,
            data=d,
            chunks=n["global_batch"] // (d * n["microbatch"]),
            interleave=n["interleave"],
            balance="uniform",
            checkpoint=recompute,
            sequence_parallel=_sequence_parallel(row, recompute, t),
        ),
        optimizer=OptimizerConfig(name="adamw"),
        hardware=replace(hardware_of(row["gpu"]), devices_per_node=n["gpus_per_node"]),
        data=DataConfig(name="python_source", source="python_source"),
        train=TrainConfig(
            steps=1, global_batch=n["global_batch"], sequence=n["seq"], precision=_known(row, "precision", PRECISION)
        ),
    )
    config = resolve(config, device="cpu")  # the device of the row, not of this machine
    check(config, here=False)
    if row.get("stack"):
        stack = get_stack(row["stack"])
    return Point(row, config, stack, _measured(row))


def predict_table(
    rows: list[dict[str, str]], stack: Stack, hardware_of: Callable[[str], HardwareConfig]
) -> tuple[list[dict], list[str]]:
    """Each row with predicted_step_time_s and, where measured, error (predicted / measured - 1); and one line for each
    bad row, which keeps those cells empty. Rows count from 1, the header not among them."""
    out, bad = [], []
    for number, row in enumerate(rows, 1):
        cells = {key: value for key, value in row.items() if key is not None}
        cells |= {"predicted_step_time_s": "", "error": ""}
        try:
            point = read_point(row, stack, hardware_of)
            seconds = step_time(point.config, point.stack, explain=False).total
        except ValueError as error:
            bad.append(f"row {number}: {error}")
        else:
            cells["predicted_step_time_s"] = float(f"{seconds:.6g}")
            if point.measured_s:
                cells["error"] = round(seconds / point.measured_s - 1, 5)
        out.append(cells)
    return out, bad


def _model(n: dict[str, int]) -> ModelConfig:
    model = ModelConfig(
        name="row",
        family="gpt",
        blocks=n["layers"],
        hidden=n["hidden"],
        heads=n["heads"],
        positions=n["seq"],
        vocabulary=n["vocab"],
        vocabulary_multiple=128 * n["tensor"],
        dropout=0.1,
    )
    model.vocabulary = padded_vocabulary(model)
    return model


def _whole(row: dict[str, str], column: str) -> int:
    try:
        value = int(row[column])
    except ValueError as error:
        raise BadCell(column, f"{row[column]!r} is no whole number") from error
    if value < 1:
        raise BadCell(column, f"{value} must be at least 1")
    return value


def _known(row: dict[str, str], column: str, known: dict[str, str]) -> str:
    if row[column] not in known:
        raise BadCell(column, f"{row[column]!r} is unknown; known are {', '.join(known)}")
    return known[row[column]]


def _measured(row: dict[str, str]) -> float | None:
    text = row.get("step_time_s")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise BadCell("step_time_s", f"{text!r} is no time in seconds")
    return value


def _schedule(text: str, interleave: int) -> str:
    name = text.split("(")[0].strip().lower().replace(" ", "_")
    return "interleaved_1f1b" if name == "1f1b" and interleave > 1 else name


def _sequence_parallel(row: dict[str, str], recompute: str, tensor: int) -> bool:
    text = (row.get("sequence_parallel") or "").lower()
    if text not in ("", "true", "false"):
        raise BadCell("sequence_parallel", f"{text!r} is neither true nor false")
    return text == "true" if text else recompute == "selective" and tensor > 1


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Spearman's: the correlation of the ranks, equal values sharing their mean rank. NaN for fewer than two rows."""
    ranks = []
    for values in (first, second):
        ordered = sorted(values)
        ends = {value: len(ordered) - i for i, value in enumerate(reversed(ordered))}
        starts = {value: i for i, value in reversed(list(enumerate(ordered)))}
        ranks.append([(starts[value] + ends[value] - 1) / 2 for value in values])
    n = len(first)
    means = [sum(r) / n for r in ranks] if n else [0, 0]
    a, b = ([r - mean for r in series] for series, mean in zip(ranks, means, strict=True))
    scale = (sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5
    return sum(x * y for x, y in zip(a, b, strict=True)) / scale if scale else float("nan")
