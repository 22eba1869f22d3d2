"""plan.py's work: from what was typed to a plan on the screen and in a file, or a table of predictions. No torch."""

from __future__ import annotations

import csv
import json
import os
import statistics
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from conf.check import check
from conf.names import file_name
from conf.resolve import hardware_file, resolve
from conf.schema import HardwareConfig, PlanRootConfig, RootConfig, register
from conf.typed import BAD_INPUT, check_keys, one_line
from planning import advice, report
from planning.balance import resolved_balance
from planning.calibrate import calibrated
from planning.points import predict_table, rank_correlation, read_table
from planning.predict import make_plan
from planning.remedies import remedies
from planning.stack import get_stack
from planning.step import Step


class Refused(BaseException):
    """Bad input. Not an Exception: Hydra would print about it."""


PLANS = Path("experiments/plans")
LONGEST_NAME = 200  # of a partial file: most file systems take 255 characters

register()


def main(compose_and_plan: Callable[[], None]) -> int:
    """Calls Hydra's main, says what went wrong in one line; returns the exit code: 0, or 2 for bad input."""
    full_error = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises, in place of printing and leaving
    try:
        if {"-m", "--multirun"} & set(sys.argv):
            raise Refused("plan.py takes one configuration: leave -m out, or give a table with points=table.csv")
        compose_and_plan()
    except (Refused, *BAD_INPUT) as error:
        if full_error:
            raise
        print(f"plan.py: {_one_line(error)}", file=sys.stderr)
        return 2
    return 0


def run(composed: DictConfig) -> None:
    """One plan, or one table of points. Raises Refused for bad input."""
    try:
        _run(composed)
    except BAD_INPUT as error:
        raise Refused(_one_line(error)) from error


def _one_line(error: BaseException) -> str:
    return " ".join(one_line(error).split())


def _run(composed: DictConfig) -> None:
    check_keys(composed, PlanRootConfig)
    typed = OmegaConf.to_object(composed)
    assert isinstance(typed, PlanRootConfig)
    get_stack(typed.stack)
    if typed.points is not None:
        run_points(typed, list(HydraConfig.get().overrides.task))
        return
    config, plan = plan_of(typed, typed.stack)
    print(report.render(plan, config))
    print(f"\nplan       {write_plan(plan, typed.output, config)}")


def plan_of(typed: RootConfig, stack: str) -> tuple[RootConfig, dict]:
    """The resolved configuration and everything that plan.json says. ValueError for a layout that cannot be."""
    config = resolve(typed)
    check(config, here=False)
    asked = config.parallel.balance
    if asked == "time":
        raise ValueError("parallel.balance=time measures layers, and plan.py runs nothing: set parallel.balance=auto")
    config, certificate = resolved_balance(config)  # as train.py cuts, whatever this machine reaches
    config = calibrated(config)
    plan = make_plan(config, stack)
    step = Step(plan["step"], plan["predicted"]["bubble_fraction"])
    plan["split"] = certificate.to_dict()
    plan["warnings"] = advice.warnings(config, asked, step, stack)
    capacity = config.hardware.memory_bytes
    plan["remedies"] = []
    if capacity and plan["needed_bytes"] > capacity:
        found = remedies(config, asked, stack, capacity)
        plan["remedies"] = [remedy.describe(step.total) for remedy in found]
    return config, plan


def write_plan(plan: dict, output: str | None, config: RootConfig) -> Path:
    """Writes plan.json: to `output`, which must not hold another plan, or into experiments/plans/ under a new name.

    A file that already says the same is left as it is. ValueError when `output` holds something else.
    """
    text = json.dumps(plan, indent=1) + "\n"
    if output is not None:
        return _write_new(Path(output), text)
    name = file_name(("model", config.model), ("parallel", config.parallel), ("hardware", config.hardware))
    number, path = 1, PLANS / f"{name}.json"
    while os.path.lexists(path) and not _says(path, text):
        number += 1
        path = PLANS / f"{name}-{number}.json"
    return _write_new(path, text)


def _write_new(path: Path, text: str) -> Path:
    """ValueError: it exists and says something else, or cannot be written."""
    if _says(path, text):
        return path
    try:
        if path.is_dir():
            raise ValueError(f"output={path} is a folder: give the name of a file, as in output={path / 'plan.json'}")
        if path.exists():
            raise ValueError(
                f"output={path} exists already and says something else; choose another name, it was not touched"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name[:LONGEST_NAME]}.{os.getpid()}.tmp")
        try:
            partial.write_text(text)
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ValueError(f"output={path} cannot be written ({error.strerror}): give another with output=…") from error
    return path


def _says(path: Path, text: str) -> bool:
    """Whether there is such a file with just this text."""
    try:
        return path.is_file() and path.read_text() == text
    except (OSError, UnicodeDecodeError):
        return False


# --- a table of points ---


def run_points(typed: PlanRootConfig, overrides: list[str]) -> None:
    """Predicts each row, writes the table, prints how far the predictions are from what was measured."""
    laid_over = {
        key.split(".")[1]: getattr(typed.hardware, key.split(".")[1])
        for key in (override.partition("=")[0].lstrip("+") for override in overrides)
        if key.startswith("hardware.") and key.count(".") == 1
    }

    @cache
    def hardware_of(name: str) -> HardwareConfig:
        return HardwareConfig(**(hardware_file(name) | laid_over))

    rows = read_table(typed.points)
    predicted, bad = predict_table(rows, get_stack(typed.stack), hardware_of)
    source = Path(typed.points)
    path = Path(typed.output) if typed.output else source.with_name(f"{source.stem}_predicted.csv")
    lines = _csv_text(predicted)
    _write_new(path, lines)
    for line in bad:
        print(f"plan.py: {typed.points} {line}", file=sys.stderr)
    print(summary(predicted))
    print(f"\n{len(predicted) - len(bad)} of {len(predicted)} rows predicted: {path}")
    if bad:
        others = "; the others were" if len(bad) < len(predicted) else ""
        raise ValueError(f"{len(bad)} of {len(predicted)} rows of {typed.points} could not be predicted{others}")


def _csv_text(rows: list[dict]) -> str:
    import io

    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def summary(rows: list[dict]) -> str:
    """Errors of the measured rows, in all and by source, schedule and gpu; and the rank correlation."""
    measured = [row for row in rows if row["error"] != ""]
    if not measured:
        return "no row has a measured step_time_s: nothing to compare"
    table = [["errors", "rows", "median", "mean", "signed mean", "worst"]]
    groups = [("all", measured)]
    for column in ("source", "schedule", "gpu"):
        values = dict.fromkeys(row.get(column) for row in measured if row.get(column))
        groups += [(f"{column} {value}", [row for row in measured if row[column] == value]) for value in values]
    for name, group in groups:
        values = [row["error"] for row in group]
        sizes = [abs(value) for value in values]
        worst = max(values, key=abs)
        cells = [statistics.median(sizes), statistics.mean(sizes)]
        shown = [f"{cell:.1%}" for cell in cells] + [f"{statistics.mean(values):+.1%}", f"{worst:+.1%}"]
        table.append([name, str(len(group)), *shown])
    pairs = [(row["predicted_step_time_s"], float(row["step_time_s"])) for row in measured]
    correlation = rank_correlation([p for p, _ in pairs], [m for _, m in pairs])
    return f"{report.align(table, left=1)}\nrank correlation {correlation:.4f}"
