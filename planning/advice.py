"""What a plan should warn of, each with what it costs, and the cheapest ways to make a layout fit. Imports no torch."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

from conf.check import check
from conf.schema import RootConfig
from planning.balance import resolved_balance
from planning.predict import needed_bytes, ranks_memory
from planning.report import duration, gib
from planning.stack import get_stack
from planning.step import Layout, Step, step_time

SMALL = 0.005  # a part of the step below which nobody needs a warning


@dataclass(frozen=True)
class Remedy:
    """A change under which the run fits, and what it does."""

    overrides: str  # as one types it
    needed_bytes: int  # planning.predict.needed_bytes
    step_time_s: float
    devices: float  # times as many

    def describe(self, step_time_s: float) -> str:
        more = f", {self.devices:.3g} x the devices" if self.devices > 1 else ""
        return f"{self.overrides} ({gib(self.needed_bytes)}, step {self.step_time_s / step_time_s - 1:+.1%}{more})"


def warnings(config: RootConfig, asked: str | list[int], step: Step, stack: str) -> list[str]:
    """Each with its cost in seconds and part of a step. asked: parallel.balance before it was resolved."""
    found = [_few_chunks(config, asked, step, stack), _padding(config, step, stack), _tensor_across_nodes(config, step)]
    found += [_imbalance(step), _uneven_rounds(config, asked, step, stack)]
    others = [warning for warning in check(config, here=False) if not warning.startswith("parallel.chunks=")]
    return [warning for warning in found if warning] + others


def remedies(config: RootConfig, asked: str | list[int], stack: str, capacity: float) -> list[Remedy]:
    """Single changes, and pairs where none is enough with the same devices, under which every rank fits; fewest
    devices, then fastest, first. config: resolved; asked: its parallel.balance before that."""
    singles = _changes(config)
    found = _fitting(config, asked, stack, capacity, singles)
    if all(remedy.devices > 1 for remedy in found):
        singles = [change for change in singles if "parallel.stages" not in change]
        pairs = [a | b for i, a in enumerate(singles) for b in singles[i + 1 :] if not set(a) & set(b)]
        found += _fitting(config, asked, stack, capacity, pairs)
    return sorted(found, key=lambda remedy: (remedy.devices, remedy.step_time_s))


def _fitting(
    config: RootConfig, asked: str | list[int], stack: str, capacity: float, changes: list[dict]
) -> list[Remedy]:
    found = []
    for change in changes:
        tried = changed(config, asked, change)
        if tried is None:
            continue
        needed = needed_bytes(tried, ranks_memory(tried, Layout.of(tried)))
        if needed <= capacity:
            seconds = step_time(tried, get_stack(stack), explain=False).total
            text = " ".join(f"{key}={_typed(value)}" for key, value in change.items())
            devices = tried.parallel.stages / config.parallel.stages
            found.append(Remedy(text, needed, seconds, devices))
    return found


def _typed(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")


def _changes(config: RootConfig) -> list[dict]:
    """What could make a run fit, all with the same global batch."""
    parallel = config.parallel
    batch = {"train.global_batch": config.train.global_batch}  # left open it would follow the chunks
    changes: list[dict] = [{"parallel.chunks": factor * parallel.chunks} | batch for factor in (2, 4)]
    if parallel.checkpoint == "never":
        changes.append({"parallel.checkpoint": "always"})
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        changes.append({"parallel.sequence_parallel": True})
    if parallel.data > 1 and parallel.shard == "none":
        changes.append({"parallel.shard": "optimizer"})
    if parallel.data > 1 and parallel.shard != "full":
        changes.append({"parallel.shard": "full"})
    if parallel.schedule in ("gpipe", "looped_bfs", "zb_h2"):
        changes.append({"parallel.schedule": "1f1b", "parallel.interleave": 1})
    if parallel.engine == "torch":
        changes.append({"parallel.balance": "memory"})
        p = parallel.stages
        kept = {"parallel.chunks": parallel.chunks} | batch  # left open they would follow the stages
        changes += [{"parallel.stages": stages} | kept for stages in sorted({p + 1, 2 * p, 4 * p})]
    return changes


def changed(config: RootConfig, asked: str | list[int], change: dict) -> RootConfig | None:
    """The configuration with other values, cut anew as was asked; None where that cannot be."""
    tried = deepcopy(config)
    counted = not isinstance(asked, str) and {"parallel.stages", "parallel.interleave"} & set(change)
    tried.parallel.balance = "auto" if counted else asked  # a list is for its own number of stages
    for key, value in change.items():
        group, name = key.split(".")
        setattr(getattr(tried, group), name, value)
    try:
        check(tried, here=False)
        return resolved_balance(tried)[0]
    except ValueError:
        return None


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
