"""verify.py: a right layout passes to rounding, and each fault that pipelining is known for is caught."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cases
from ranks import ROOT, run_ranks
from training import parity
from training.build import build_engine

TOLERANCE = 1e-10
CASE = cases.config(stages=2, chunks=4, dropout=0.1, accumulate=2, tied=True)
CASE.data.cross_documents = False


def _right(engine, rank, monkeypatch):
    pass


def _gradient_scaled_by_the_chunk_count(engine, rank, monkeypatch):
    engine._runtime(engine.chunks, engine.microbatch, train=True).scale_grads = True  # torch's default


def _a_dropped_microbatch(engine, rank, monkeypatch):
    whole, calls = engine.scaled_loss, []

    def without_the_first(logits, targets):
        calls.append(1)
        return whole(logits, targets) * (len(calls) > 1)

    engine._runtime(engine.chunks, engine.microbatch, train=True)._loss_fn = without_the_first


def _a_tied_gradient_not_summed(engine, rank, monkeypatch):
    engine.sum_tied_gradients = lambda: None


def _clipped_by_one_stages_norm(engine, rank, monkeypatch):
    whole = parity.global_norm
    monkeypatch.setattr(parity, "global_norm", lambda own, order, tied, group, where: whole(own, order, tied, None))


def _the_same_seed_on_each_stage(engine, rank, monkeypatch):
    """The second stage's blocks get the initial weights of the first stage's, as if both drew from one seed."""
    if rank == 1:
        first = parity.models.build(CASE.model, seed=CASE.train.seed, start=1, stop=5, dtype=torch.float64)
        for (_, source), target in zip(first, engine.stages[1].layers, strict=False):
            target.load_state_dict(source.state_dict())


def _a_stale_receive_buffer(engine, rank, monkeypatch):
    if rank == 1:
        stage = engine._runtime(engine.chunks, engine.microbatch, train=True)._stages[0]
        receive = stage._retrieve_recv_activations
        stage._retrieve_recv_activations = lambda index: tuple(
            old.detach().clone().requires_grad_() if index == 2 else new
            for old, new in zip(receive(1), receive(index), strict=True)
        )


def _targets_of_another_microbatch(engine, rank, monkeypatch):
    if rank == 1:
        _with_another_batch(engine, lambda b: replace(b, targets=b.targets.roll(engine.microbatch, dims=0)))


def _documents_of_another_microbatch(engine, rank, monkeypatch):
    if rank == 1:
        _with_another_batch(engine, lambda b: replace(b, documents=b.documents.roll(engine.microbatch, dims=0)))


def _attention_across_documents_in_one_stage(engine, rank, monkeypatch):
    if rank == 1:
        _with_another_batch(engine, lambda batch: replace(batch, documents=None))


def _with_another_batch(engine, change):
    step = engine.step
    engine.step = lambda batch, scale, **options: step(change(batch), scale, **options)


FAULTS = [
    _gradient_scaled_by_the_chunk_count,
    _a_dropped_microbatch,
    _a_tied_gradient_not_summed,
    _clipped_by_one_stages_norm,
    _the_same_seed_on_each_stage,
    _a_stale_receive_buffer,
    _targets_of_another_microbatch,
    _documents_of_another_microbatch,
    _attention_across_documents_in_one_stage,
]


def _measure_with_each(rank: int, world: int) -> list[parity.Measured]:
    found = []
    for plant in [_right, *FAULTS]:
        with pytest.MonkeyPatch.context() as monkeypatch:
            engine = build_engine(CASE, rank=rank, device=torch.device("cpu"))
            plant(engine, rank, monkeypatch)
            found.append(parity.measure(CASE, rank, torch.distributed.group.WORLD, engine))
    return found


@pytest.fixture(scope="module")
def reports() -> dict[str, parity.Report]:
    ranks = run_ranks(_measure_with_each, 2)
    expected = parity.reference(CASE)
    plants = zip([_right, *FAULTS], *ranks, strict=True)
    return {plant.__name__: parity.compare(CASE, measured, expected) for plant, *measured in plants}


def test_without_a_fault_all_is_right(reports):
    assert reports["_right"].worst[0] < 1e-14


@pytest.mark.parametrize("fault", [plant.__name__ for plant in FAULTS])
def test_the_fault_is_caught(fault, reports):
    error, what = reports[fault].worst
    assert error > 1e6 * TOLERANCE, f"{fault} passed: {error} of {what}"


def test_the_loss_looks_fine_where_only_gradients_are_wrong(reports):
    """The complaint this answers: a look at the loss does not show a wrong scale."""
    for fault in ("_gradient_scaled_by_the_chunk_count", "_a_tied_gradient_not_summed", "_clipped_by_one_stages_norm"):
        assert reports[fault].loss_error < TOLERANCE


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_the_reference_is_that_of_documents_which_are_alone(family):
    """Blocks know no positions but distances: each document goes through them by itself."""
    case = cases.config(family=family, engine="single", stages=1)
    case.data.cross_documents = False
    batch = parity.batch_of(case)
    layers = parity.models.build(case.model, seed=case.train.seed, dtype=torch.float64)
    if case.model.tied:
        dict(layers)["head"].weight = dict(layers)["embedding"].token.weight
    x = layers[0][1](batch.inputs)
    for row, documents in zip(x.detach(), batch.documents, strict=True):
        lengths = documents.unique_consecutive(return_counts=True)[1].tolist()
        assert len(lengths) > 1
        for part in row.split(lengths):  # views: written in place
            whole = part[None]
            for _, module in layers[1:-2]:
                whole = module(whole)
            part.copy_(whole[0].detach())
    for _, module in layers[-2:]:
        x = module(x)
    loss = torch.nn.functional.cross_entropy(x.flatten(0, 1), batch.targets.flatten())
    assert parity.reference(case).loss == pytest.approx(float(loss.detach()), rel=1e-13)
    plain = cases.config(family=family, engine="single", stages=1)
    assert parity.reference(plain).loss != pytest.approx(float(loss.detach()), rel=1e-6)


def test_a_missing_layer_and_a_layer_held_twice_are_infinitely_wrong():
    expected = parity.reference(CASE)
    single = replace(CASE, parallel=replace(CASE.parallel, engine="single", stages=1))
    whole = parity.measure(single, 0, None)
    assert parity.compare(CASE, [whole], expected).worst[0] < TOLERANCE
    assert parity.compare(CASE, [whole, replace(whole, loss=0.0)], expected).worst[0] == float("inf")
    del whole.gradients["block.3.attention.qkv.bias"]
    report = parity.compare(CASE, [whole], expected)
    assert report.worst[0] == float("inf") and report.rows[0].parameter == "block.3.attention.qkv.bias"


def _verify(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "verify.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


SMALL = ("verify.width=16", "train.sequence=8", "train.global_batch=8", "parallel.chunks=8", "model.heads=2")


def test_the_command_says_right_and_leaves_nothing():
    before = sorted(path.name for path in ROOT.iterdir())
    done = _verify("parallel=pp2", "parallel.schedule=zb_h1", *SMALL)
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("RIGHT: worst relative error ") and last.endswith("tolerance 1e-10")
    assert sorted(path.name for path in ROOT.iterdir()) == before


def test_the_command_exits_with_1_beyond_the_tolerance():
    done = _verify("parallel=single", "verify.tolerance=1e-20", "data.cross_documents=false", *SMALL)
    assert done.returncode == 1 and "8 random sequences of 8 tokens, attention inside documents; " in done.stdout
    assert done.stdout.strip().splitlines()[-1].startswith("WRONG: ")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["verify.width=30"], ["verify.width=30", "model.heads=4", "32"]),
        (["model=llama_tiny", "verify.width=36"], ["verify.width=36", "2 x model.heads=4", "32"]),
        (["model=gpt_100b", "parallel=pp4"], ["verify.width=", "verify.blocks=", "GiB"]),
        (["verify.blocks=1", "parallel.stages=5"], ["5 model stages", "4 layers"]),
        (["parallel.schedule=wrong"], ["wrong", "1f1b"]),
        (["+parallel.stagez=2"], ["parallel.stagez is no key", "Did you mean parallel.stages?"]),
    ],
)
def test_bad_input_is_one_line(arguments, words):
    done = _verify(*arguments)
    assert done.returncode == 2, done.stdout
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert not list(Path(ROOT).glob("outputs"))
