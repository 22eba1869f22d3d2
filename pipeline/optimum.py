"""The best cut of a list of layers into model stages, exact, under a cap on each rank's memory. Imports no torch.

A cut is written as the number of layers of each model stage. One stage a rank: dynamic programming over all cuts, exact
(Pinar and Aykanat, "Fast optimal load balancing algorithms for 1D partitioning", J. Parallel and Distributed Computing
64, 2004, section 4.1). Several stages a rank (interleaved, V-shaped): pipeline/branch.py. n layers, S model stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from conf.words import count

MAX_NODES = 50_000  # of branch and bound, a second or two; nodes and not seconds, so that every machine cuts alike
SCALE = 2**40  # the dearest layer as an integer: costs are compared as integers, exact to 1e-12 of it


class NothingFits(ValueError):
    """No cut keeps every rank under the cap. `counts`: one that needs the least; `bytes`: of each of its ranks."""

    def __init__(self, counts: list[int], rank_bytes: list[float], cap: float, *, proven: bool):
        self.counts, self.bytes, self.cap, self.proven = counts, rank_bytes, cap, proven
        self.rank = int(np.argmax(rank_bytes))
        super().__init__(f"rank {self.rank} needs {max(rank_bytes):.0f} bytes of {cap:.0f} at the least")


@dataclass(frozen=True)
class Problem:
    """What is to be cut, and where the pieces go. Costs in any unit; one entry a layer where not said otherwise.

    A rank's bytes: rank_bytes + fixed_bytes of its layers + the worst moment's held micro-batches x held_bytes.
    """

    costs: tuple[float, ...]  # of one micro-batch: F + I + W
    rank_of: tuple[int, ...]  # of each model stage
    fixed_bytes: tuple[int, ...] = ()  # weights, gradients, optimizer state; () = memory is not counted
    held_bytes: tuple[int, ...] = ()  # kept of each micro-batch between its F and its backward
    # of each rank: the moments that can be the worst; of each, the micro-batches held of each of the rank's stages
    held: tuple[tuple[tuple[int, ...], ...], ...] = ()
    rank_bytes: int = 0  # what every rank has beside, whatever its layers
    cap_bytes: int | None = None  # on each rank; None = no cap

    def __post_init__(self) -> None:
        assert all(0 <= cost < float("inf") for cost in self.costs), self.costs
        assert len(self.fixed_bytes) == len(self.held_bytes) and len(self.fixed_bytes) in (0, len(self.costs))
        assert self.cap_bytes is None or self.counts_memory, "a cap needs bytes"
        if len(self.rank_of) > len(self.costs):
            raise ValueError(
                f"{len(self.rank_of)} model stages cannot share {count(len(self.costs), 'layer')} without an empty "
                f"one: use at most {count(len(self.costs), 'stage')}, or a deeper model"
            )

    @property
    def counts_memory(self) -> bool:
        return bool(self.fixed_bytes)

    @property
    def num_ranks(self) -> int:
        return max(self.rank_of) + 1

    @property
    def one_a_rank(self) -> bool:
        return len(set(self.rank_of)) == len(self.rank_of)

    @cached_property
    def scale(self) -> float:
        """What costs are multiplied by to become integers: 1 where they are integers."""
        if all(float(cost).is_integer() for cost in self.costs):
            return 1.0
        return SCALE / max(self.costs)

    @cached_property
    def scaled_costs(self) -> list[int]:
        return [round(cost * self.scale) for cost in self.costs]

    @cached_property
    def stage_held(self) -> list[list[int]]:
        """For each model stage the micro-batches held of it at each of its rank's moments."""
        order: dict[int, int] = {}
        columns = []
        for rank in self.rank_of:
            index = order[rank] = order.get(rank, -1) + 1
            columns.append([moment[index] for moment in self.held[rank]])
        return columns

    def stage_bytes(self, stage: int, moment: int) -> list[int]:
        """Bytes of each layer when it is in `stage`, at one of its rank's moments."""
        held = self.stage_held[stage][moment]
        return [fixed + held * kept for fixed, kept in zip(self.fixed_bytes, self.held_bytes, strict=True)]


@dataclass(frozen=True)
class Cut:
    """Layers of each model stage, and what no cut can be better than."""

    counts: list[int]
    lower_bound: float  # on the slowest rank's cost; equal to it when the cut is proven best


def bounds(counts: list[int]) -> list[int]:
    """First layer of each stage, and the end."""
    return [0, *accumulate(counts)]


def rank_costs(problem: Problem, counts: list[int]) -> list[float]:
    """Cost of each rank under this cut."""
    totals = [0.0] * problem.num_ranks
    ends = bounds(counts)
    for stage, rank in enumerate(problem.rank_of):
        totals[rank] += sum(problem.costs[ends[stage] : ends[stage + 1]])
    return totals


