"""Cuts the ordered list of layers into model stages, says which rank holds which, and certifies a cut. No torch.

A stage is a contiguous run of layers. What a cut costs comes from the caller (planning/balance.py, a profile, a run).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from conf.schema import ParallelConfig
from conf.words import count
from pipeline.optimum import Cut, Problem, bounds, rank_bytes, rank_costs
from pipeline.schedule import Schedule, make_schedule

BALANCES = ("auto", "uniform", "parameters", "flops", "time", "memory")


@dataclass(frozen=True)
class Certificate:
    """What a cut is worth: every layer once, no stage empty (checked), the slowest rank, and what none can beat."""

    method: str  # parallel.balance as it was asked for
    balance: list[int]  # layers of each model stage
    layers: list[list[str]]  # names on each rank, in stage order
    unit: str  # of the costs: seconds of a micro-batch, or what was asked to be balanced
    costs: list[float]  # of each rank
    lower_bound: float  # on the slowest rank's cost; no cut is better (under the cap, where there is one)
    slowest_rank: int
    gap: float  # slowest / lower_bound - 1; 0 = proven best
    efficiency: float  # mean / slowest cost over the ranks: 1 = all equally busy
    bytes: list[int] | None = None  # of each rank: weights, gradients, optimizer state, activations, logits
    cap_bytes: int | None = None

    def to_dict(self) -> dict:
        return asdict(self)


def certify(problem: Problem, cut: Cut, names: list[str], *, method: str, unit: str) -> Certificate:
    """The certificate of a cut, all of it computed from the counts anew. AssertionError: it is no cut at all."""
    counts, ranks = cut.counts, problem.rank_of
    ends = bounds(counts)
    stages = [names[first:end] for first, end in zip(ends, ends[1:], strict=False)]
    assert len(stages) == len(ranks) and all(stages), f"{counts}: a stage is empty, or one too many"
    once = ends[-1] == len(names) and [name for stage in stages for name in stage] == names
    assert once, f"{counts}: not every one of {len(names)} layers exactly once"
    layers: list[list[str]] = [[] for _ in range(problem.num_ranks)]
    for rank, stage in zip(ranks, stages, strict=True):
        layers[rank] += stage
    costs = rank_costs(problem, counts)
    slowest = max(costs)
    bound = min(cut.lower_bound, slowest)
    return Certificate(
        method=method,
        balance=counts,
        layers=layers,
        unit=unit,
        costs=costs,
        lower_bound=bound,
        slowest_rank=costs.index(slowest),
        gap=slowest / bound - 1 if bound else 0.0,
        efficiency=sum(costs) / len(costs) / slowest if slowest else 1.0,
        bytes=rank_bytes(problem, counts) if problem.counts_memory else None,
        cap_bytes=problem.cap_bytes,
    )


def held_moments(schedule: Schedule) -> list[list[tuple[int, ...]]]:
    """For each rank the moments at which its activations may be most: micro-batches held of each of its stages.

    Held from F until B, or until W where the backward is split. A moment at which another one holds as much of every
    stage and more is left out, so that one stage a rank has one moment: `pipeline.schedule.held_microbatches`.
    """
    stages: list[list[int]] = [[] for _ in range(schedule.stages)]
    for stage, rank in enumerate(schedule.rank_of):
        stages[rank].append(stage)
    result = []
    for row, own in zip(schedule.actions, stages, strict=True):
        held, peaks = dict.fromkeys(own, 0), set()
        for stage, kind, _ in row:
            if kind == "F":
                held[stage] += 1
                peaks.add(tuple(held.values()))
            elif kind != "I":
                held[stage] -= 1
        most: list[tuple[int, ...]] = []
        for peak in sorted(peaks, reverse=True):  # what is more of every stage comes first
            if not any(all(map(int.__le__, peak, other)) for other in most):
                most.append(peak)
        result.append(most)
    return result


def rank_of_stage(parallel: ParallelConfig) -> list[int]:
    """The pipeline rank (for fairscale: the device) of every model stage, in stage order; chunks must be resolved."""
    if parallel.engine != "torch":
        return list(range(parallel.stages))
    return make_schedule(parallel.schedule, parallel.stages, parallel.chunks, parallel.interleave).rank_of


def split_stages(balance: str | list[int], num_stages: int, layers: list[str]) -> list[list[str]]:
    """Layer names of each model stage: every layer once, in order, no stage empty.

    `balance` is "uniform" (blocks spread evenly; where they do not divide, the middle stages take one more, since the
    first stage also has the embedding and the last one the head) or a list with one count for each model stage.
    A list that sums to the number of blocks counts blocks (the embedding joins the first stage, norm and head the
    last); one that sums to all layers is literal.

    Raises ValueError when there are more stages than blocks or the list does not fit.
    """
    blocks = [name for name in layers if name.startswith("block.")]
    if balance == "uniform":
        return _with_ends(_uniform(len(blocks), num_stages), layers, blocks)
    if isinstance(balance, str):
        raise ValueError(
            f"parallel.balance={balance} is not a cut yet; here it must be uniform, or a list of {num_stages} counts"
        )
    counts = list(balance)
    if len(counts) != num_stages:
        raise ValueError(
            f"parallel.balance={counts} has {count(len(counts), 'entry')}, but the layout has "
            f"{count(num_stages, 'model stage')}: give one count for each"
        )
    if any(not isinstance(count, int) or isinstance(count, bool) or count < 1 for count in counts):
        raise ValueError(f"parallel.balance={counts}: every model stage needs a whole number of at least 1")
    if sum(counts) == len(blocks):
        return _with_ends(counts, layers, blocks)
    if sum(counts) == len(layers):
        return _cut(counts, layers)
    raise ValueError(
        f"parallel.balance={counts} sums to {sum(counts)}: it must sum to {len(blocks)} (the blocks) "
        f"or to {len(layers)} (all layers: {', '.join(_abbreviated(layers))})"
    )


def split(parallel: ParallelConfig, layers: list[str]) -> list[list[str]]:
    """Layer names of each rank (of each device for fairscale), in stage order; see `split_stages`."""
    ranks = rank_of_stage(parallel)
    held: list[list[str]] = [[] for _ in range(max(ranks) + 1)]
    for rank, names in zip(ranks, split_stages(parallel.balance, len(ranks), layers), strict=True):
        held[rank] += names
    return held


def _uniform(num_blocks: int, num_stages: int) -> list[int]:
    if num_stages > num_blocks:
        raise ValueError(
            f"{num_stages} model stages cannot share {count(num_blocks, 'block')} without an empty one: "
            f"use at most {count(num_blocks, 'stage')}, or a deeper model"
        )
    each, extra = divmod(num_blocks, num_stages)
    counts = [each] * num_stages
    # the head is usually the dearest extra layer, the embedding the next: the last stage takes one more block last
    takers = [*range(1, num_stages - 1), 0, num_stages - 1]
    for stage in takers[:extra]:
        counts[stage] += 1
    return counts


def _with_ends(counts: list[int], layers: list[str], blocks: list[str]) -> list[list[str]]:
    counts = list(counts)
    counts[0] += layers.index(blocks[0])
    counts[-1] += len(layers) - 1 - layers.index(blocks[-1])
    return _cut(counts, layers)


def _cut(counts: list[int], layers: list[str]) -> list[list[str]]:
    stages, start = [], 0
    for size in counts:
        stages.append(layers[start : start + size])
        start += size
    assert start == len(layers)
    return stages


def _abbreviated(layers: list[str]) -> list[str]:
    return layers if len(layers) <= 6 else [*layers[:2], "…", *layers[-3:]]
