"""Gradients of every engine and cut against plain autograd, in float64, parameter by parameter."""

from __future__ import annotations

import itertools

import pytest
import torch

import cases
from models import sample_keys
from pipeline.engines.base import Batch
from ranks import run_ranks

TOLERANCE = 1e-10  # relative, float64


def _batch(case, seed: int = 0) -> Batch:
    inputs, targets = cases.tokens(case.train.global_batch, seed)
    keys = sample_keys(cases.SEED, 0, torch.arange(len(inputs))) if case.model.dropout else None
    return Batch(inputs, targets, keys)


def _errors(rank: int, world: int, listed: list) -> list:
    """For each case: this rank's loss, its worst relative gradient error and whose it is."""
    results = []
    for case in listed:
        batch = _batch(case)
        loss, gradients = cases.gradients(case, rank, batch, flushes=case.train.accumulate)
        expected_loss, expected = cases.reference(case, batch.inputs, batch.targets, batch.keys)
        worst, name = cases.worst_error(gradients, expected, cases.tied_names(case))
        results.append((loss, expected_loss, worst, name, sorted(gradients)))
    return results


def _cases(stages: int) -> dict:
    listed = {}
    for schedule, tied, chunks in itertools.product(("gpipe", "1f1b"), (True, False), (1, stages, 8)):
        name = f"{schedule}-{'tied' if tied else 'untied'}-chunks{chunks}"
        listed[name] = cases.config(stages=stages, schedule=schedule, tied=tied, chunks=chunks)
    listed["dropout-accumulate"] = cases.config(stages=stages, dropout=0.2, accumulate=2)
    listed["mlp"] = cases.config(stages=stages, family="mlp", tied=False)
    for tied in (True, False):
        listed[f"llama-{'tied' if tied else 'untied'}"] = cases.config(
            stages=stages, family="llama", tied=tied, dropout=0.2, accumulate=2, checkpoint="except_last"
        )
    listed["uneven"] = cases.config(stages=stages, balance=[1] * (stages - 1) + [8 - stages + 1])
    listed["literal"] = cases.config(stages=stages, balance=[1] * (stages - 1) + [11 - stages + 1])
    for mode in ("except_last", "always"):
        listed[f"checkpoint-{mode}"] = cases.config(stages=stages, checkpoint=mode, interval=2, dropout=0.1)
    return listed


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_torch_engine_gradients_equal_plain_autograd(stages):
    listed = _cases(stages)
    answers = run_ranks(_errors, stages, list(listed.values()))
    for index, (name, case) in enumerate(listed.items()):
        held = [parameter for answer in answers for parameter in answer[index][4]]
        assert len(held) == len(set(held)), f"{name}: a parameter is on two ranks"
        _, everything = cases.reference(case, *cases.tokens(2), None)
        assert {cases.tied_names(case).get(parameter, parameter) for parameter in held} == set(everything), name
        for rank, answer in enumerate(answers):
            loss, expected_loss, worst, parameter, _ = answer[index]
            assert worst < TOLERANCE, f"{name}: rank {rank} {parameter} is off by {worst}"
            if rank == stages - 1:
                assert loss == pytest.approx(expected_loss, rel=1e-12), name
            else:
                assert loss == 0.0


ONE_PROCESS = {
    f"{engine}{stages}-{'tied' if tied else 'untied'}-{checkpoint}": dict(
        engine=engine, stages=stages, tied=tied, checkpoint=checkpoint, schedule="gpipe", accumulate=2, dropout=0.1
    )
    for engine, stages in (("single", 1), ("fairscale", 2), ("fairscale", 4))
    for tied in (True, False)
    for checkpoint in ("never", "except_last", "always")
}


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_one_process_engines_gradients_equal_plain_autograd(name):
    case = cases.config(**ONE_PROCESS[name])
    ((loss, expected_loss, worst, parameter, _),) = _errors(0, 1, [case])
    assert worst < TOLERANCE, f"{parameter} is off by {worst}"
    assert loss == pytest.approx(expected_loss, rel=1e-12)


def test_the_error_measure_sees_a_wrong_scale():
    case = cases.config(engine="single")
    batch = _batch(case)
    _, gradients = cases.gradients(case, 0, batch)
    _, expected = cases.reference(case, batch.inputs, batch.targets, None)
    scaled = {name: gradient * case.parallel.chunks for name, gradient in gradients.items()}
    worst, _ = cases.worst_error(scaled, expected, cases.tied_names(case))
    assert worst == pytest.approx(case.parallel.chunks - 1)


@pytest.mark.parametrize("engine, stages", [("single", 1), ("fairscale", 2)])
def test_bfloat16_computes_in_bfloat16_with_float32_gradients(engine, stages, monkeypatch):
    """fairscale's worker threads lose an autocast from outside, silently."""
    computed, linear = [], torch.nn.functional.linear

    def spy(*arguments):
        output = linear(*arguments)
        computed.append(output.dtype)
        return output

    monkeypatch.setattr(torch.nn.functional, "linear", spy)
    case = cases.config(engine=engine, stages=stages, schedule="gpipe", precision="bfloat16")
    _, gradients = cases.gradients(case, 0, _batch(case))
    assert set(computed) == {torch.bfloat16}
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}


def _evaluations(rank: int, world: int, case) -> list[float]:
    """Evaluation before, between and after steps, with batch sizes of its own."""
    from training.build import build_engine

    engine = build_engine(case, rank=rank, device=torch.device("cpu"))
    found = []
    try:
        for turn, rows in enumerate((5, 8, 3, 1)):
            inputs, targets = cases.tokens(rows, seed=turn)
            found.append(float(engine.evaluate(Batch(inputs, targets), rows)))
            batch = _batch(case, seed=turn)
            engine.step(batch, 1.0 / batch.inputs.numel())
        assert all(parameter.grad is not None for parameter in engine.parameters.values())
        return found
    finally:
        engine.close()


@pytest.mark.parametrize(
    "engine, stages, world, schedule, interleave",
    [
        ("single", 1, 1, "gpipe", 1),
        ("fairscale", 3, 1, "gpipe", 1),
        ("torch", 3, 3, "gpipe", 1),
        ("torch", 2, 2, "interleaved_1f1b", 2),
        ("torch", 2, 2, "zb_v", 2),
    ],
)
def test_evaluation_before_between_and_after_steps(engine, stages, world, schedule, interleave):
    case = cases.config(engine=engine, stages=stages, schedule=schedule, interleave=interleave)
    answers = run_ranks(_evaluations, world, case) if world > 1 else [_evaluations(0, 1, case)]
    for turn, rows in enumerate((5, 8, 3, 1)):
        expected, _ = cases.reference(case, *cases.tokens(rows, seed=turn), None)
        last = 0 if schedule == "zb_v" or world == 1 else world - 1  # the rank of the last stage
        assert answers[last][turn] == pytest.approx(expected * rows * cases.SEQUENCE, rel=1e-12)
        assert all(answer[turn] == 0.0 for rank, answer in enumerate(answers) if rank != last)
