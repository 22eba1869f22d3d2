"""Predicted beside measured: what a run's result.json, console and TensorBoard get from its plan."""

from __future__ import annotations

import json

import pytest
from composing import resolved

from planning import calibrate
from planning.balance import resolved_balance
from training.outcome import compared, plan_for, scalars, table
from training.record import write_result


@pytest.fixture(autouse=True)
def never_measured(monkeypatch):
    monkeypatch.setattr(calibrate, "calibrated", lambda config: config)
    monkeypatch.setattr("training.outcome.calibrated", lambda config: config)


@pytest.fixture
def run_dir(tmp_path):
    config, _ = resolved_balance(resolved("model=gpt_7b", "parallel=pp4", "hardware=p4de", "train.steps=100"))
    (tmp_path / "plan.json").write_text(json.dumps(plan_for(config)))
    return tmp_path


def test_signed_errors_of_what_was_measured(run_dir):
    predicted = json.loads((run_dir / "plan.json").read_text())["predicted"]
    measured = {
        "steps": 100,
        "step_time_s": predicted["step_time_s"] / 1.25,
        "peak_memory_bytes": [2 * size for size in predicted["peak_memory_bytes"]],
    }
    found = compared(run_dir, measured)
    assert found["predicted"] == predicted
    assert found["error"]["step_time_s"] == pytest.approx(0.25)
    assert found["error"]["peak_memory_bytes"] == pytest.approx([-0.5] * 4)
    assert found["cost_usd"] == pytest.approx(predicted["cost_usd"] / 1.25)  # one node for as many hours
    assert found["error"]["cost_usd"] == pytest.approx(0.25)
    tags = scalars(found)
    assert tags["prediction_error/step_time_s"] == found["error"]["step_time_s"]
    assert tags["predicted/peak_memory_bytes/rank_3"] == predicted["peak_memory_bytes"][3]
    shown = table(measured | found)
    assert "+25.0%" in shown and "peak memory of rank 3" in shown and "-50.0%" in shown


def test_a_part_of_a_run_has_a_cost_and_no_error_of_it(run_dir):
    found = compared(run_dir, {"steps": 10, "step_time_s": 1.0})
    assert found["cost_usd"] > 0 and "cost_usd" not in found["error"]


def test_results_hold_both(run_dir):
    result = write_result(run_dir, {"status": "completed", "steps": 100, "step_time_s": 5.0})
    stored = json.loads((run_dir / "result.json").read_text())
    assert stored["error"]["step_time_s"] == pytest.approx(stored["predicted"]["step_time_s"] / 5.0 - 1)
    assert result["predicted"] == stored["predicted"]
    failed = write_result(run_dir, {"status": "failed", "failure": "it broke"})
    assert failed["failure"] == "it broke" and failed["predicted"] == stored["predicted"]


def test_without_a_prediction_nothing_is_compared(tmp_path):
    assert compared(tmp_path, {"step_time_s": 1.0}) == {} and table({"status": "completed"}) == ""
    config, _ = resolved_balance(resolved("hardware=p4d"))
    config.hardware.matmul_efficiency = None
    plan = plan_for(config)
    assert "matmul_efficiency" in plan["unpredicted"]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert compared(tmp_path, {"step_time_s": 1.0}) == {}


def test_a_bubble_of_nothing_has_no_percentage():
    figures = {"step_time_s": 1.0, "bubble_fraction": 0.0}
    text = table(figures | {"predicted": figures, "error": {"step_time_s": 0.0, "bubble_fraction": -1.0}})
    assert "%" in text.split("\n")[1] and "%" not in text.split("\n")[2]
