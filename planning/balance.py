"""What parallel.balance means for a run: costs of each layer, the cut that is best by them, its certificate. No torch.

`resolved_balance` is called once, in the front; below it there is only the list of layers of each model stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from math import prod

from conf.schema import RootConfig
from models.describe import DTYPE_BYTES, LayerSpec, activation_bytes, describe, forward_flops
from pipeline.branch import more_even
from pipeline.optimum import Cut, NothingFits, Problem, bounds, least_memory, rank_bytes, rank_costs, solve
from pipeline.partition import Certificate, certify, held_moments, rank_of_stage, split_stages
from pipeline.placement import num_ranks
from pipeline.schedule import make_schedule
from planning.layers import layer_cost
from planning.links import links
from planning.memory import micro_batch, rank_memory
from planning.rates import rates
from planning.stack import get_stack
from planning.steady import flush

COUNTED = ("weights", "gradients", "optimizer", "activations", "logits")  # of rank_memory: what depends on the cut
# Where the hardware file has no figure: bytes of memory traffic that take as long as one FLOP's worth of arithmetic
FLOPS_A_BYTE = 10.0
SLACKS = (0.01, 0.05, 0.2)  # of the slowest rank's time: given up for stages of more even size, where that is faster


def resolved_balance(config: RootConfig, times: Sequence[float] | None = None) -> tuple[RootConfig, Certificate]:
    """A copy of a resolved configuration whose balance is a list, the layers of each model stage; and how good it is.

    times: seconds (F + I + W) of each layer for one micro-batch, measured; needed by balance=time, and in place of
    predicted ones for every other balance's certificate. ValueError: the list does not fit, more stages than layers, or
    no cut keeps every rank under parallel.memory_cap_bytes.
    """
    asked = config.parallel.balance
    specs = describe(config.model)
    names = [spec.name for spec in specs]
    if asked == "time":
        assert times is not None, "balance=time needs measured times"
    problem, unit = _problem(config, specs, times)
    if asked in ("auto", "time"):
        cut = _fastest(config, problem, _solve(config, problem))
    elif asked == "memory":
        cut = _least_memory(config, problem)
    elif asked in ("flops", "parameters"):
        problem, unit = replace(problem, costs=_proxy(asked, config, specs)), asked
        cut = _solve(config, problem)
    else:
        stages = split_stages(asked, len(problem.rank_of), names)
        cut = Cut([len(stage) for stage in stages], 0.0)
        _check_cap(problem, cut)
        cut = replace(cut, lower_bound=solve(problem).lower_bound)
    method = asked if isinstance(asked, str) else "list"
    config = deepcopy(config)
    config.parallel.balance = list(cut.counts)
    return config, certify(problem, cut, names, method=method, unit=unit)


def predicted_times(config: RootConfig, specs: list[LayerSpec]) -> list[float]:
    """Seconds of F + I + W of each layer for one micro-batch, recomputation included, nothing run: the planner's, or
    where the hardware file lacks a figure that it needs a rougher roofline. Only ratios matter to the cut."""
    try:
        stack = get_stack("torch")
        device = rates(config.hardware, config.train.precision, ranks_here=num_ranks(config.parallel))
        tensor = links(config.hardware, config.parallel).tensor
        costs = {spec.kind: layer_cost(spec, config, stack, device, tensor) for spec in specs[:2] + specs[-2:]}
    except ValueError:
        return [_rough_seconds(config, spec) for spec in specs]
    seconds = {}
    for kind, cost in costs.items():
        again = cost.forward.total if config.parallel.checkpoint != "never" and kind == "block" else 0.0
        seconds[kind] = cost.forward.total + cost.backward_input.total + cost.backward_weight.total + again
    return [seconds[spec.kind] for spec in specs]


def _rough_seconds(config: RootConfig, spec: LayerSpec) -> float:
    """Arithmetic at the peak plus memory traffic: three times the forward's FLOPs, once more where it is recomputed."""
    hardware, train = config.hardware, config.train
    flops_per_s = hardware.peak_flops_float32 or 1.0
    if train.precision == "bfloat16":
        flops_per_s = hardware.peak_flops_bfloat16 or flops_per_s
    bytes_per_s = hardware.memory_bytes_per_s or flops_per_s / FLOPS_A_BYTE
    forwards = 4 if config.parallel.checkpoint != "never" and spec.kind == "block" else 3
    flops = forwards * micro_batch(config) * forward_flops(spec, config.model, train.sequence)
    return flops / flops_per_s + _traffic_bytes(spec, config) / bytes_per_s


