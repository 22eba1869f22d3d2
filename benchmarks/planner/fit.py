"""Fits the planner's efficiencies and latencies to measured step times; reports errors on rows it was not fitted on.

    python benchmarks/planner/fit.py TABLE.csv=STACK [TABLE.csv=STACK ...]

A table has planning/points.py's columns; STACK is one of planning/stack.py. Eight numbers are shared by all tables
(SHARED), three belong to a stack (OF_STACK); each has bounds and a prior (its usual value, and a factor of about one
standard deviation), since small samples fit badly without. Fitted by damped least squares on log(predicted / measured),
outliers held down by a Cauchy weight. Splits: a third of the rows of each (table, tensor size), five times at random,
fitted; the errors are those on the other two thirds. Last, a fit on all rows: the values that conf/hardware/ ships.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # run from anywhere

from conf.resolve import hardware_file
from conf.schema import HardwareConfig
from planning import step
from planning.points import Point, rank_correlation, read_point, read_table
from planning.stack import get_stack

# name: prior, least, most, one standard deviation as a factor
SHARED = {
    "matmul_efficiency": (0.85, 0.65, 0.9, 1.08),
    "matmul_half_size": (60.0, 5.0, 300.0, 1.7),
    "memory_efficiency": (0.8, 0.5, 0.95, 1.15),
    "kernel_latency_s": (5e-6, 2e-6, 2e-5, 1.6),
    "link_efficiency": (0.75, 0.5, 0.95, 1.2),
    "link_latency_s": (8e-6, 2e-6, 3e-5, 1.6),
    "network_efficiency": (0.7, 0.35, 0.95, 1.25),
    "network_latency_s": (2e-5, 5e-6, 1e-4, 1.6),
}
OF_STACK = {
    "elementwise": (1.3, 1.0, 3.0, 1.3),
    "action_overhead_s": (1e-3, 1e-5, 2e-2, 3.0),
    "exposed_reduction": (0.7, 0.05, 1.0, 1.4),
}
NOISE = 0.03  # of one measurement, one standard deviation
SPLITS = 5
ITERATIONS = 12


@dataclass
class Row:
    """A measured layout, its schedule linearised: makespan = sum of slopes x durations, exact for equal ratios, since
    a makespan is a sum of durations along the longest path."""

    table: str
    point: Point
    layout: step.Layout
    slopes: np.ndarray | None = None


class Model:
    """Predicted times of all rows as a function of the vector of parameters (natural logarithms)."""

    def __init__(self, rows: list[Row]):
        self.rows = rows
        stacks = sorted({row.point.stack.name for row in rows})
        self.names = list(SHARED) + [f"{stack}.{key}" for stack in stacks for key in OF_STACK]
        table = [(SHARED | OF_STACK)[name.split(".")[-1]] for name in self.names]
        self.prior, self.least, self.most, self.spread = (np.log([row[i] for row in table]) for i in range(4))

    def settings(self, row: Row, theta: np.ndarray) -> tuple:
        values = dict(zip(self.names, np.exp(theta).tolist(), strict=True))
        hardware = replace(row.point.config.hardware, **{key: values[key] for key in SHARED})
        stack = row.point.stack
        stack = replace(stack, **{key: values[f"{stack.name}.{key}"] for key in OF_STACK})
        config = replace(row.point.config, hardware=hardware)
        device = step.rates(hardware, config.train.precision)
        paths = step.links(hardware, config.parallel)
        return config, stack, device, paths, step.stage_times(config, row.layout, stack, device, paths)

    def linearise(self, theta: np.ndarray) -> None:
        for row in self.rows:
            config, *_, times = self.settings(row, theta)
            row.slopes = _slopes(config, times)

    def seconds(self, row: Row, theta: np.ndarray) -> float:
        config, stack, device, paths, times = self.settings(row, theta)
        flush = float(row.slopes @ _durations(times))
        return flush + sum(step.after_flushes(config, row.layout, stack, device, paths).values())

    def exact_seconds(self, row: Row, theta: np.ndarray) -> float:
        """By the simulator, as plan.py does."""
        config, stack, *_ = self.settings(row, theta)
        return step.step_time(config, stack, explain=False).total

    def log_errors(self, theta: np.ndarray, rows: list[Row]) -> np.ndarray:
        return np.array([np.log(self.seconds(row, theta) / row.point.measured_s) for row in rows])

    def fit(self, rows: list[Row], theta: np.ndarray | None = None) -> np.ndarray:
        """Levenberg-Marquardt with priors, held within the bounds."""
        theta = self.prior.copy() if theta is None else theta.copy()
        damping, loss, residuals = 1e-2, *self._loss(theta, rows)
        for _ in range(ITERATIONS):
            jacobian = np.empty((len(rows), len(theta)))
            for k in range(len(theta)):
                moved = theta.copy()
                moved[k] += 1e-4
                jacobian[:, k] = (self.log_errors(moved, rows) - residuals) / 1e-4
            weight = 1 / (NOISE**2 + residuals**2 / 4)  # Cauchy: beyond two NOISE a row counts less and less
            gradient = jacobian.T @ (weight * residuals) + (theta - self.prior) / self.spread**2
            curvature = (jacobian * weight[:, None]).T @ jacobian + np.diag(1 / self.spread**2)
            for _ in range(6):
                shift = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -gradient)
                candidate = np.clip(theta + shift, self.least, self.most)
                new_loss, new_residuals = self._loss(candidate, rows)
                if new_loss < loss:
                    break
                damping *= 5
            else:
                return theta
            done = loss - new_loss < 1e-4 * loss
            theta, loss, residuals, damping = candidate, new_loss, new_residuals, max(1e-4, damping / 5)
            if done:
                break
        return theta

    def _loss(self, theta: np.ndarray, rows: list[Row]) -> tuple[float, np.ndarray]:
        residuals = self.log_errors(theta, rows)
        prior = np.sum(((theta - self.prior) / self.spread) ** 2)
        return float(4 * np.sum(np.log1p(residuals**2 / (4 * NOISE**2))) + prior), residuals


def _durations(times: step.StageTimes) -> np.ndarray:
    """Of the first stage, one in the middle and the last: F and B; then the transfer."""
    forward = times.forward
    backward = [i + w for i, w in zip(times.backward_input, times.backward_weight, strict=True)]
    middle = len(forward) // 2
    picked = [series[k] for series in (forward, backward) for k in (0, middle, -1)]
    return np.array([*picked, times.transfer_s, times.latency_s])


def _slopes(config, times: step.StageTimes) -> np.ndarray:
    base = _durations(times)
    n = len(times.forward)

    def makespan(values: np.ndarray) -> float:
        forward, backward = ([v[0]] + [v[1]] * (n - 2) + [v[2]] for v in (values[:3], values[3:6]))
        if n == 1:
            forward, backward = [values[1]], [values[4]]
        flush = step.flush(config.parallel, forward, backward, [0.0] * n, transfer_s=values[6], latency_s=values[7])
        return flush.makespan

    start, slopes = makespan(base), np.zeros(len(base))
    for k in range(len(base)):
        if n == 1 and k not in (1, 4):
            continue
        moved = base.copy()
        moved[k] += 1e-6 * start
        slopes[k] = (makespan(moved) - start) / (1e-6 * start)
    return slopes


def load(arguments: list[str]) -> list[Row]:
    prior = {key: values[0] for key, values in SHARED.items()}

    @cache
    def hardware_of(name: str) -> HardwareConfig:
        return HardwareConfig(**(hardware_file(name) | prior))

    rows = []
    for argument in arguments:
        path, _, stack = argument.partition("=")
        for cells in read_table(path):
            point = read_point(cells, get_stack(stack), hardware_of)
            rows.append(Row(table_name(cells), point, step.Layout.of(point.config)))
    return rows


def table_name(cells: dict[str, str]) -> str:
    return cells.get("source") or "table"


def split(rows: list[Row], seed: int) -> tuple[list[Row], list[Row]]:
    """A third of the rows of each (table, tensor size), at least one, at random; and the others."""
    random = np.random.default_rng(seed)
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault((row.table, row.point.config.parallel.tensor), []).append(row)
    fitted, others = [], []
    for group in groups.values():
        order = random.permutation(len(group))
        third = round(len(group) / 3 + random.uniform(-0.5, 0.5)) if len(group) < 3 else round(len(group) / 3)
        for i, k in enumerate(order):
            (fitted if i < third else others).append(group[k])
    return fitted, others


def report(predicted: list[float], rows: list[Row]) -> dict[str, tuple[float, float, float]]:
    """Median and mean absolute error, and the signed mean, by table."""
    errors: dict[str, list[float]] = {}
    for row, seconds in zip(rows, predicted, strict=True):
        errors.setdefault(row.table, []).append(seconds / row.point.measured_s - 1)
    return {
        name: (statistics.median(map(abs, values)), statistics.mean(map(abs, values)), statistics.mean(values))
        for name, values in errors.items()
    }


def main(arguments: list[str]) -> int:
    rows = load(arguments)
    model = Model(rows)
    model.linearise(model.prior)
    tables: dict[str, list[tuple[float, float, float]]] = {}
    correlations = []
    for seed in range(SPLITS):
        fitted, others = split(rows, seed)
        predicted = [model.exact_seconds(row, theta) for theta in [model.fit(fitted)] for row in others]
        for name, figures in report(predicted, others).items():
            tables.setdefault(name, []).append(figures)
        correlations.append(rank_correlation(predicted, [row.point.measured_s for row in others]))
    print(f"rows that were not fitted, mean of {SPLITS} splits: median and mean absolute error, signed mean")
    for name, figures in tables.items():
        print(f"  {name:32s}" + "  ".join(f"{statistics.mean(column):7.1%}" for column in zip(*figures, strict=True)))
    print(f"  rank correlation {statistics.mean(correlations):.4f} ({', '.join(f'{c:.4f}' for c in correlations)})")
    theta = model.fit(rows)
    print("fitted on all rows")
    for name, value in zip(model.names, np.exp(theta), strict=True):
        print(f"  {name:36s} {value:.3g}")
    predicted = [model.exact_seconds(row, theta) for row in rows]
    for name, figures in report(predicted, rows).items():
        print(f"  {name:32s}" + "  ".join(f"{value:7.1%}" for value in figures))
    print(f"  rank correlation {rank_correlation(predicted, [row.point.measured_s for row in rows]):.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
