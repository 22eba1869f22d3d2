"""hardware=auto's own figures: recovered from the pieces of a known machine, cached, and only for processors."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from composing import resolved

from planning import calibrate
from planning.calibrate import DIRECT, FITTED, SHAPES, calibrated, fit, pieces
from planning.rates import rates

FAST = {
    "matmul_efficiency": 1.4,
    "matmul_half_size": 30.0,
    "memory_efficiency": 3.0,
    "kernel_latency_s": 5e-6,
}
MEASURED = {"memory_bytes_per_s": 2e10, "thread_efficiency": 0.8}


def answer(hardware) -> dict:
    """What a machine with FAST's figures would measure."""
    known = replace(hardware, **FAST, **MEASURED)
    return MEASURED | {"pieces": [pieces(calibrate._config(shape, hardware), known) for shape in SHAPES]}


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
    calls = []
    monkeypatch.setattr(calibrate, "_measure", lambda cores: calls.append(1) or answer(config.hardware))
    first, second = calibrated(config), calibrated(config)
    assert calls == [1] and first.hardware == second.hardware
    assert first.hardware.matmul_efficiency > config.hardware.matmul_efficiency
    assert "this machine" in first.hardware.sources["memory_efficiency"]
    assert first.hardware.memory_bytes_per_s == 2e10 and first.hardware.thread_efficiency == 0.8
    assert json.loads(calibrate.CACHE.read_text())["figures"]
    calibrate.CACHE.write_text("not json")
    calibrated(config)
    assert calls == [1, 1]


def test_only_processors_that_auto_found_are_measured(monkeypatch):
    monkeypatch.setattr(calibrate, "_measure", lambda cores: pytest.fail("measured"))
    for config in (resolved("hardware=cpu"), resolved("hardware=p4d"), resolved("train.precision=float64")):
        assert calibrated(config) == config


def test_a_child_that_fails_leaves_the_defaults(monkeypatch):
    monkeypatch.setattr(calibrate, "_measure", lambda cores: None)
    assert calibrated(resolved()) == resolved()
    assert not calibrate.CACHE.exists()


def test_this_machine_answers():
    """Real measurements, in children that run at once: within the bounds, and the planner then predicts them."""
    hardware = resolved().hardware
    measured = calibrate._measure(2)
    assert 0.5 <= measured["thread_efficiency"] <= 1
    hardware = replace(hardware, **{key: measured[key] for key in DIRECT})
    found = fit(measured["pieces"], hardware)
    for key, (least, most) in FITTED.items():
        assert least <= found[key] <= most
    for shape, seconds in zip(SHAPES, measured["pieces"], strict=True):
        predicted = pieces(calibrate._config(shape, hardware), replace(hardware, **found))
        assert predicted["block"] == pytest.approx(seconds["block"], rel=0.3)


def test_threads_of_a_rank_and_bytes_of_an_update():
    """Two cores of one rank at 0.8 each are 1.6; an optimizer's bytes go at the plain bandwidth, never a cache's."""
    hardware = replace(resolved().hardware, **FAST, **MEASURED)
    together, alone = (rates(hardware, "float32", ranks_here=ranks) for ranks in (1, 2))
    assert together.flops == pytest.approx(1.6 * alone.flops)
    assert alone.stream_s(1e9, kernels=0) == pytest.approx(1e9 / 2e10)
    assert alone.stream_s(1e9, kernels=0) == pytest.approx(3 * alone.pass_s(1e9, kernels=0))
