"""The cheapest ways to make a layout fit that does not, each with its predicted effect. Imports no torch."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace

from conf.check import check
from conf.schema import ParallelConfig, RootConfig
from models.describe import describe
from planning.balance import resolved_balance
from planning.memory import states
from planning.predict import needed_bytes, num_devices, one_memory, ranks_memory
from planning.report import gib
from planning.stack import get_stack
from planning.step import Layout, step_time

MOST_DEVICES = 4096  # of a layout that is proposed
NODE = 8  # devices, where the hardware file does not say
_BATCH = "train.global_batch"
FOLLOW = (_BATCH, "parallel.chunks")  # left open they would follow what else is changed: typed in any case


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


def remedies(config: RootConfig, asked: str | list[int], stack: str, capacity: float) -> list[Remedy]:
    """Changes under which every rank fits, with the same global batch; fewest devices, then fastest, first.

    Single changes; pairs, where no single one is enough with the same devices; where those are not enough either, the
    smallest larger layouts: more tensor ranks (up to a node), stages or data ranks that share the states, with and
    without recomputation. config: resolved; asked: its parallel.balance before that; capacity: bytes, of a device, or
    of the machine on processors.
    """
    singles = _changes(config)
    found = _fitting(config, asked, stack, capacity, singles)
    if all(remedy.devices > 1 for remedy in found):
        singles = [change for change in singles if "parallel.stages" not in change]
        pairs = [a | b for i, a in enumerate(singles) for b in singles[i + 1 :] if not set(a) & set(b) - {_BATCH}]
        found += _fitting(config, asked, stack, capacity, pairs)
    return sorted(found or _larger(config, asked, stack, capacity), key=lambda r: (r.devices, r.step_time_s))


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


def _fitting(
    config: RootConfig, asked: str | list[int], stack: str, capacity: float, changes: list[dict]
) -> list[Remedy]:
    found = []
    for change in changes:
        tried = changed(config, asked, change)
        if tried is None:
            continue
        needed = needed_bytes(tried, ranks_memory(tried, Layout.of(tried)))
        if needed > capacity:
            continue
        try:
            seconds = step_time(tried, get_stack(stack), explain=False).total
        except ValueError:  # it needs a link of which the hardware file has no figure
            continue
        typed = {key: value for key, value in change.items() if value != _value(config, key) or key in FOLLOW}
        text = " ".join(f"{key}={_typed(value)}" for key, value in typed.items())
        found.append(Remedy(text, needed, seconds, num_devices(tried) / num_devices(config)))
    return found


def _value(config: RootConfig, key: str) -> object:
    group, name = key.split(".")
    return getattr(getattr(config, group), name)


def _typed(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")


def _changes(config: RootConfig) -> list[dict]:
    """What could make a run fit, all with the same global batch."""
    parallel = config.parallel
    batch = {_BATCH: config.train.global_batch}
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
        kept = {"parallel.chunks": parallel.chunks} | batch
        changes += [{"parallel.stages": stages} | kept for stages in sorted({p + 1, 2 * p, 4 * p})]
        if one_memory(config) and parallel.data > 1:
            changes.append({"parallel.data": 1, "parallel.chunks": parallel.chunks * parallel.data} | batch)
    return changes


def _larger(config: RootConfig, asked: str | list[int], stack: str, capacity: float) -> list[Remedy]:
    """All layouts that fit on the smallest multiple of the devices on which any does. On processors, where ranks share
    one memory, only recomputation."""
    here = num_devices(config)
    saving = {"parallel.checkpoint": "always"} if config.parallel.checkpoint == "never" else {}
    if one_memory(config) or config.parallel.engine == "fairscale":
        return _fitting(config, asked, stack, capacity, [change | saving for change in _changes(config)])
    held = states(replace(config, parallel=ParallelConfig(name="all", tensor=1, data=1)), describe(config.model))
    times = 2
    while here * times <= max(MOST_DEVICES, 2 * here):
        if sum(held.values()) / (here * times) < capacity:  # evenly shared: no layout holds less of them
            changes = [
                kept | layout for layout in _layouts(config, times) for kept in (({}, saving) if saving else ({},))
            ]
            if found := _fitting(config, asked, stack, capacity, changes):
                return found
        times *= 2
    return []


def _layouts(config: RootConfig, times: int) -> list[dict]:
    """`times` times the devices, a power of two, shared among tensor ranks, stages and data ranks in every way."""
    parallel, layouts = config.parallel, []
    node = int(config.hardware.devices_per_node or NODE)
    powers = [2**k for k in range(times.bit_length())]
    for tensor, data in ((t, d) for t in powers for d in powers if t * d <= times):
        if tensor * parallel.tensor > max(node, parallel.tensor) or parallel.chunks % data:
            continue
        change: dict = {"parallel.engine": "torch", "parallel.stages": parallel.stages * (times // tensor // data)}
        change |= {"parallel.chunks": parallel.chunks // data, _BATCH: config.train.global_batch}
        if tensor * parallel.tensor > 1:
            change |= {"parallel.tensor": tensor * parallel.tensor, "parallel.sequence_parallel": True}
        if data * parallel.data > 1:
            change |= {"parallel.data": data * parallel.data, "parallel.shard": "optimizer"}
        layouts.append(change)
        if data * parallel.data > 1:
            layouts.append(change | {"parallel.shard": "full"})
    return layouts
