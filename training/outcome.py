"""Predicted beside measured: a run's plan, written before its first step, and its signed errors at the end. No torch.

plan.json     in the run folder: planning.make_plan's, or why nothing could be predicted
result.json   `predicted` and `error` (predicted / measured - 1), under the names of the measured figures
"""

from __future__ import annotations

import json
import os
from math import ceil
from pathlib import Path
from typing import Any

from conf.schema import RootConfig
from planning import errors
from planning.calibrate import calibrated
from planning.predict import make_plan
from planning.report import align, gib

# in the order of the console's table: how a figure is shown
SHOWN = {
    "step_time_s": ("step time", lambda v: f"{v:.3f} s"),
    "tokens_per_s": ("tokens/s", lambda v: f"{v:,.0f}"),
    "mfu": ("mfu", lambda v: f"{v:.3f}"),
    "bubble_fraction": ("bubble_fraction", lambda v: f"{v:.3f}"),
    "cost_usd": ("cost", lambda v: f"${v:,.2f}"),
}


def plan_for(config: RootConfig) -> dict:
    """plan.json of a run; {"unpredicted": why} where a figure is missing. config: resolved, its balance a list."""
    try:
        return make_plan(calibrated(config))
    except ValueError as error:
        return {"unpredicted": str(error)}


def compared(run_dir: str | os.PathLike, result: dict[str, Any]) -> dict[str, Any]:
    """`predicted`, `error` and, where a node has a price, `cost_usd`, for a result.json; empty without a prediction."""
    plan = read_plan(run_dir)
    predicted = plan.get("predicted")
    if not predicted:
        return {}
    predicted = _for_each_rank(predicted, result)
    measured = dict(result)
    hardware = plan["config"]["hardware"]
    if "cost_usd" in predicted and "step_time_s" in measured and measured.get("steps"):
        nodes = ceil(plan["devices"] / hardware["devices_per_node"])
        hours = measured["step_time_s"] * measured["steps"] / 3600
        measured["cost_usd"] = nodes * hours * hardware["price_usd_per_hour"]
    found = {"cost_usd": measured["cost_usd"]} if "cost_usd" in measured else {}
    if measured.get("steps") != plan["run"]["steps"]:  # the cost of a part of the run is no measure of the whole
        measured.pop("cost_usd", None)
    return found | {"predicted": predicted, "error": errors(predicted, measured)}


def _for_each_rank(predicted: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """A plan has one figure for each pipeline rank, whose data and tensor ranks are alike; a run has one for each."""
    full = dict(predicted)
    for key, values in predicted.items():
        measured = result.get(key)
        if isinstance(values, list) and isinstance(measured, list) and len(measured) > len(values):
            replicas = len(measured) // len(values)
            full[key] = [value for value in values for _ in range(replicas)]
    return full


def read_plan(run_dir: str | os.PathLike) -> dict:
    """RUN/plan.json; empty where there is none."""
    try:
        return json.loads((Path(run_dir) / "plan.json").read_text())
    except FileNotFoundError:
        return {}


def scalars(result: dict[str, Any]) -> dict[str, float]:
    """TensorBoard's tags of what was predicted and how far off it was, e.g. "prediction_error/step_time_s".

    Tags that sort behind loss/: the HParams tab shows the first few.
    """
    tags = {}
    for key_of_result, group in (("predicted", "predicted"), ("error", "prediction_error")):
        for key, value in result.get(key_of_result, {}).items():
            if isinstance(value, list):
                tags |= {f"{group}/{key}/rank_{rank}": entry for rank, entry in enumerate(value)}
            else:
                tags[f"{group}/{key}"] = value
    return tags


def _error(error: float, predicted: float, measured: float) -> str:
    """The signed error in percent; none of what is nothing."""
    if predicted == 0 or max(predicted, measured) < 0.0005:
        return ""
    return f"{error:+.1%}"


def table(result: dict[str, Any]) -> str:
    """Predicted beside measured, for the console; empty where nothing can be compared."""
    error = result.get("error", {})
    if not error:
        return ""
    predicted = result["predicted"]
    rows = [["", "predicted", "emulated" if result.get("emulated") else "measured", "error"]]
    for key, (label, show) in SHOWN.items():
        if key in error:
            rows.append(
                [label, show(predicted[key]), show(result[key]), _error(error[key], predicted[key], result[key])]
            )
    for rank, wrong in enumerate(error.get("peak_memory_bytes", [])):
        sizes = (gib(figures["peak_memory_bytes"][rank]) for figures in (predicted, result))
        rows.append([f"peak memory of rank {rank}", *sizes, f"{wrong:+.1%}"])
    return align(rows, left=1) if len(rows) > 1 else ""
