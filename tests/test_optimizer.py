"""The optimizers, the learning rate and the global norm, against closed forms, torch and a float64 reference."""

import math
import struct

import numpy as np
import pytest
import torch
from composing import resolved
from torch import nn

from conf.resolve import FIRST_STEP
from conf.schema import OptimizerConfig
from ranks import run_ranks
from training.optimizer import clip_, decays, global_norm, learning_rate, make_optimizer, squared_norm

SHAPES = {
    "embedding.token.weight": (1000, 257),  # over 32,768 elements: torch sums those on several threads
    "block.0.norm.weight": (257,),
    "block.0.mlp.weight": (300, 257),
    "block.0.mlp.bias": (300,),
    "block.1.norm.weight": (257,),
    "block.1.mlp.weight": (300, 257),
    "block.1.mlp.bias": (300,),
    "norm.weight": (257,),
    "head.weight": (1000, 257),
}
TIED = {"head.weight": "embedding.token.weight"}
DECAYED = {"block.0.mlp.weight", "block.1.mlp.weight", "head.weight"}  # not norms, biases and embeddings


def _parameters(dtype=torch.float32, scale=1.0) -> dict[str, nn.Parameter]:
    """Named parameters with random values and gradients, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    parameters = {}
    for name, shape in SHAPES.items():
        parameters[name] = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        parameters[name].grad = (scale * torch.randn(shape, generator=generator)).to(dtype)
    return parameters


def _bits(value) -> bytes:
    return struct.pack("d", float(value))


# ---------------------------------------------------------------------------------------------- the update rule


def _config(**overrides) -> OptimizerConfig:
    return OptimizerConfig(**{"name": "adamw", "learning_rate": 0.1, "warmup_steps": 0} | overrides)


def _adamw(p, gradients, rates, beta1, beta2, eps, decay):
    """Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019), algorithm 2, in float64."""
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        p = p - rate * decay * p - rate * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps)
    return p


def _sgd(p, gradients, rates, momentum, decay):
    """Momentum in torch's form: the velocity is without the learning rate, and decay is part of the gradient."""
    velocity = np.zeros_like(p)
    for g, rate in zip(gradients, rates, strict=True):
        velocity = momentum * velocity + g + decay * p
        p = p - rate * velocity
    return p


def _steps(optimizer, parameters, rates, shrink: float) -> dict[str, list]:
    """One step at each rate, with gradients that shrink from step to step; the gradients of each parameter, float64."""
    history = {n: [] for n in parameters}
    for number, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for n, p in parameters.items():
            p.grad = (p.grad * (1 - shrink * number)).to(p.dtype)
            history[n].append(p.grad.double().numpy().copy())
        optimizer.step()
    return history


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 2e-6)])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_steps_equal_a_float64_reference(name, dtype, tolerance):
    config = _config(name=name, beta1=0.8, beta2=0.9, eps=1e-3, momentum=0.7, weight_decay=0.5)
    rates = [0.1, 0.05, 0.2, 0.01]
    parameters = _parameters(dtype)
    before = {n: p.detach().double().numpy().copy() for n, p in parameters.items()}
    optimizer = make_optimizer(config, parameters)
    history = _steps(optimizer, parameters, rates, 0.7)
    for n, p in parameters.items():
        decay = 0.5 if n in DECAYED else 0.0
        if name == "adamw":
            expected = _adamw(before[n], history[n], rates, 0.8, 0.9, 1e-3, decay)
        else:
            expected = _sgd(before[n], history[n], rates, 0.7, decay)
        assert np.abs(p.detach().double().numpy() - expected).max() < tolerance * np.abs(expected).max(), n


