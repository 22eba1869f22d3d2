"""Branch and bound for cuts with several model stages a rank (interleaved, V-shaped). Imports no torch.

The search decides whether a cut exists in which no rank costs more than a limit; bisection between a bound and the
best cut found narrows the limit until it is proven, or the nodes are spent. n layers, S model stages, s one of them.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate

from pipeline.optimum import Cut, NothingFits, Problem, bounds, rank_bytes, rank_costs, solve

KINDS = 6  # of layers that the counting bound looks at
REMEMBERED = 24  # failed states with which a new one is compared, of each (stage, layer)


class OutOfNodes(Exception):
    """The search was neither won nor lost in the nodes that it was given."""


class Search:
    """Depth-first search, stage by stage, for a cut in which no rank is over any of its limits.

    A rank has one load for each resource: its cost, and its bytes at each of its moments. Loads only grow from stage
    to stage, so that a state (stage, first layer, loads) fails when one fails that is nowhere fuller.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        self.nodes = 0  # still to spend
        self.n, self.S = len(problem.costs), len(problem.rank_of)
        self.ends = [[_ends(problem.scaled_costs)] for _ in range(self.S)]  # [stage][resource] -> sums from layer 0
        if problem.counts_memory:
            for stage, moments in enumerate(problem.stage_held):
                self.ends[stage] += [_ends(problem.stage_bytes(stage, moment)) for moment in range(len(moments))]
        last: dict[int, int] = {rank: stage for stage, rank in enumerate(problem.rank_of)}
        # ranks that still take a layer in stage s or later
        self.open_ranks = [sorted(rank for rank in last if last[rank] >= stage) for stage in range(self.S + 1)]
        # what the stages from s on need of each rank at the least: none may be empty
        self.needed: list[dict[int, int]] = [dict.fromkeys(last, 0)]
        for stage in reversed(range(self.S)):
            choice = problem.scaled_costs[stage : self.n - self.S + stage + 1]  # one of these is in it
            needed = dict(self.needed[0])
            needed[problem.rank_of[stage]] += choice[-1] if stage == self.S - 1 else min(choice)
            self.needed.insert(0, needed)
        inner = problem.scaled_costs[:-1]
        common = sorted(set(inner), key=lambda cost: (-inner.count(cost) * cost, cost))[:KINDS]
        self.kinds = [(cost, _ends([other >= cost for other in inner])) for cost in common if cost > 0]

    def find(self, cost_limit: int | None, byte_limit: int | None, nodes: int) -> list[int] | None:
        """Layers of each stage, or None when there is proof that no cut does it. Raises OutOfNodes."""
        problem, self.nodes = self.problem, nodes
        # None: a limit that nothing reaches
        cost_limit = sum(problem.scaled_costs) if cost_limit is None else cost_limit
        resources = [len(self.ends[problem.rank_of.index(rank)]) for rank in range(problem.num_ranks)]
        if byte_limit is None:
            byte_limit = problem.rank_bytes + sum(self.ends[s][k][-1] for s in range(self.S) for k in _memory(self, s))
        self.limits = [[cost_limit] + [byte_limit - problem.rank_bytes] * (count - 1) for count in resources]
        self.free = [list(limits) for limits in self.limits]
        self.failed: dict[tuple[int, int], list[tuple]] = {}
        counts: list[int] = []
        return counts if self._place(0, 0, counts) else None

    def possible(self, stage: int, first: int) -> bool:
        """Bounds that hold for every way to place the layers from `first` on in the stages from `stage` on."""
        problem, ranks = self.problem, self.open_ranks[stage]
        room = {rank: self.free[rank][0] for rank in ranks}
        cost = self.ends[stage][0]
        if cost[-1] - cost[first] > sum(room.values()):
            return False
        if any(room[rank] < self.needed[stage][rank] for rank in ranks):
            return False
        # the last layer is in the last stage; of the others, a rank takes whole ones
        room[problem.rank_of[-1]] -= problem.scaled_costs[-1]
        for cost_of_kind, number in self.kinds:
            if number[-1] - number[min(first, self.n - 1)] > sum(free // cost_of_kind for free in room.values()):
                return False
        return True

    def _place(self, stage: int, first: int, counts: list[int]) -> bool:
        if self.nodes == 0:
            raise OutOfNodes
        self.nodes -= 1
        free = self.free[self.problem.rank_of[stage]]
        if stage == self.S - 1:
            good = all(e[-1] - e[first] <= left for e, left in zip(self.ends[stage], free, strict=True))
            if good:
                counts.append(self.n - first)
            return good
        if not self.possible(stage, first):
            return False
        state = tuple(-left for rank in self.open_ranks[stage] for left in self.free[rank])
        known = self.failed.setdefault((stage, first), [])
        if any(all(a <= b for a, b in zip(old, state, strict=True)) for old in known):
            return False
        for end in self._ends_to_try(stage, first, free):
            taken = [e[end] - e[first] for e in self.ends[stage]]
            for k, amount in enumerate(taken):
                free[k] -= amount
            counts.append(end - first)
            if self._place(stage + 1, end, counts):
                return True
            counts.pop()
            for k, amount in enumerate(taken):
                free[k] += amount
        known.append(state)
        if len(known) > REMEMBERED:
            del known[0]
        return False

    def _ends_to_try(self, stage: int, first: int, free: list[int]) -> list[int]:
        """Ends of a stage that begins at `first`, those that leave an even share to the later stages first."""
        latest = self.n - (self.S - stage - 1)
        for e, left in zip(self.ends[stage], free, strict=True):
            latest = min(latest, bisect_right(e, e[first] + left) - 1)
        cost = self.ends[stage][0]
        share = cost[first] + (cost[-1] - cost[first]) / (self.S - stage)
        return sorted(range(first + 1, latest + 1), key=lambda end: (abs(cost[end] - share), end))


def solve_placed(problem: Problem, max_nodes: int) -> Cut:
    """As `optimum.solve`, for any placement: the best cut found, and the bound that is proven."""
    search = Search(problem)
    best = _start(problem)
    cap = problem.cap_bytes
    if cap is not None and max(rank_bytes(problem, best)) > cap:
        best = _fitting(problem, search, max_nodes)
    best = _improve(problem, best, _slowest)
    lower = _root_bound(search)
    best, lower = _narrow(search, lambda limit: (limit, cap), _slowest, best, lower, max_nodes)
    value = _slowest(problem, best)
    best = more_even(problem, best)
    slowest = max(rank_costs(problem, best))
    return Cut(best, slowest if lower >= value else lower / problem.scale * (1 - 1e-12))


def more_even(problem: Problem, counts: list[int], slack: float = 0.0) -> list[int]:
    """A cut whose stages are more even, its slowest rank within 1 + slack of this cut's (a local search).

    Stages of even size wait less for each other, which the costs of ranks do not tell.
    """
    limit = int(_slowest(problem, counts) * (1 + slack))

    def measure(problem: Problem, tried: list[int]) -> tuple[int, int]:
        return max(_slowest(problem, tried), limit), _squares(problem, tried)

    best = _improve(problem, counts, measure)
    even = _start(problem)
    if problem.cap_bytes is None or _fullest(problem, even) <= problem.cap_bytes:
        best = min(best, _improve(problem, even, measure), key=lambda tried: measure(problem, tried))
    return best


def least_memory_placed(problem: Problem, max_nodes: int) -> tuple[list[int], int]:
    """As `optimum.least_memory`, for any placement; the bound is below the bytes found when the nodes ran out."""
    search = Search(problem)
    free = replace(problem, cap_bytes=None)
    best = _improve(free, _start(free), _fullest)
    # whatever the placement, some rank holds its share of what must be held at least once
    lower = problem.rank_bytes + max(sum(problem.fixed_bytes) // problem.num_ranks, max(problem.fixed_bytes))
    best, lower = _narrow(search, lambda limit: (None, limit), _fullest, best, lower, max_nodes)
    return _improve(replace(problem, cap_bytes=_fullest(free, best)), best, _slowest), lower


def _narrow(search: Search, limits, measure, best: list[int], lower: int, max_nodes: int) -> tuple[list[int], int]:
    """Bisection between the bound and the best cut: both, as far as `max_nodes` go.

    limits(target): the limits of `Search.find` under which measure <= target. Half of what is left goes to one target;
    where that is too little, a looser one is tried, which may still bring a better cut.
    """
    value, left, undecided = measure(search.problem, best), max_nodes, -1
    target = lower  # often enough there is a cut that reaches the bound
    while lower < value and left > 1 and target < value:
        given = left // 2
        try:
            found = search.find(*limits(target), given)
        except OutOfNodes:
            undecided = target
        else:
            if found is None:
                lower = target + 1
            else:
                best, value = found, measure(search.problem, found)
        left -= given - search.nodes
        target = (max(lower, undecided + 1) + value) // 2
    return best, min(lower, value)


def _fitting(problem: Problem, search: Search, max_nodes: int) -> list[int]:
    """Some cut under the cap; raises NothingFits."""
    proven = True
    try:
        found = search.find(None, problem.cap_bytes, max_nodes)
    except OutOfNodes:
        found, proven = None, False
    if found is not None:
        return found
    counts, lower = least_memory_placed(problem, max_nodes)
    least = rank_bytes(problem, counts)
    if max(least) <= problem.cap_bytes:
        return counts
    raise NothingFits(counts, least, problem.cap_bytes, proven=proven or lower > problem.cap_bytes)


def _start(problem: Problem) -> list[int]:
    """The best cut when each stage were a rank of its own: stages of even size."""
    return solve(Problem(problem.costs, tuple(range(len(problem.rank_of))))).counts


def _slowest(problem: Problem, counts: list[int]) -> int:
    """The slowest rank's cost, as an integer (Problem.scale)."""
    totals, ends = [0] * problem.num_ranks, bounds(counts)
    for stage, rank in enumerate(problem.rank_of):
        totals[rank] += sum(problem.scaled_costs[ends[stage] : ends[stage + 1]])
    return max(totals)


def _fullest(problem: Problem, counts: list[int]) -> int:
    return max(rank_bytes(problem, counts))


def _squares(problem: Problem, counts: list[int]) -> int:
    ends = bounds(counts)
    return sum(sum(problem.scaled_costs[i:j]) ** 2 for i, j in zip(ends, ends[1:], strict=False))


def _improve(problem: Problem, counts: list[int], measure) -> list[int]:
    """Moves one layer over one boundary for as long as `measure(problem, counts)` falls and the cap is kept."""
    counts, value = list(counts), measure(problem, counts)
    while True:
        for source, target in _neighbours(len(counts)):
            if counts[source] == 1:
                continue
            tried = list(counts)
            tried[source] -= 1
            tried[target] += 1
            if problem.cap_bytes is not None and max(rank_bytes(problem, tried)) > problem.cap_bytes:
                continue
            if (new := measure(problem, tried)) < value:
                counts, value = tried, new
                break
        else:
            return counts


def _neighbours(stages: int) -> list[tuple[int, int]]:
    pairs = [(stage, stage + 1) for stage in range(stages - 1)]
    return pairs + [(target, source) for source, target in pairs]


def _root_bound(search: Search) -> int:
    """The least cost limit that passes the bounds before anything is placed."""
    low, high = 0, sum(search.problem.scaled_costs)
    while low < high:
        middle = (low + high) // 2
        search.free = [[middle] for _ in range(search.problem.num_ranks)]
        if search.possible(0, 0):
            high = middle
        else:
            low = middle + 1
    return low


def _ends(values: list[int]) -> list[int]:
    return [0, *accumulate(values)]


def _memory(search: Search, stage: int) -> range:
    return range(1, len(search.ends[stage]))
