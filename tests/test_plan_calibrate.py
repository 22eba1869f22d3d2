"""hardware=auto's own figures: recovered from the pieces of a known machine, cached, and only for processors."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from composing import resolved

from planning import calibrate
from planning.calibrate import FITTED, SHAPES, calibrated, fit, pieces

FAST = {
    "matmul_efficiency": 1.4,
    "matmul_half_size": 30.0,
    "memory_efficiency": 3.0,
    "kernel_latency_s": 5e-6,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "CACHE", tmp_path / "calibration.json")


def test_the_fit_predicts_the_pieces_of_a_known_machine():
    hardware = resolved().hardware
    known = replace(hardware, **FAST)
    configs = [calibrate._config(shape, hardware) for shape in SHAPES]
    found = fit([pieces(config, known) for config in configs], hardware)
    assert set(found) == set(FITTED)
    for config in configs:
        for key, seconds in pieces(config, replace(hardware, **found)).items():
            assert seconds == pytest.approx(pieces(config, known)[key], rel=0.1)


def test_measured_once_and_cached(monkeypatch):
    config = resolved()
    seconds = [pieces(calibrate._config(shape, config.hardware), replace(config.hardware, **FAST)) for shape in SHAPES]
    calls = []
    monkeypatch.setattr(calibrate, "_measure", lambda: calls.append(1) or seconds)
    first, second = calibrated(config), calibrated(config)
    assert calls == [1] and first.hardware == second.hardware
    assert first.hardware.matmul_efficiency > config.hardware.matmul_efficiency
    assert "this machine" in first.hardware.sources["memory_efficiency"]
    assert json.loads(calibrate.CACHE.read_text())["figures"]
    calibrate.CACHE.write_text("not json")
    calibrated(config)
    assert calls == [1, 1]


def test_only_processors_that_auto_found_are_measured(monkeypatch):
    monkeypatch.setattr(calibrate, "_measure", lambda: pytest.fail("measured"))
    for config in (resolved("hardware=cpu"), resolved("hardware=p4d"), resolved("train.precision=float64")):
        assert calibrated(config) == config


def test_a_child_that_fails_leaves_the_defaults(monkeypatch):
    monkeypatch.setattr(calibrate, "_measure", lambda: None)
    assert calibrated(resolved()) == resolved()
    assert not calibrate.CACHE.exists()


def test_this_machine_answers():
    """Real measurements, in a child: within the bounds, and the planner then predicts them."""
    seconds = calibrate._measure()
    hardware = resolved().hardware
    found = fit(seconds, hardware)
    for key, (least, most) in FITTED.items():
        assert least <= found[key] <= most
    for shape, measured in zip(SHAPES, seconds, strict=True):
        predicted = pieces(calibrate._config(shape, hardware), replace(hardware, **found))
        assert predicted["block"] == pytest.approx(measured["block"], rel=0.5)
