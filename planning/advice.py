"""What a plan should warn of, each with what it costs. Imports no torch."""

from __future__ import annotations

from copy import deepcopy

from conf.check import check
from conf.schema import RootConfig
from planning.remedies import changed
from planning.report import duration
from planning.stack import get_stack
from planning.step import Step, step_time

SMALL = 0.005  # a part of the step below which nobody needs a warning


def warnings(config: RootConfig, asked: str | list[int], step: Step, stack: str) -> list[str]:
    """Each with its cost in seconds and part of a step. asked: parallel.balance before it was resolved."""
    found = [_few_chunks(config, asked, step, stack), _padding(config, step, stack), _tensor_across_nodes(config, step)]
    found += [_imbalance(step), _uneven_rounds(config, asked, step, stack)]
    others = [warning for warning in check(config, here=False) if not warning.startswith("parallel.chunks=")]
    return [warning for warning in found if warning] + others


def _cost(seconds: float, step: Step) -> str:
    return f"costs {duration(seconds)} of a step, {seconds / step.total:.1%}"


def _with_chunks(config: RootConfig, asked: str | list[int], stack: str, chunks: int) -> float | None:
    """Seconds of the step with other chunks of the same size: the global batch follows, the time is scaled back."""
    batch = config.train.global_batch * chunks / config.parallel.chunks
    tried = changed(config, asked, {"parallel.chunks": chunks, "train.global_batch": round(batch)})
    if tried is None:
        return None
    return (
        step_time(tried, get_stack(stack), explain=False).total * config.train.global_batch / tried.train.global_batch
    )


def _few_chunks(config: RootConfig, asked: str | list[int], step: Step, stack: str) -> str | None:
    p, m = config.parallel.stages, config.parallel.chunks
    if p == 1 or m >= 4 * p:
        return None
    usual = _with_chunks(config, asked, stack, 4 * p)
    cost = f": {_cost(step.total - usual, step)}, against {4 * p} chunks of the same size" if usual else ""
    return f"parallel.chunks={m} is less than 4 x parallel.stages={p}{cost}"


def _uneven_rounds(config: RootConfig, asked: str | list[int], step: Step, stack: str) -> str | None:
    parallel = config.parallel
    p, m = parallel.stages, parallel.chunks
    if parallel.schedule != "interleaved_1f1b" or m % p == 0 or m < p:
        return None
    even = _with_chunks(config, asked, stack, m // p * p)
    if even is None or step.total - even < SMALL * step.total:
        return None
    return f"parallel.chunks={m} is no multiple of parallel.stages={p}: {_cost(step.total - even, step)}"


def _padding(config: RootConfig, step: Step, stack: str) -> str | None:
    """Rows that only pad: their product with the head, and their memory. Told from a head without them."""
    model = config.model
    parts = 128 * config.parallel.tensor
    if model.vocabulary % parts == 0 or config.hardware.device == "cpu" or model.vocabulary < parts:
        return None
    tried = deepcopy(config)
    tried.model.vocabulary = -(-model.vocabulary // parts) * parts
    more = step_time(tried, get_stack(stack), explain=False).total - step.total
    return (
        f"model.vocabulary={model.vocabulary} is no multiple of 128 x parallel.tensor={config.parallel.tensor}, which "
        f"matrix units like; model.vocabulary_multiple={parts} pads it to {tried.model.vocabulary} rows, whose own "
        f"arithmetic {_cost(max(0.0, more), step)}"
    )


def _tensor_across_nodes(config: RootConfig, step: Step) -> str | None:
    tensor, node = config.parallel.tensor, config.hardware.devices_per_node
    if config.hardware.device == "cpu" or not node or tensor <= node:
        return None
    seconds = step.parts["tensor_parallel"]
    return f"parallel.tensor={tensor} crosses nodes of {node} devices: its messages {_cost(seconds, step)}"


def _imbalance(step: Step) -> str | None:
    seconds = step.parts.get("bubble_imbalance", 0.0)
    if seconds < 2 * SMALL * step.total:
        return None
    return f"the stages are not equally busy: {_cost(seconds, step)}; fewer or more stages may divide the layers better"