def _adafactor(p, gradients, rates, decay):
    """Shazeer and Stern, Adafactor (2018), algorithms 4 and 5 with their constants, without momentum, in float64."""
    rows, columns, whole = np.zeros((p.shape[0], 1)), np.zeros((1, p.shape[-1])), np.zeros_like(p)
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        beta2 = 1 - t**-0.8
        scale = max(1e-3, np.sqrt(np.mean(p**2))) * min(rate, 1 / np.sqrt(t))
        p = p - rate * decay * p  # decoupled, as torch's; the paper has none
        if p.ndim == 2:
            rows = beta2 * rows + (1 - beta2) * np.mean(g**2, 1, keepdims=True)
            columns = beta2 * columns + (1 - beta2) * np.mean(g**2, 0, keepdims=True)
            v = rows * columns / rows.mean()
        else:
            v = whole = beta2 * whole + (1 - beta2) * g**2
        update = np.divide(g, np.sqrt(v), out=np.zeros_like(g), where=v > 0)
        p = p - scale * update / max(1, np.sqrt(np.mean(update**2)))
    return p


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_adafactor_equals_a_float64_reference(dtype, tolerance):
    rates = [0.1, 0.9, 0.2, 0.05]  # 0.9 is more than 1 / sqrt(2)
    config = _config(name="adafactor", eps=1e-16, weight_decay=0.5)
    parameters = _parameters(dtype, scale=1e-5)  # far below float32's own epsilon in their squares
    parameters["block.0.mlp.bias"].data.zero_()
    parameters["embedding.token.weight"].grad[3] = 0  # a token that is in no batch
    before = {n: p.detach().double().numpy().copy() for n, p in parameters.items()}
    optimizer = make_optimizer(config, parameters)
    history = _steps(optimizer, parameters, rates, 0.3)
    for n, p in parameters.items():
        expected = _adafactor(before[n], history[n], rates, 0.5 if n in DECAYED else 0.0)
        assert np.abs(p.detach().double().numpy() - expected).max() < tolerance * np.abs(expected).max(), n


def test_muon_makes_momentum_orthogonal_and_leaves_the_rest_to_adamw():
    """By singular values in float64: those of a step are all about 0.2 x rate x sqrt(larger side), which gives a full
    matrix AdamW's root mean square (arXiv 2502.16982, section 2.2). Newton-Schulz's five steps end within 0.68 to 1.13
    of one (https://kellerjordan.github.io/posts/muon/)."""
    config = _config(name="muon", momentum=0.8, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.5)
    parameters = _parameters()
    before = {n: p.detach().double().numpy().copy() for n, p in parameters.items()}
    gradients = {n: p.grad.double().numpy().copy() for n, p in parameters.items()}
    optimizer = make_optimizer(config, parameters)
    optimizer.step()
    for n, p in parameters.items():
        change = p.detach().double().numpy() - before[n]
        decay = 0.5 if n in DECAYED else 0.0
        if n not in ("block.0.mlp.weight", "block.1.mlp.weight"):
            expected = _adamw(before[n], [gradients[n]], [0.1], 0.8, 0.9, 1e-3, decay)
            assert np.abs(before[n] + change - expected).max() < 2e-6 * np.abs(expected).max(), n
            continue
        step = (change + 0.1 * decay * before[n]) / (-0.1 * 0.2 * math.sqrt(300))
        values = np.linalg.svd(step, compute_uv=False)
        assert 0.65 < values.min() and values.max() < 1.2, n
        u, _, v = np.linalg.svd(gradients[n], full_matrices=False)  # the first momentum points along the gradient
        assert np.sum(step * (u @ v)) / np.linalg.norm(step) / np.linalg.norm(u @ v) > 0.97
        assert set(optimizer.state[p]) == {"momentum_buffer"}
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in parameters.values()}


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_step_does_not_depend_on_the_number_of_threads(name):
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        parameters = _parameters()
        optimizer = make_optimizer(_config(name=name, momentum=0.9), parameters)
        for _ in range(3):
            optimizer.step()
        results.append(parameters)
    torch.set_num_threads(1)
    for n in SHAPES:
        assert torch.equal(results[0][n], results[1][n]) and torch.equal(results[0][n], results[2][n]), n


def test_every_parameter_is_in_one_group_and_matrices_decay():
    parameters = _parameters()
    decayed, others = make_optimizer(_config(weight_decay=0.1), parameters).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {id(p) for p in decayed["params"]} == {id(p) for n, p in parameters.items() if decays(n, p)}
    assert len(decayed["params"]) + len(others["params"]) == len(parameters)
    assert {n for n, p in parameters.items() if decays(n, p)} == DECAYED
    # a tied head is the embedding, also on a rank that has no embedding
    assert not decays("head.weight", parameters["head.weight"], TIED)


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "muon"])
@pytest.mark.parametrize("held", ["head.weight", "norm.weight", "block.0.mlp.weight"])
def test_a_rank_may_hold_one_kind_of_parameter_only(name, held):
    parameters = {held: _parameters()[held]}
    before = parameters[held].detach().clone()
    optimizer = make_optimizer(_config(name=name), parameters)
    optimizer.step()
    assert not torch.equal(parameters[held], before)
    optimizer.zero_grad(set_to_none=True)
    assert parameters[held].grad is None


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match="optimizer.name=adam .* adamw, sgd, adafactor, muon"):
        make_optimizer(_config(name="adam"), _parameters())
    with pytest.raises(ValueError, match="optimizer.schedule=step .* cosine, linear, constant, wsd"):
        learning_rate(_config(schedule="step"), 0, 10)


