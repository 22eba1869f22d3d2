"""The best cut against brute force over every cut, with and without a cap on memory; every layer exactly once."""

from __future__ import annotations

import random
from itertools import combinations, product

import pytest

from pipeline.optimum import NothingFits, Problem, least_memory, rank_bytes, rank_costs, solve

PLACEMENTS = {
    "one": lambda p, v: list(range(p)),
    "looped": lambda p, v: list(range(p)) * v,
    "v": lambda p, v: [*range(p), *reversed(range(p))],
}


def every_cut(layers: int, stages: int):
    for cuts in combinations(range(1, layers), stages - 1):
        ends = [0, *cuts, layers]
        yield [b - a for a, b in zip(ends, ends[1:], strict=False)]


def loads(problem: Problem, counts: list[int]) -> tuple[float, int]:
    """The slowest rank's cost and the fullest rank's bytes, written out anew."""
    cost = [0.0] * problem.num_ranks
    memory = [[problem.rank_bytes] * len(moments) for moments in problem.held]
    layer, met = 0, [0] * problem.num_ranks
    for rank, count in zip(problem.rank_of, counts, strict=True):
        for i in range(layer, layer + count):
            cost[rank] += problem.costs[i]
            for k, moment in enumerate(problem.held[rank]):
                memory[rank][k] += problem.fixed_bytes[i] + moment[met[rank]] * problem.held_bytes[i]
        layer += count
        met[rank] += 1
    return max(cost), max(max(moments) for moments in memory)


def random_problem(rng: random.Random, placement: str, capped: bool) -> Problem:
    p = rng.randint(1, 5 if placement == "one" else 3)
    v = {"one": 1, "v": 2}.get(placement) or rng.randint(2, 3)
    n = rng.randint(p * v, p * v + 5)
    draw = rng.choice([rng.random, lambda: rng.randint(0, 6), lambda: rng.choice([1.0, 1.0, 1.0, 0.1, 3.7])])
    moments = 1 if placement == "one" else rng.randint(1, 3)
    held = [[tuple(rng.randint(0, 4) for _ in range(v)) for _ in range(moments)] for _ in range(p)]
    return Problem(
        costs=tuple(draw() for _ in range(n)),
        rank_of=tuple(PLACEMENTS[placement](p, v)),
        fixed_bytes=tuple(rng.randint(0, 20) for _ in range(n)),
        held_bytes=tuple(rng.randint(0, 5) for _ in range(n)),
        held=tuple(tuple(moments) for moments in held),
        rank_bytes=rng.randint(0, 5),
        cap_bytes=rng.randint(15, 120) if capped else None,
    )


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize(("placement", "cases"), [("one", 800), ("looped", 400), ("v", 400)])
def test_as_good_as_the_best_of_all_cuts(placement, cases, capped):
    rng = random.Random(f"{placement} {capped}")
    refused = 0
    for _ in range(cases):
        problem = random_problem(rng, placement, capped)
        cuts = [loads(problem, counts) for counts in every_cut(len(problem.costs), len(problem.rank_of))]
        fitting = [cost for cost, held in cuts if not capped or held <= problem.cap_bytes]
        least = min(held for _, held in cuts)
        if not fitting:
            with pytest.raises(NothingFits) as refusal:
                solve(problem)
            assert max(refusal.value.bytes) == least and refusal.value.proven
            refused += 1
            continue
        cut = solve(problem)
        cost, held = loads(problem, cut.counts)
        assert cost == pytest.approx(min(fitting), rel=1e-12, abs=1e-12), problem
        assert cut.lower_bound == pytest.approx(cost, rel=1e-12, abs=1e-12)  # closed
        assert not capped or held <= problem.cap_bytes
        counts, bound = least_memory(problem)
        assert loads(problem, counts)[1] == least == bound
        assert rank_costs(problem, cut.counts)  # and our own sums agree with the ones above
        assert max(rank_bytes(problem, cut.counts)) == held
    assert not capped or cases // 50 < refused < cases // 2  # both endings were met


def test_one_stage_a_rank_takes_the_most_even_of_the_best_cuts():
    assert solve(Problem((1,) * 10, (0, 1, 2))).counts in ([4, 3, 3], [3, 4, 3], [3, 3, 4])
    assert sorted(solve(Problem((1,) * 15, tuple(range(8)))).counts) == [1, 2, 2, 2, 2, 2, 2, 2]
    # the head of 9 decides: the others are still shared out evenly
    assert solve(Problem((1,) * 6 + (9,), (0, 1, 2))).counts == [3, 3, 1]


@pytest.mark.parametrize("seed", range(40))
def test_where_the_nodes_run_out_the_bound_still_holds(seed):
    rng = random.Random(seed)
    problem = Problem(tuple(rng.random() for _ in range(11)), (0, 1, 2) * 2)
    best = min(max(rank_costs(problem, counts)) for counts in every_cut(11, 6))
    for nodes in (1, 5, 20, 100):
        cut = solve(problem, max_nodes=nodes)
        assert cut.lower_bound <= best * (1 + 1e-12) and best <= max(rank_costs(problem, cut.counts)) * (1 + 1e-12)


def test_each_layer_exactly_once():
    shapes = [(30, 4), (10, 3), (15, 8), (42, 16), (8, 8), (99, 8), (131, 64), (7, 1)]
    for (layers, ranks), v in product(shapes, (1, 2, 3, 4, 12)):
        if ranks * v > layers:
            continue
        for head in (0.0, 0.3, 1.0, 3.2, 40.0):
            costs = (0.1, *[1.0] * (layers - 2), head)
            for rank_of in {tuple(range(ranks)) * v, tuple([*range(ranks), *reversed(range(ranks))] * (v // 2))} - {()}:
                problem = Problem(costs, rank_of)
                cut = solve(problem, max_nodes=2_000)
                assert len(cut.counts) == len(rank_of) and min(cut.counts) >= 1 and sum(cut.counts) == layers
                slowest = max(rank_costs(problem, cut.counts))
                assert slowest == pytest.approx(cut.lower_bound)  # closed, also where branch and bound is needed


def test_more_stages_than_layers():
    with pytest.raises(ValueError, match="5 model stages cannot share 4 layers.*at most 4"):
        Problem((1.0,) * 4, tuple(range(5)))
