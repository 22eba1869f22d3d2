"""parallel.balance by name: costs of each layer, the certificate, the memory cap and what is said when nothing fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from composing import resolved

from models.describe import describe, num_parameters
from pipeline.optimum import Cut, Problem
from pipeline.partition import BALANCES, certify, held_moments, split_stages
from pipeline.schedule import held_microbatches, make_schedule
from planning.balance import COUNTED, layer_bytes, predicted_times, resolved_balance
from planning.memory import rank_memory
from training.announce import split_line

LARGE_HEAD = ["model.vocabulary=32768", "model.hidden=256"]


def cut(*overrides: str, times=None):
    return resolved_balance(resolved(*overrides), times)


@pytest.mark.parametrize("parallel", ["pp2", "pp4", "pp8", "single", "fairscale_pp4"])
@pytest.mark.parametrize("balance", [name for name in BALANCES if name != "time"])
def test_every_name_becomes_a_list_with_each_layer_once(parallel, balance):
    config, split = cut(f"parallel={parallel}", f"parallel.balance={balance}", *LARGE_HEAD)
    names = [spec.name for spec in describe(config.model)]
    assert config.parallel.balance == split.balance and split.method == balance
    stages = split_stages(split.balance, len(split.balance), names)
    assert sum(stages, []) == names == sum(split.layers, []) and all(stages)
    assert split.lower_bound <= split.costs[split.slowest_rank] == max(split.costs)
    assert split.gap == pytest.approx(max(split.costs) / split.lower_bound - 1)
    assert split.efficiency == pytest.approx(sum(split.costs) / len(split.costs) / max(split.costs))
    assert resolved_balance(config)[0].parallel.balance == split.balance  # a list stays what it is


def test_the_default_is_auto_and_a_large_head_counts_as_what_it_costs():
    config, split = cut("model.vocabulary=128000")
    assert split.method == "auto" and split.balance == [10, 1] and split.gap == 0
    times = predicted_times(config, describe(config.model))
    assert times[-1] > 8 * times[1]  # several blocks' worth
    assert max(split.costs) == pytest.approx(times[-1])
    uniform = cut("model.vocabulary=128000", "parallel.balance=uniform")[1]
    assert uniform.balance == [5, 6] and uniform.gap == pytest.approx(max(uniform.costs) / max(split.costs) - 1)


def test_flops_and_parameters_against_numbers_by_hand():
    config, split = cut("parallel.balance=parameters", "parallel=pp4", *LARGE_HEAD)
    sizes = [num_parameters([replace(spec, tied={})]) for spec in describe(config.model)]
    first = sum(sizes[: split.balance[0]])
    assert split.unit == "parameters" and split.costs[0] == first
    assert split.balance == [1, 4, 5, 1] or max(split.costs) == sizes[-1] or max(split.costs) == sizes[0]
    assert cut("parallel.balance=flops", "parallel=pp2")[1].unit == "flops"


def test_several_stages_a_rank():
    for schedule in ("interleaved_1f1b", "zb_v"):
        config, split = cut("parallel.stages=2", f"parallel.schedule={schedule}", "model.vocabulary=2048")
        assert len(split.balance) == 4 and sum(split.balance) == 11 and len(split.layers) == 2
        assert split.gap < 0.2
        assert cut("parallel.stages=2", f"parallel.schedule={schedule}", "parallel.balance=[2,2,2,2]")[1].balance == [
            3,
            2,
            2,
            4,
        ]


def test_no_huge_stage_for_a_hair_of_the_slowest_rank():
    """The slowest rank alone would ask for a stage of 12 blocks here, for which seven ranks would wait."""
    overrides = ["model=gpt3_175b", "hardware=a100_80gb", "parallel=pp8", "parallel.schedule=interleaved_1f1b"]
    split = cut(*overrides, "parallel.interleave=2", "train.global_batch=32", "model.vocabulary_multiple=8")[1]
    assert max(split.balance) <= 9 and split.gap < 0.01


@pytest.mark.parametrize(
    ("name", "stages", "chunks"), [("gpipe", 4, 8), ("1f1b", 4, 8), ("zb_h1", 3, 6), ("interleaved_1f1b", 4, 8)]
)
def test_moments_are_the_schedules_own_count(name, stages, chunks):
    schedule = make_schedule(name, stages, chunks)
    moments = held_moments(schedule)
    assert [max(map(sum, rank)) for rank in moments] == held_microbatches(schedule)
    for rank in moments:
        assert not any(a != b and all(x <= y for x, y in zip(a, b, strict=True)) for a in rank for b in rank)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_bytes_of_a_rank_are_the_planners(schedule, optimizer):
    config, split = cut("parallel=pp4", f"parallel.schedule={schedule}", f"optimizer={optimizer}", *LARGE_HEAD)
    by_name = {spec.name: spec for spec in describe(config.model)}
    held = held_microbatches(make_schedule(schedule, 4, config.parallel.chunks))
    for names, number, counted in zip(split.layers, held, split.bytes, strict=True):
        parts = rank_memory(config, [by_name[name] for name in names], number)
        assert counted == pytest.approx(sum(parts[part] for part in COUNTED), rel=1e-6)


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
@pytest.mark.parametrize("interval", [1, 2])
def test_bytes_with_recomputation_are_never_less_than_the_planners(checkpoint, interval):
    overrides = [f"parallel.checkpoint={checkpoint}", f"parallel.checkpoint_interval={interval}", "model.blocks=16"]
    config, split = cut("parallel=pp4", *overrides)
    by_name = {spec.name: spec for spec in describe(config.model)}
    held = held_microbatches(make_schedule("1f1b", 4, config.parallel.chunks))
    for names, number, counted in zip(split.layers, held, split.bytes, strict=True):
        parts = rank_memory(config, [by_name[name] for name in names], number)
        planned = sum(parts[part] for part in COUNTED)
        assert planned * 0.999 <= counted <= planned * 1.35
    assert layer_bytes(config, describe(config.model))[2] > 0


# --- the cap ---


def test_a_cap_moves_layers_and_is_kept():
    free = cut()[1]
    assert free.balance == [5, 6]
    capped = cut(f"parallel.memory_cap_bytes={max(free.bytes) - 1}")[1]
    assert max(capped.bytes) < max(free.bytes) and capped.balance == [4, 7] and capped.gap == 0
    assert "of a cap of" in split_line(capped)
    least = cut("parallel.balance=memory")[1]
    assert max(least.bytes) <= max(capped.bytes) and least.gap > 0


def test_when_nothing_fits_the_ways_that_do_are_named():
    with pytest.raises(ValueError) as refusal:
        cut("parallel.memory_cap_bytes=3.2e7")
    text = str(refusal.value)
    least = max(cut("parallel.balance=memory")[1].bytes)
    assert "\n" not in text
    for part in ("32,000,000", f"{least:,} bytes on rank 1", f"{least - 32_000_000:,} too many"):
        assert part in text, text
    ways = text.partition("cheapest first: ")[2].split("; ")
    assert ways[-1] == f"parallel.memory_cap_bytes={least}" and len(ways) > 2
    for way in ways:
        overrides = [override for override in way.partition(" (")[0].split()]
        cap = [] if "memory_cap_bytes" in way else ["parallel.memory_cap_bytes=3.2e7"]
        assert max(cut(*overrides, *cap)[1].bytes) <= (least if "memory_cap" in way else 3.2e7), way


def test_a_list_over_the_cap():
    with pytest.raises(ValueError, match=r"parallel.balance=\[8, 3\] puts .* on rank 0, .* over .*=45,000,000.*auto"):
        cut("parallel.balance=[8,3]", "parallel.memory_cap_bytes=4.5e7")


# --- the certificate ---


def test_what_is_no_cut_has_no_certificate():
    problem = Problem((1.0, 2.0, 3.0), (0, 1))
    names = ["a", "b", "c"]
    good = certify(problem, Cut([2, 1], 3.0), names, method="list", unit="seconds")
    assert good.costs == [3.0, 3.0] and good.gap == 0 and good.efficiency == 1 and good.layers == [["a", "b"], ["c"]]
    for counts in ([3, 0], [1, 1], [2, 2], [1, 1, 1]):
        with pytest.raises(AssertionError):
            certify(problem, Cut(counts, 0.0), names, method="list", unit="seconds")


def test_the_line_of_the_summary():
    text = split_line(cut("parallel.balance=[3,8]")[1])
    assert "list: parallel.balance=[3,8]" in text and "rank 1" in text and "over the bound of" in text
    assert "proven best" in split_line(cut()[1])