# ---------------------------------------------------------------------------------------------- the learning rate


def test_rates_that_were_left_open():
    """Muon's is AdamW's. Adafactor's is relative: the paper's on accelerators, more for a short run, and the first
    step of a run without warm-up moves a weight by no more than AdamW's does."""
    for model in ("gpt_tiny", "gpt_124m", "gpt_1b"):
        adamw, muon, adafactor = (
            resolved(f"model={model}", f"optimizer={name}") for name in ("adamw", "muon", "adafactor")
        )
        assert muon.optimizer.learning_rate == adamw.optimizer.learning_rate
        assert 0 < adafactor.optimizer.learning_rate <= 0.025
    assert adafactor.optimizer.warmup_steps == 0  # gpt_1b: four steps
    first = FIRST_STEP / (adafactor.model.hidden * adafactor.model.feedforward * adafactor.model.blocks)
    assert adafactor.optimizer.learning_rate * adafactor.model.initializer_std == pytest.approx(first, rel=0.05)
    assert adamw.optimizer.learning_rate == pytest.approx(first, rel=0.05)
    assert resolved("optimizer=adafactor").optimizer.learning_rate == 0.025
    assert resolved("optimizer=adafactor", "model=gpt_7b", "hardware=h100").optimizer.learning_rate == 0.01


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 10, 100])
def test_warm_up_is_a_line_from_above_zero_to_the_peak(schedule, warmup):
    config = _config(schedule=schedule, warmup_steps=warmup, learning_rate=3e-4)
    rates = [learning_rate(config, step, 1000) for step in range(1000)]
    assert rates[:warmup] == pytest.approx([3e-4 * (step + 1) / warmup for step in range(warmup)], rel=1e-12)
    top = max(warmup - 1, 0)
    assert rates[top] == max(rates) == pytest.approx(3e-4, rel=1e-12)
    assert all(a >= b for a, b in zip(rates[top:], rates[top + 1 :], strict=False))
    final = 3e-4 if schedule == "constant" else 3e-5
    assert rates[-1] == pytest.approx(final, rel=1e-12)
    assert learning_rate(config, 5000, 1000) == rates[-1]  # a run that goes on after its end


@pytest.mark.parametrize("final_fraction", [0.0, 0.1, 1.0])
def test_closed_forms_between_the_peak_and_the_end(final_fraction):
    # Warm-up of 11 steps: the peak is at step 10; of 111 steps the last is 110; so x = (step - 10) / 100.
    def rate(schedule, step):
        config = _config(schedule=schedule, learning_rate=2.0, warmup_steps=11, final_fraction=final_fraction)
        return learning_rate(config, step, 111)

    final = 2 * final_fraction
    for x in (0, 0.25, 0.5, 0.75, 1):
        step = 10 + round(100 * x)
        assert rate("linear", step) == pytest.approx(2 - (2 - final) * x, abs=1e-12)
        assert rate("cosine", step) == pytest.approx(final + (2 - final) * math.cos(math.pi * x / 2) ** 2, abs=1e-12)
        assert rate("constant", step) == 2


def test_warm_up_stable_decay():
    config = _config(schedule="wsd", learning_rate=1.0, warmup_steps=5, decay_fraction=0.2, final_fraction=0.5)
    rates = [learning_rate(config, step, 100) for step in range(100)]
    assert rates[4:80] == [1.0] * 76  # stable up to step 79, then 20 steps of decay
    assert rates[79:] == pytest.approx(np.linspace(1.0, 0.5, 21).tolist(), abs=1e-12)
    config.decay_fraction = 0.0
    assert learning_rate(config, 98, 100) == 1.0
    config.decay_fraction = 1.0  # the decay starts when the warm-up ends
    assert [learning_rate(config, step, 100) for step in (4, 99)] == pytest.approx([1.0, 0.5], abs=1e-12)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("steps, warmup", [(1, 0), (1, 1), (2, 1), (2, 2), (3, 5)])
