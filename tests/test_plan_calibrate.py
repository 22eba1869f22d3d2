"""hardware=auto's own figures: recovered from the pieces of a known machine, cached, and only for processors."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from composing import resolved

from planning import calibrate
from planning.calibrate import DIRECT, FITTED, PAIR, PIPELINED, SHAPES, between_ranks, calibrated, fit, pieces
from planning.children import LARGE_BYTES
from planning.layers import correction
from planning.rates import rates
from planning.stack import get_stack
from planning.step import step_time

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


def test_what_ranks_cost_each_other_is_recovered_from_what_a_known_machine_would_measure(monkeypatch):
    known = dict(link_bytes_per_s=1e9, link_efficiency=1.0, link_latency_s=1e-4, action_overhead_s=8e-4)
    known |= dict(rank_slowdown=0.06, tensor_block_s=7e-3, sharded_block_s=5e-3, replicated_block_s=5e-4)
    known |= dict(reduced_block_s=1e-3)
    hardware = replace(resolved().hardware, **FAST, **MEASURED)
    there = replace(hardware, **known, devices_per_node=2)
    pair = {"small_s": 2e-4, "large_s": 2e-4 + LARGE_BYTES / 1e9, "block_s": 3e-4}
    pair |= {"tensor_s": 3e-4 + 7e-3 + 8e-4, "sharded_s": 3e-4 + 5e-3 + 3e-4}
    pair |= {"replicated_s": 8e-4, "reduced_s": 8e-4 + 1e-3 + 2e-4}
    for name, shape in (("small", SHAPES[0]), ("shape", SHAPES[PIPELINED])):
        pair[f"{name}_flush_s"] = calibrate._flush_s(shape, there)
    found = between_ranks(pair, hardware)
    assert set(found) == set(PAIR)
    assert found == pytest.approx(known, rel=0.05)

    busy = {key: seconds * 10 if "flush" in key else seconds for key, seconds in pair.items()}
    bounded = between_ranks(busy, hardware)  # other work on the machine at that moment
    assert bounded["rank_slowdown"] == 0.12 and bounded["action_overhead_s"] == 0.004

    monkeypatch.setattr(calibrate, "_measure", lambda cores: answer(hardware) | {"pair": pair})
    first, second = calibrated(resolved()), calibrated(resolved())  # measured, then cached
    assert first.hardware == second.hardware and first.hardware.tensor_block_s == found["tensor_block_s"]


def test_corrections_are_met_at_their_points_and_between_them():
    points = [[1e6, 0.9], [1e8, 1.1], [1e9, 1.0]]
    assert [correction(points, flops) for flops in (1e5, 1e6, 1e7, 1e8, 1e9, 1e12)] == pytest.approx(
        [0.9, 0.9, 1.0, 1.1, 1.0, 1.0]
    )


def test_the_host_of_shared_blocks_is_in_the_step():
    """On processors nothing hides it: so many micro-batches times eight blocks, or once a step."""

    def seconds(*overrides: str, **figures: float) -> float:
        config = resolved("parallel.balance=uniform", "parallel.chunks=4", "train.global_batch=32", *overrides)
        config = replace(config, hardware=replace(config.hardware, **figures))
        return step_time(config, get_stack("torch"), explain=False).total

    for overrides, key, times in (
        (("parallel=tp2",), "tensor_block_s", 4 * 8),
        (("parallel=dp4",), "replicated_block_s", 4 * 8),
        (("parallel=dp4",), "reduced_block_s", 8),
        (("parallel=fsdp4",), "sharded_block_s", 4 * 8),
    ):
        more = seconds(*overrides, **{key: 0.01}) - seconds(*overrides)
        assert more == pytest.approx(times * 0.01), key
    for key in ("tensor_block_s", "sharded_block_s", "replicated_block_s"):
        assert seconds("parallel=pp2", **{key: 0.01}) == seconds("parallel=pp2")
    slow = seconds("parallel=pp2", rank_slowdown=0.5) / seconds("parallel=pp2")
    assert 1.3 < slow < 1.5 and seconds("parallel=single", rank_slowdown=0.5) == seconds("parallel=single")


def test_only_processors_that_auto_found_are_measured(monkeypatch):
    monkeypatch.setattr(calibrate, "_measure", lambda cores: pytest.fail("measured"))
    for config in (resolved("hardware=cpu"), resolved("hardware=p4d"), resolved("train.precision=float64")):
        assert calibrated(config) == config


def test_a_child_that_fails_leaves_the_defaults(monkeypatch):
    monkeypatch.setattr(calibrate, "_measure", lambda cores: None)
    assert calibrated(resolved()) == resolved()
    assert not calibrate.CACHE.exists()


@pytest.mark.parametrize(
    "broken",
    [
        {"memory_bytes_per_s": 0},
        {"matmul_efficiency": -1},
        {"kernel_latency_s": float("nan")},
        {"memory_bytes_per_s": float("inf")},
        {"thread_efficiency": None},
        {"corrections": {"block": [[1e6, 1.0], [1e6, 2.0]], "head": []}},
        {"corrections": {"block": [[1e6, 0.0]], "head": []}},
        {"corrections": {"block": []}},
    ],
    ids=str,
)
def test_figures_in_the_cache_that_cannot_be_are_measured_anew(monkeypatch, broken):
    calls = []
    monkeypatch.setattr(calibrate, "_measure", lambda cores: calls.append(1) or answer(resolved().hardware))
    first = calibrated(resolved())
    stored = json.loads(calibrate.CACHE.read_text())
    calibrate.CACHE.write_text(json.dumps(stored | {"figures": stored["figures"] | broken}))
    assert calibrated(resolved()) == first and calls == [1, 1]
    assert json.loads(calibrate.CACHE.read_text()) == stored


def test_a_measurement_that_cannot_be_leaves_the_defaults(monkeypatch, capsys):
    zero = answer(resolved().hardware)
    zero["pieces"][0]["block"] = 0.0
    monkeypatch.setattr(calibrate, "_measure", lambda cores: zero)
    assert calibrated(resolved()) == resolved() and not calibrate.CACHE.exists()
    assert "measuring failed" in capsys.readouterr().out


def test_what_was_typed_stands_and_is_in_no_other_run(monkeypatch):
    monkeypatch.setattr(calibrate, "_measure", lambda cores: answer(resolved().hardware))
    typed = resolved(
        "hardware.memory_bytes_per_s=3e9", "hardware.peak_flops_float32=1e12", "hardware.rank_slowdown=0.5"
    )
    found = calibrated(typed).hardware  # the first to be measured for
    assert (found.memory_bytes_per_s, found.peak_flops_float32, found.rank_slowdown) == (3e9, 1e12, 0.5)
    assert "memory_bytes_per_s" not in found.sources or "measured on this" not in found.sources["memory_bytes_per_s"]
    after = calibrated(resolved())
    calibrate.CACHE.unlink()
    assert after == calibrated(resolved())


@pytest.mark.parametrize("points", ["3", "[[0,1]]", "[[2,1],[1,1]]", "[[1,1,1]]", "[[1,-1]]", "[[1,x]]"])
def test_corrections_that_are_typed_are_checked(points):
    with pytest.raises(ValueError, match="hardware.corrections.block="):
        resolved(f"+hardware.corrections={{block:{points}}}")


def test_this_machine_answers():
    """Real measurements, in children that run at once: within the bounds, and the planner then predicts them."""
    hardware = resolved().hardware
    measured = calibrate._measure(2)
    assert 0.5 <= measured["thread_efficiency"] <= 1
    hardware = replace(hardware, **{key: measured[key] for key in DIRECT})
    pair = between_ranks(measured["pair"], replace(hardware, **fit(measured["pieces"], hardware)))
    assert 0 < pair["link_latency_s"] < 0.1 and pair["tensor_block_s"] > 1e-4 < pair["sharded_block_s"]
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