def layer_bytes(config: RootConfig, specs: list[LayerSpec]) -> tuple[list[int], list[int], int]:
    """Of each layer: bytes held once, and bytes held of each micro-batch in flight; and what a rank has beside.

    Differences of planning.memory's own sums (COUNTED), so that both always say the same: exact for checkpoint=never;
    with recomputation the unit that is whole again in its backward counts once a rank, on every rank.
    """
    once = _unit_bytes(config, specs)
    fixed, held = {}, {}
    for spec in specs:
        if spec.kind not in fixed:
            one, two = (_counted(config, [spec], number) for number in (1, 2))
            held[spec.kind] = two - one
            fixed[spec.kind] = one - (two - one) - (once if spec.kind == "block" else 0)
    interval = config.parallel.checkpoint_interval
    if once:  # a unit of several blocks keeps one input
        each = -(-held["block"] // interval)
        if config.parallel.checkpoint == "except_last":  # of the last micro-batch every block keeps all
            fixed["block"] += held["block"] - each
        held["block"] = each
    return [fixed[spec.kind] for spec in specs], [held[spec.kind] for spec in specs], once * interval


def _unit_bytes(config: RootConfig, specs: list[LayerSpec]) -> int:
    """Bytes of one block that is recomputed: of two blocks each is kept, and one is whole."""
    blocks = [spec for spec in specs if spec.kind == "block"][:2]
    if config.parallel.checkpoint == "never" or len(blocks) < 2:
        return 0
    single = deepcopy(config)
    single.parallel.checkpoint_interval = 1
    return 2 * _counted(single, blocks[:1], 1) - _counted(single, blocks, 1)


def _counted(config: RootConfig, specs: list[LayerSpec], held: int) -> int:
    interleave = (config.parallel.interleave or 1) if config.parallel.engine == "torch" else 1
    parts = rank_memory(config, specs, held * interleave)
    return sum(parts[name] for name in COUNTED)


def _problem(config: RootConfig, specs: list[LayerSpec], times: Sequence[float] | None = None) -> tuple[Problem, str]:
    parallel = config.parallel
    if parallel.engine == "torch":
        schedule = make_schedule(parallel.schedule, parallel.stages, parallel.chunks, parallel.interleave)
        held = held_moments(schedule)
    else:  # single runs one micro-batch at a time; fairscale fills and drains
        held = [[(1 if parallel.engine == "single" else parallel.chunks,)]] * parallel.stages
    fixed, kept, once = layer_bytes(config, specs)
    if times is None:
        times = predicted_times(config, specs)
    elif len(times) != len(specs):
        raise ValueError(f"{len(times)} measured times are given for the {len(specs)} layers of the model")
    problem = Problem(
        costs=tuple(times),
        rank_of=tuple(rank_of_stage(parallel)),
        fixed_bytes=tuple(fixed),
        held_bytes=tuple(kept),
        held=tuple(tuple(moments) for moments in held),
        rank_bytes=once,
        cap_bytes=None if parallel.memory_cap_bytes is None else int(parallel.memory_cap_bytes),
    )
    return problem, "seconds"


def _proxy(name: str, config: RootConfig, specs: list[LayerSpec]) -> tuple[float, ...]:
    if name == "flops":
        return tuple(
            3 * micro_batch(config) * forward_flops(spec, config.model, config.train.sequence) for spec in specs
        )
    return tuple(sum(map(prod, spec.parameters.values())) for spec in specs)


def _traffic_bytes(spec: LayerSpec, config: RootConfig) -> float:
    """Bytes that a layer reads and writes in F, I and W of one micro-batch, beside the operands of its products."""
    model, train = config.model, config.train
    tokens = micro_batch(config) * train.sequence
    element = 8 if train.precision == "float64" else 4
    weights = element * sum(map(prod, spec.parameters.values()))
    if spec.kind == "embedding":  # its gradient is dense: cleared, added to, and added to the sum
        return 4 * weights + 6 * element * tokens * model.hidden
    fused = config.hardware.device != "cpu"
    kept = activation_bytes(spec, model, micro_batch(config), train.sequence, train.precision, False, fused)
    traffic = 3 * weights + 3 * kept
    if spec.kind == "head":  # the loss: log-probabilities and two gradients, each written and read
        traffic += 8 * max(4, DTYPE_BYTES[train.precision]) * tokens * model.vocabulary
    return traffic


def _solve(config: RootConfig, problem: Problem) -> Cut:
    try:
        return solve(problem)
    except NothingFits as refusal:
        raise ValueError(_nothing_fits(config, refusal)) from None


def _fastest(config: RootConfig, problem: Problem, cut: Cut) -> Cut:
    """Of the best cut, and those a little off it whose stages are more even, the one whose simulated flush is shortest.

    Only where a rank has several stages: there the slowest rank may be spared a hair by one huge stage, for which all
    the others wait (gpt3_175b on 8 ranks x 2: 0.05 % of the slowest rank against a third of the flush).
    """
    if problem.one_a_rank:
        return cut
    tried = [cut.counts] + [more_even(problem, cut.counts, slack) for slack in SLACKS]

    def seconds(counts: list[int]) -> float:
        ends = bounds(counts)
        thirds = [sum(problem.costs[first:end]) / 3 for first, end in zip(ends, ends[1:], strict=False)]
        return flush(config.parallel, thirds, thirds, thirds).makespan

    return Cut(min(tried, key=seconds), cut.lower_bound)


def _least_memory(config: RootConfig, problem: Problem) -> Cut:
    """The cut whose fullest rank holds least; its certificate is still about time."""
    counts = least_memory(problem)[0]
    _check_cap(problem, Cut(counts, 0.0))
    return Cut(counts, solve(replace(problem, cap_bytes=None)).lower_bound)


def _check_cap(problem: Problem, cut: Cut) -> None:
    held = rank_bytes(problem, cut.counts)
    if problem.cap_bytes is not None and max(held) > problem.cap_bytes:
        rank = held.index(max(held))
        raise ValueError(
            f"parallel.balance={cut.counts} puts {held[rank]:,} bytes on rank {rank}, "
            f"{held[rank] - problem.cap_bytes:,} over parallel.memory_cap_bytes={problem.cap_bytes:,}: "
            "try parallel.balance=auto, which keeps the cap where any cut does"
        )


def _nothing_fits(config: RootConfig, refusal: NothingFits) -> str:
    """One line: which rank is over, by how much, and what would fit, cheapest first."""
    least, cap = refusal.bytes[refusal.rank], int(refusal.cap)
    qualified = "" if refusal.proven else " that was found"
    ways = [f"{way} ({held:,} bytes{price})" for way, held, price in _ways_to_fit(config, cap)]
    ways.append(f"parallel.memory_cap_bytes={least}")
    return (
        f"parallel.memory_cap_bytes={cap:,} is kept by no cut into parallel.stages={config.parallel.stages}: even the "
        f"one{qualified} that needs least memory, parallel.balance={refusal.counts}, puts {least:,} bytes on rank "
        f"{refusal.rank}, {least - cap:,} too many; what fits, cheapest first: {'; '.join(ways)}"
    )


def _ways_to_fit(config: RootConfig, cap: int) -> list[tuple[str, int, str]]:
    """Single changes under which some cut keeps the cap: the overrides, the fullest rank's bytes, the price."""
    parallel, train = config.parallel, config.train
    torch = parallel.engine == "torch"
    changes: list[dict] = [{"chunks": 2 * parallel.chunks}, {"chunks": 4 * parallel.chunks}]
    if torch and parallel.schedule in ("gpipe", "looped_bfs", "zb_h2"):
        changes.append({"schedule": "1f1b", "interleave": 1})
    if parallel.checkpoint == "never":
        changes.append({"checkpoint": "always"})
    if parallel.engine != "single":
        changes += [{"stages": factor * parallel.stages} for factor in (2, 4)]
    before = _step_units(config)
    found = []
    for change in changes:
        tried = deepcopy(config)
        for key, value in change.items():
            setattr(tried.parallel, key, value)
        if train.global_batch % (train.accumulate * tried.parallel.chunks):
            continue
        tried.parallel.memory_cap_bytes = None
        try:
            problem, _ = _problem(tried, describe(config.model))
            held = max(rank_bytes(problem, least_memory(problem, max_nodes=2_000)[0]))
        except ValueError:  # more stages than layers, or the schedule does not take these numbers
            continue
        if held <= cap:
            factor = tried.parallel.stages // parallel.stages
            devices = f", {factor} x the ranks" if factor > 1 else ""
            slower = _step_units(tried) / before - 1
            text = " ".join(f"parallel.{key}={value}" for key, value in change.items())
            found.append((factor, slower, (text, held, f"{devices}, predicted step {slower:+.0%}")))
    return [way for _, _, way in sorted(found, key=lambda entry: entry[:2])]


def _step_units(config: RootConfig) -> float:
    """Predicted time of a flush at the best cut, the cap and memory left out: slowest rank over all micro-batches, and
    the ideal bubble's share on top."""
    from pipeline.schedule import bubble_ideal

    problem, _ = _problem(config, describe(config.model))
    problem = replace(problem, cap_bytes=None)
    slowest = max(rank_costs(problem, solve(problem, max_nodes=2_000).counts))
    parallel = config.parallel
    if parallel.engine == "single":
        return slowest * parallel.chunks
    name = parallel.schedule if parallel.engine == "torch" else "gpipe"
    bubble = bubble_ideal(make_schedule(name, parallel.stages, parallel.chunks, parallel.interleave))
    return slowest * parallel.chunks / (1 - bubble)