def rank_bytes(problem: Problem, counts: list[int]) -> list[int]:
    """Bytes of each rank under this cut, at its worst moment."""
    ends = bounds(counts)
    totals = [[problem.rank_bytes] * len(moments) for moments in problem.held]
    for stage, rank in enumerate(problem.rank_of):
        for moment in range(len(totals[rank])):
            totals[rank][moment] += sum(problem.stage_bytes(stage, moment)[ends[stage] : ends[stage + 1]])
    return [max(moments) for moments in totals]


def solve(problem: Problem, *, max_nodes: int = MAX_NODES) -> Cut:
    """The cut whose slowest rank is fastest, and among those (one stage a rank) the most even one.

    Raises NothingFits when no cut keeps every rank under the cap; ValueError for more stages than layers.
    """
    if not problem.one_a_rank:
        from pipeline.branch import solve_placed

        return solve_placed(problem, max_nodes)
    n, S = len(problem.costs), len(problem.rank_of)
    costs = [_intervals(problem.scaled_costs)] * S
    allowed = [np.full((n + 1, n + 1), True)] * S
    if problem.cap_bytes is not None:
        memory = _memory_intervals(problem)
        allowed = [held <= problem.cap_bytes for held in memory]
    value = _smallest_maximum(costs, allowed)
    if value is None:
        counts = least_memory(problem)[0]
        raise NothingFits(counts, rank_bytes(problem, counts), problem.cap_bytes, proven=True)
    counts = _most_even(costs, [fits & (costs[0] <= value) for fits in allowed])
    return Cut(counts, max(rank_costs(problem, counts)))


def least_memory(problem: Problem, *, max_nodes: int = MAX_NODES) -> tuple[list[int], int]:
    """The cut whose fullest rank holds least (among those the fastest), and a lower bound on that rank's bytes.

    The cap is left out of account.
    """
    if not problem.one_a_rank:
        from pipeline.branch import least_memory_placed

        return least_memory_placed(problem, max_nodes)
    n, S = len(problem.costs), len(problem.rank_of)
    memory = _memory_intervals(problem)
    value = _smallest_maximum(memory, [np.full((n + 1, n + 1), True)] * S)
    costs = [_intervals(problem.scaled_costs)] * S
    fits = [held <= value for held in memory]
    slowest = _smallest_maximum(costs, fits)
    return _most_even(costs, [held & (costs[0] <= slowest) for held in fits]), value


def _intervals(values: list[int]) -> np.ndarray:
    """[n+1, n+1] int64: at (i, j) the sum of values[i:j]; negative or 0 for j <= i, which no stage may take."""
    ends = np.concatenate([[0], np.cumsum(np.array(values, dtype=np.int64))])
    return ends[None, :] - ends[:, None]


def _memory_intervals(problem: Problem) -> list[np.ndarray]:
    """For each stage, at (i, j) the bytes of its rank when the stage is layers i to j."""
    return [
        problem.rank_bytes + np.max([_intervals(problem.stage_bytes(s, k)) for k in range(len(moments))], axis=0)
        for s, moments in enumerate(problem.stage_held)
    ]


def _smallest_maximum(stages: list[np.ndarray], allowed: list[np.ndarray]) -> int | None:
    """The least possible value of the largest stage; None when nothing is allowed.

    best[j] after stage k: the least maximum over cuts of the first j layers into k + 1 stages, none empty.
    """
    size = len(stages[0])
    never = np.iinfo(np.int64).max
    forward = np.triu(np.ones((size, size), dtype=bool), 1)  # i < j
    best = np.full(size, never)
    best[0] = -1
    for values, fits in zip(stages, allowed, strict=True):
        table = np.where(forward & fits, np.maximum(best[:, None], values), never)
        best = table.min(axis=0)
    return None if best[-1] == never else int(best[-1])


def _most_even(stages: list[np.ndarray], allowed: list[np.ndarray]) -> list[int]:
    """Of the allowed cuts one with the least sum of squared stage costs, as layers of each stage."""
    size = len(stages[0])
    forward = np.triu(np.ones((size, size), dtype=bool), 1)
    best = np.full(size, np.inf)
    best[0] = 0.0
    choices = []
    for values, fits in zip(stages, allowed, strict=True):
        table = np.where(forward & fits, best[:, None] + values.astype(float) ** 2, np.inf)
        choices.append(table.argmin(axis=0))
        best = table.min(axis=0)
    assert np.isfinite(best[-1])
    counts, end = [], size - 1
    for choice in reversed(choices):
        counts.append(end - int(choice[end]))
        end -= counts[-1]
    return counts[::-1]
