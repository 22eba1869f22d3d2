"""The measured profile: against autograd, its key and file; balance=time and the measured imbalance that use it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from composing import resolved

import models
from models.describe import activation_bytes, describe, forward_flops, num_parameters
from pipeline.engines.torch_runtime import backward_input, backward_weight
from pipeline.profile import Profile, measure_layer
from planning.balance import resolved_balance
from training import measure
from training.imbalance import imbalance, layer_seconds, sentence

SMALL = ["model.hidden=32", "model.heads=2", "model.blocks=6", "train.sequence=32", "train.global_batch=16"]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """A small configuration and its profile, measured in a child process."""
    cache = tmp_path_factory.mktemp("profiles")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "CACHE", cache)
        config = resolved(*SMALL, "model.vocabulary=512")
        return config, measure.find_or_measure(config), cache


def test_one_measurement_for_each_kind_of_layer(profiled):
    config, profile, _ = profiled
    assert [kind.layers for kind in profile.kinds] == [
        ["embedding"],
        [f"block.{i}" for i in range(6)],
        ["norm"],
        ["head"],
    ]
    by_name = {spec.name: spec for spec in describe(config.model)}
    micro_batch = profile.key["micro_batch"]
    for kind in profile.kinds:
        spec = by_name[kind.layers[0]]
        assert kind.parameters == num_parameters([replace(spec, tied={})])
        assert kind.forward_flops == micro_batch * forward_flops(spec, config.model, 32)
        assert kind.forward_s > 0 and kind.backward_s > 0 and kind.backward_weight_s > 0 and kind.repeats >= 5
        assert set(kind.spread) == {"forward_s", "backward_s", "backward_input_s", "backward_weight_s"}
        if spec.kind in ("block", "norm"):
            kept = activation_bytes(spec, config.model, micro_batch, 32, "float32", False)
            assert kind.kept_bytes == pytest.approx(kept, rel=0.02)  # bytes of the attention's generator state
            assert kind.output_bytes == micro_batch * 32 * 32 * 4
    embedding, block, _, head = profile.kinds
    assert embedding.backward_input_s == 0 and embedding.forward_flops == 0
    assert block.backward_flops == 2 * block.forward_flops or block.backward_flops > 2 * block.forward_flops
    assert head.total_s > 0 and head.output_bytes == 4  # the loss


def test_a_second_run_reads_the_file(profiled, monkeypatch):
    config, profile, cache = profiled
    monkeypatch.setattr(measure, "CACHE", cache)
    monkeypatch.setattr(measure, "_measure_in_child", lambda *_: pytest.fail("measured again"))
    assert measure.find_or_measure(config) == profile
    table = profile.table()
    assert "block.0 ..." in table and "head" in table


def test_the_key_tells_what_the_figures_hold_for(profiled):
    config, profile, _ = profiled
    assert measure.profile_key(config) == profile.key
    assert profile.key["threads"] == 1 and profile.key["versions"]["torch"] == torch.__version__
    for change in ("model.hidden=64", "train.sequence=16", "train.global_batch=32", "train.precision=float64"):
        other = resolved(*SMALL, "model.vocabulary=512", change)
        assert measure.profile_key(other) != profile.key, change
    renamed = resolved(*SMALL, "model.vocabulary=512", "model.name=x", "train.seed=5", "parallel.balance=uniform")
    assert measure.profile_key(renamed) == profile.key


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("model.hidden=64", "model.hidden=32 and this run 64"),
        ("model.blocks=7", "model.blocks=6 and this run 7"),
        ("train.global_batch=32", "micro_batch=2 and this run 4"),
        ("train.precision=float64", "precision=float32 and this run float64"),
    ],
)
def test_a_profile_of_other_work_is_refused(profiled, tmp_path, change, says):
    config, profile, _ = profiled
    profile.save(tmp_path / "given.json")
    config.profile = str(tmp_path / "given.json")
    assert measure.find_or_measure(config) == profile
    other = resolved(*SMALL, "model.vocabulary=512", change)
    other.profile = config.profile
    with pytest.raises(ValueError) as refusal:
        measure.find_or_measure(other)
    assert says in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_file_that_is_no_profile(tmp_path):
    config = resolved(*SMALL)
    config.profile = str(tmp_path / "missing.json")
    with pytest.raises(ValueError, match="missing.json is not there"):
        measure.find_or_measure(config)
    (tmp_path / "missing.json").write_text(json.dumps({"kinds": 3}))
    with pytest.raises(ValueError, match="is no profile"):
        measure.find_or_measure(config)


def test_measured_times_decide_the_cut(profiled):
    config, profile, _ = profiled
    kinds = [replace(kind, forward_s=1.0, backward_s=2.0) for kind in profile.kinds]
    heavy = Profile(profile.key, [*kinds[:-1], replace(kinds[-1], forward_s=5.0, backward_s=10.0)])
    config = replace(config, parallel=replace(config.parallel, balance="time"))
    cut, split = resolved_balance(config, measure.layer_times(config, heavy))
    assert cut.parallel.balance == [6, 3]  # 9 layers: 6 x 3 s, and 2 x 3 + 15
    assert split.costs == [18.0, 21.0] and split.slowest_rank == 1 and split.method == "time" and split.gap == 0


def test_split_backward_counts_where_the_schedule_splits(profiled):
    config, profile, _ = profiled
    names = [spec.name for spec in describe(config.model)]
    assert measure.layer_times(config, profile) == profile.times(names)
    parallel = replace(config.parallel, schedule="zb_h1")
    split = measure.layer_times(replace(config, parallel=parallel), profile)
    assert split == profile.times(names, splits_backward=True) != profile.times(names)
    with pytest.raises(ValueError, match="not the 8 of the model"):
        profile.times(names[:-1])


def test_the_halves_of_a_backward_give_the_gradients_of_the_whole():
    model = resolved(*SMALL, "model.vocabulary=64").model
    ((_, block),) = models.build(model, seed=0, start=1, stop=2, dtype=torch.float64)
    parameters = list(block.parameters())
    x = torch.randn(2, 32, 32, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(2, 32, 32, dtype=torch.float64)
    whole = torch.autograd.grad(block(x), [x, *parameters], gradient)
    for _ in range(2):  # the second time they add to gradients that are there
        x.grad = None
        groups = backward_input(block(x), gradient, x, parameters)
        torch.testing.assert_close(x.grad, whole[0])
        backward_weight(parameters, groups)
    for parameter, expected in zip(parameters, whole[1:], strict=True):
        torch.testing.assert_close(parameter.grad, 2 * expected)


def test_a_layer_outside_the_models():
    linear = torch.nn.Linear(64, 64, bias=False)
    profile = measure_layer(
        ["linear"],
        linear,
        list(linear.parameters()),
        lambda: torch.ones(128, 64, requires_grad=True),
        torch.nn.Linear(64, 64, bias=False, device="meta"),
    )
    assert profile.forward_flops == 2 * 128 * 64 * 64 and profile.backward_flops == 2 * profile.forward_flops
    assert profile.kept_bytes == profile.output_bytes == 128 * 64 * 4


# --- imbalance of a real run ---


def lopsided(balance, schedule="1f1b", stages=2, **layout):
    """Stage seconds of a machine on which a block takes 2 + 4, the embedding 1 + 1 and norm and head 6 + 12 in all."""
    config = resolved(*SMALL, "model.blocks=8", "model.vocabulary=512", f"parallel.stages={stages}")
    config = replace(config, parallel=replace(config.parallel, schedule=schedule, balance=balance, **layout))
    forward, backward = [], []
    seconds = {"embedding": (1.0, 1.0), "block": (2.0, 4.0), "norm": (0.0, 0.0), "head": (6.0, 12.0)}
    specs = describe(config.model)
    for count in balance:
        pairs = [seconds[spec.kind] for spec in specs[:count]]
        specs = specs[count:]
        forward.append(sum(f for f, _ in pairs))
        backward.append(sum(b for _, b in pairs))
    return config, forward, backward


def test_the_slowest_rank_and_what_mends_it():
    config, forward, backward = lopsided([5, 6])
    found = imbalance(config, forward, backward)
    assert found["slowest_rank"] == 1 and found["rank_s"] == [26.0, 42.0]
    assert found["over_mean"] == pytest.approx(42 / 34 - 1)
    assert found["balance"] in ([6, 5], [7, 4])  # 32 | 36 or 38 | 30: what norm takes alone cannot be told
    micro_batches = config.parallel.chunks
    upper = 1 - (36 * micro_batches) / (42 * micro_batches + 26)
    assert 0.05 < found["expected_gain"] <= upper + 0.05
    text = sentence(found)
    assert "rank 1" in text and "parallel.balance=[" in text and "% off a step" in text


def test_a_run_that_is_balanced_says_so():
    config, forward, backward = lopsided([6, 5])
    found = imbalance(config, forward, backward)
    assert found["balance"] == [6, 5] and found["expected_gain"] == 0
    assert "no other cut" in sentence(found)
    assert "balance: rank 1 is slowest" in sentence(found)


def test_with_data_ranks_the_slowest_are_all_named():
    config, forward, backward = lopsided([5, 6], data=2)
    assert "balance: pipeline rank 1 (ranks 2, 3) is slowest" in sentence(imbalance(config, forward, backward))


def test_four_stages_tell_the_kinds_apart():
    config, forward, backward = lopsided([3, 3, 3, 2], stages=4)
    seconds = layer_seconds(config, backward)
    assert seconds[1:9] == pytest.approx([4.0] * 8, rel=0.02)
    assert seconds[0] == pytest.approx(1.0, abs=0.8) and sum(seconds[9:]) == pytest.approx(12.0, rel=0.02)
    assert imbalance(config, forward, backward)["rank_s"] == [14.0, 18.0, 18.0, 18.0]


def test_several_stages_a_rank():
    config, forward, backward = lopsided([3, 3, 3, 2], schedule="interleaved_1f1b", interleave=2)
    found = imbalance(config, forward, backward)
    assert found["rank_s"] == [32.0, 36.0] and len(found["balance"]) == 4 and sum(found["balance"]) == 11
