"""Cuts of layers into stages beside fairscale's, DeepSpeed's and uniform: slowest stage / the best possible.

    python benchmarks/balance/compare.py [--deepspeed deepspeed-0.19.8/deepspeed/runtime/utils.py]

DeepSpeed's own functions are read out of the file given (no installation, nothing of it is imported); without it that
column is left out. Writes results.json beside this file and prints the tables of README.md.
"""

from __future__ import annotations

import argparse
import ast
import json
import platform
import random
import signal
import statistics
import sys
import time
import warnings
from bisect import bisect_left
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from omegaconf import OmegaConf  # noqa: E402

from conf.schema import ModelConfig  # noqa: E402
from models.describe import describe, forward_flops  # noqa: E402
from pipeline.optimum import Problem, rank_costs, solve  # noqa: E402

SEED = 0
VOCABULARY = 128_000
LIMIT_S = 2.0  # a splitter that has not answered by then is stopped and counts as having no cut


def ours(costs: list[float], stages: int) -> list[int]:
    return solve(Problem(tuple(costs), tuple(range(stages)))).counts


def fairscale(costs: list[float], stages: int) -> list[int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fairscale.nn.pipe.balance import blockpartition  # behind its balance_by_time and balance_by_size
    return [len(part) for part in blockpartition.solve(costs, stages)]


def uniform(costs: list[float], stages: int) -> list[int]:
    each, extra = divmod(len(costs), stages)
    return [each + (stage < extra) for stage in range(stages)]


def deepspeed(path: Path):
    """partition_balanced of DeepSpeed's file, as a function that gives the layers of each stage."""
    wanted = ("partition_uniform", "partition_balanced")
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    space: dict = {}
    exec(compile(tree, str(path), "exec"), space)

    def cut(costs: list[float], stages: int) -> list[int]:
        parts = [int(part) for part in space["partition_balanced"](costs, stages)]
        return [end - first for first, end in zip(parts, parts[1:], strict=False)]

    return cut


class OutOfTime(Exception):
    pass


def in_time(splitter, costs: list[float], stages: int) -> list[int]:
    """The splitter's answer, or [] after LIMIT_S."""

    def stop(*_) -> None:
        raise OutOfTime

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        return splitter(costs, stages)
    except OutOfTime:
        return []
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def slowest(costs: list[float], counts: list[int], stages: int) -> float:
    """The slowest stage's cost; infinite where a layer is lost or a stage missing (an empty stage only idles)."""
    if len(counts) != stages or sum(counts) != len(costs) or min(counts) < 0:
        return float("inf")
    return max(rank_costs(Problem(tuple(costs), tuple(range(stages))), counts))


def best(costs: list[float], stages: int) -> float:
    """The least possible slowest stage, found another way than ours: among the sums of all runs of layers the smallest
    one under which filling stage after stage to the brim needs no more than `stages` of them."""
    n = len(costs)
    sums = sorted({sum(costs[i:j]) for i in range(n) for j in range(i + 1, n + 1)})
    return sums[bisect_left(sums, True, key=lambda limit: _fits(costs, stages, limit))]


def _fits(costs: list[float], stages: int, limit: float) -> bool:
    first = 0
    for _ in range(stages):
        end = first
        while end < len(costs) and sum(costs[first : end + 1]) <= limit:
            end += 1
        first = end
    return first == len(costs)


def random_cases() -> list[tuple[str, list[float], int]]:
    """500 vectors of five kinds; layers 4 to 64, stages 2 to 16."""
    rng = random.Random(SEED)
    draws = {
        "equal": lambda n: [1.0] * n,
        "uniform in 0..1": lambda n: [rng.random() for _ in range(n)],
        "heavy-tailed": lambda n: [rng.paretovariate(1.5) for _ in range(n)],
        "blocks and a large head": lambda n: [0.1, *[1.0] * (n - 3), 0.01, rng.uniform(0.5, 8)],
        "two kinds in turn": lambda n: [1.0 if i % 2 else rng.choice([1.0, 3.0]) for i in range(n)],
    }
    cases = []
    for kind, draw in draws.items():
        for _ in range(100):
            n = rng.randint(4, 64)
            cases.append((kind, draw(n), rng.randint(2, min(16, n))))
    return cases


def model_cases() -> list[tuple[str, list[float], int]]:
    """Forward FLOPs of each layer of this project's models with a vocabulary of 128,000."""
    cases = []
    for name in ("gpt_124m", "gpt_350m", "gpt_1b", "gpt_7b"):
        values = OmegaConf.load(HERE.parent.parent / "conf" / "model" / f"{name}.yaml")
        model = ModelConfig(**{**OmegaConf.to_container(values), "vocabulary": VOCABULARY})
        costs = [forward_flops(spec, model, 1024) / 1e9 for spec in describe(model)]
        cases += [(name, costs, stages) for stages in (2, 4, 8)]
    return cases


def run(cases, splitters) -> list[dict]:
    rows = []
    for kind, costs, stages in cases:
        least = best(costs, stages)
        row = {"kind": kind, "layers": len(costs), "stages": stages}
        for name, splitter in splitters.items():
            begin = time.perf_counter()
            counts = in_time(splitter, costs, stages)
            row[f"{name}_ms"] = 1e3 * (time.perf_counter() - begin)
            row[name] = slowest(costs, counts, stages) / least
        rows.append(row)
    return rows


def table(rows: list[dict], splitters: list[str]) -> str:
    """For each kind and splitter: median, largest ratio, and how often it is the optimum."""
    lines = ["| costs | n | " + " | ".join(splitters) + " |", "| --- | ---: |" + " --- |" * len(splitters)]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        cells = []
        for name in splitters:
            ratios = [row[name] for row in own if row[name] < float("inf")]
            optimal = sum(ratio <= 1 + 1e-9 for ratio in ratios)
            lost = f", {len(own) - len(ratios)} without a cut" if len(ratios) < len(own) else ""
            cells.append(f"{statistics.median(ratios):.2f}, {max(ratios):.2f}, {optimal}{lost}" if ratios else lost[2:])
        lines.append(f"| {kind} | {len(own)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deepspeed", type=Path, help="deepspeed/runtime/utils.py of an unpacked DeepSpeed")
    arguments = parser.parse_args()
    splitters = {"ours": ours, "fairscale": fairscale, "uniform": uniform}
    if arguments.deepspeed:
        splitters["deepspeed"] = deepspeed(arguments.deepspeed)
    fairscale([1.0, 1.0], 2)  # its import takes longer than any cut
    rows, models = run(random_cases(), splitters), run(model_cases(), splitters)
    names = list(splitters)
    print("median, largest, times optimal:\n")
    print(table(rows, names), "\n")
    print(table(models, names), "\n")
    print(f"{len(rows)} random vectors; median ms a cut:", end=" ")
    print(", ".join(f"{name} {statistics.median(row[f'{name}_ms'] for row in rows):.2f}" for name in names))
    versions = {"python": platform.python_version(), "fairscale": metadata.version("fairscale")}
    parts = [f'"seed": {SEED}', f'"versions": {json.dumps(versions)}']
    for key, own in (("random", rows), ("models", models)):  # null: no cut
        lines = ",\n".join(json.dumps({k: _short(v) for k, v in row.items() if not k.endswith("_ms")}) for row in own)
        parts.append(f'"{key}": [\n{lines}\n]')
    (HERE / "results.json").write_text("{\n" + ",\n".join(parts) + "\n}\n")


def _short(value):
    if not isinstance(value, float):
        return value
    return None if value == float("inf") else round(value, 4)


if __name__ == "__main__":
    main()
