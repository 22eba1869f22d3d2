"""Imbalance found in a real run: the slowest rank, by how much, the list that evens it out, and what that gains."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import replace

import numpy as np

from conf.device import num_cores
from conf.schema import RootConfig
from models.describe import describe
from pipeline.optimum import bounds
from pipeline.partition import rank_of_stage
from pipeline.placement import ranks_of_stage, ranks_text
from pipeline.schedule import make_schedule
from pipeline.simulate import simulate
from pipeline.spans import Timing
from planning.balance import predicted_times, resolved_balance
from training.ranks import Ranks

WARM_UP = 2  # steps that are not looked at
WINDOW = 50  # the last steps count
TRUST = 0.03  # of predicted ratios between kinds of layers, against what was measured: breaks ties between them
WORTH_SAYING = 0.01  # of a step


class Watch:
    """Adds up the executed actions of each step by model stage."""

    def __init__(self, config: RootConfig, ranks: Ranks):
        self.config, self.ranks = config, ranks
        parallel = config.parallel
        self.looks = parallel.engine == "torch" and parallel.stages > 1
        self.seen = 0  # steps of this process, which may have resumed a run
        # of each step, for every model stage (0 for those of other ranks): seconds of its forwards, and of the rest
        self.steps: deque[tuple[list[float], list[float]]] = deque(maxlen=WINDOW)

    def after_step(self, timings: list[Timing]) -> None:
        """Takes what was executed in a step."""
        self.seen += 1
        if not self.looks or self.seen <= WARM_UP:
            return
        stages = len(rank_of_stage(self.config.parallel))
        forward, backward = [0.0] * stages, [0.0] * stages
        for timing in timings:
            seconds = forward if timing.action.kind == "F" else backward
            seconds[timing.action.stage] += timing.end_s - timing.start_s
        self.steps.append((forward, backward))

    def report(self) -> dict | None:
        """What was found, on rank 0; all ranks call it. None: one stage, or a run too short to tell."""
        if not self.looks:
            return None
        stages = len(rank_of_stage(self.config.parallel))
        micro_batches = self.config.train.accumulate * self.config.parallel.chunks
        own = [0.0] * (2 * stages)
        if self.steps:
            columns = zip(*(forward + backward for forward, backward in self.steps), strict=True)
            own = [statistics.median(column) / micro_batches for column in columns]
        whole = self.ranks.sum(own)
        replicas = self.config.parallel.data * self.config.parallel.tensor  # the mean over them
        whole = [value / replicas for value in whole]
        if self.ranks.rank != 0 or min(whole) <= 0:
            return None
        return imbalance(self.config, whole[:stages], whole[stages:])


def imbalance(config: RootConfig, forward_s: list[float], backward_s: list[float]) -> dict:
    """The finding, from seconds of F, and of B or I + W, of each model stage for one micro-batch.

    config: resolved, its balance the list that was run. Keys: `slowest_rank`, `over_mean` (its seconds / the mean over
    ranks - 1), `rank_s` (a micro-batch), `balance` (the best list by these times), `expected_gain` (part of a flush
    that it would save, simulated), `note`. Ranks are pipeline ranks; with data or tensor ranks `ranks` lists those of
    the slowest.
    """
    ranks = rank_of_stage(config.parallel)
    rank_s = [0.0] * (max(ranks) + 1)
    for rank, seconds in zip(ranks, map(sum, zip(forward_s, backward_s, strict=True)), strict=True):
        rank_s[rank] += seconds
    slowest = max(rank_s)
    forward = layer_seconds(config, forward_s)
    backward = layer_seconds(config, backward_s)
    times = [f + b for f, b in zip(forward, backward, strict=True)]
    asked = replace(config, parallel=replace(config.parallel, balance="time"))
    best = resolved_balance(asked, times)[1]
    now, then = (_flush(config, forward, backward, balance) for balance in (config.parallel.balance, best.balance))
    gain = 1 - then / now
    found = {
        "slowest_rank": rank_s.index(slowest),
        "over_mean": slowest / (sum(rank_s) / len(rank_s)) - 1,
        "rank_s": rank_s,
        "balance": best.balance if gain > 0 else list(config.parallel.balance),
        "expected_gain": max(0.0, gain),
    }
    ranks_there = ranks_of_stage(found["slowest_rank"], config.parallel)
    if len(ranks_there) > 1:
        found["ranks"] = ranks_there
    if config.hardware.device == "cpu" and len(rank_s) > num_cores():
        found["note"] = "more ranks than cores: times include waiting for a core"
    return found


def layer_seconds(config: RootConfig, stage_s: list[float]) -> list[float]:
    """Seconds of each layer, from those of each model stage: least squares over the kinds of layers.

    Layers of one kind take the same time, so a few stages tell a few kinds apart; where they do not (norm and head are
    always together), the predicted ratios decide, which enter as weak equations of their own.
    """
    specs = describe(config.model)
    predicted = predicted_times(config, specs)
    kinds = sorted({spec.kind for spec in specs})
    column = {kind: index for index, kind in enumerate(kinds)}
    scale = sum(stage_s) / sum(predicted)
    prior = np.array([scale * predicted[[spec.kind for spec in specs].index(kind)] for kind in kinds])
    ends = bounds(config.parallel.balance)
    rows = np.zeros((len(stage_s), len(kinds)))
    for stage, (first, end) in enumerate(zip(ends, ends[1:], strict=False)):
        for spec in specs[first:end]:
            rows[stage, column[spec.kind]] += 1
    # unknowns: a kind's seconds / predicted; each stage's equation relative to what was measured
    equations = rows * prior / np.array(stage_s)[:, None]
    left = np.vstack([equations, TRUST * np.eye(len(kinds))])
    right = np.concatenate([np.ones(len(stage_s)), TRUST * np.ones(len(kinds))])
    factors = np.linalg.lstsq(left, right, rcond=None)[0]
    seconds = np.maximum(factors, 0.0) * prior
    return [float(seconds[column[spec.kind]]) for spec in specs]


def _flush(config: RootConfig, forward: list[float], backward: list[float], balance: list[int]) -> float:
    """Simulated seconds of a flush with this cut."""
    parallel = config.parallel
    ends = bounds(balance)
    stages = [
        [sum(layers[first:end]) for first, end in zip(ends, ends[1:], strict=False)] for layers in (forward, backward)
    ]
    schedule = make_schedule(parallel.schedule, parallel.stages, parallel.chunks, parallel.interleave)
    return simulate(schedule, forward=stages[0], backward=stages[1]).makespan


def sentence(found: dict) -> str:
    """The finding for the console."""
    slowest = f"rank {found['slowest_rank']}"
    if "ranks" in found:
        slowest = f"pipeline {slowest} ({ranks_text(found['ranks'])})"
    text = (
        f"balance: {slowest} is slowest, {1e3 * max(found['rank_s']):.1f} ms a micro-batch, "
        f"{found['over_mean']:.1%} over the mean of the ranks"
    )
    if found["expected_gain"] < WORTH_SAYING:
        text += "; no other cut is expected to be faster by 1% of a step"
    else:
        balance = str(found["balance"]).replace(" ", "")
        text += f"; parallel.balance={balance} is expected to take {found['expected_gain']:.1%} off a step"
    return text + (f" ({found['note']})" if "note" in found else "")