def test_runs_of_a_few_steps(schedule, steps, warmup):
    config = _config(schedule=schedule, warmup_steps=warmup)
    assert all(0 < learning_rate(config, step, steps) <= 0.1 + 1e-15 for step in range(steps))


# ---------------------------------------------------------------------------------------------- norm and clipping


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("clip_norm", [0.5, 1e6])
def test_clipping_equals_torch_s(dtype, clip_norm):
    ours, theirs = _parameters(dtype), _parameters(dtype)
    norm = global_norm(ours, list(SHAPES), {}, None)
    clip_(ours, norm, clip_norm)
    expected = nn.utils.clip_grad_norm_(theirs.values(), clip_norm)
    exact = math.sqrt(sum(float(p.grad.double().square().sum()) for p in _parameters(dtype).values()))
    assert norm.dtype == torch.float64 and norm.shape == ()
    assert float(norm) == pytest.approx(exact, rel=1e-13 if dtype == torch.float64 else 1e-7)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-2}[dtype]
    assert float(norm) == pytest.approx(float(expected), rel=tolerance)
    for n in SHAPES:
        torch.testing.assert_close(ours[n].grad, theirs[n].grad, rtol=tolerance, atol=0)


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 40_000, 1024**2 + 1023, 4096 * 4096 + 5])
def test_the_squared_norm_is_exact_and_the_same_for_every_number_of_threads(size):
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(1))
    bits = set()
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        bits.add(_bits(squared_norm(tensor)))
    torch.set_num_threads(1)
    assert len(bits) == 1
    assert float(squared_norm(tensor)) == pytest.approx(float(tensor.double().square().sum()), rel=2e-7)


def test_a_tied_copy_counts_once_and_a_missing_gradient_as_nothing():
    parameters = _parameters()
    parameters["block.0.mlp.bias"].grad = None
    norm = global_norm(parameters, list(SHAPES), TIED, None)
    skipped = {"head.weight", "block.0.mlp.bias"}
    counted = [p.grad.double().square().sum() for n, p in parameters.items() if n not in skipped]
    assert float(norm) == pytest.approx(math.sqrt(sum(counted)), rel=1e-7)
    clip_(parameters, norm, 0.5)  # and both copies are scaled alike
    fresh = _parameters()
    for n in ("head.weight", "embedding.token.weight"):
        assert torch.equal(parameters[n].grad, fresh[n].grad * (0.5 / (float(norm) + 1e-6)))
    assert parameters["block.0.mlp.bias"].grad is None


def test_gradients_below_the_limit_are_left_alone_and_bad_norms_show():
    parameters = _parameters()
    clip_(parameters, global_norm(parameters, list(SHAPES), {}, None), 1e9)
    assert all(torch.equal(parameters[n].grad, p.grad) for n, p in _parameters().items())
    for bad in (math.nan, math.inf):
        parameters["norm.weight"].grad[3] = bad
        assert not math.isfinite(global_norm(parameters, list(SHAPES), {}, None))


def _clipped(rank: int, world: int, cuts: list[int], threads: list[int]) -> tuple[bytes, dict[str, bytes]]:
    """One rank of a cut: rank r holds names cuts[r]..cuts[r + 1]. Returns the norm's bits and its clipped gradients."""
    torch.set_num_threads(threads[rank])
    names = list(SHAPES)[cuts[rank] : cuts[rank + 1]]
    parameters = {n: p for n, p in _parameters().items() if n in names}
    group = torch.distributed.group.WORLD if world > 1 else None
    norm = global_norm(parameters, list(SHAPES), TIED, group)
    clip_(parameters, norm, 1.0)
    return _bits(norm), {n: p.grad.numpy().tobytes() for n, p in parameters.items()}


@pytest.mark.parametrize("cuts, threads", [([0, 4, 9], [1, 2]), ([0, 1, 9], [2, 1]), ([0, 1, 3, 8, 9], [1, 1, 2, 1])])
def test_every_cut_gives_the_same_bits(cuts, threads):
    """The embedding and its tied copy lie on different ranks, which have different numbers of threads."""
    norm, gradients = _clipped(0, 1, [0, len(SHAPES)], [1])
    results = run_ranks(_clipped, len(threads), cuts, threads)
    assert {result[0] for result in results} == {norm}
    assert {n: g for result in results for n, g in result[1].items()} == gradients
