"""One configuration's prediction: memory of each rank, the step and what it goes into, the run's hours and dollars.

Imports no torch. `predict` speaks result.json's names; `make_plan` is what plan.json holds.
"""

from __future__ import annotations

from math import ceil

from conf.schema import RootConfig, to_dict
from models.describe import LayerSpec, describe, model_flops_per_token, num_parameters
from pipeline.action import Action
from pipeline.schedule import make_schedule
from planning.memory import RUNTIME_BYTES
from planning.peak import peak_memory
from planning.stack import get_stack
from planning.step import Layout, Step, step_time

# What each figure rests on; stored in every plan.
SOURCES = {
    "mfu": "model FLOPs / peak: forward and twice that backward, attention's whole square counted, recomputation not "
    "(PaLM, arXiv 2204.02311, appendix B)",
    "step": "planning/layers.py, rates.py, links.py on pipeline/simulate.py's schedule; efficiencies of conf/hardware/",
    "activations": "models/describe.py, planning/activations.py; parts by arXiv 2205.05198, section 4",
    "sharding": "arXiv 1910.02054; whole gradients until the step's end in a pipeline",
}


def predict(config: RootConfig, stack: str = "torch") -> dict:
    """Figures under result.json's names, of a resolved configuration whose balance is uniform or a list.

    step_time_s, tokens_per_s, bubble_fraction, mfu; peak_memory_bytes (one a pipeline rank; like the measured ones
    without the bare process); cost_usd of train.steps, where the hardware has a price. ValueError: a figure is missing.
    """
    layout = Layout.of(config)
    return figures(config, step_time(config, get_stack(stack), explain=False), ranks_memory(config, layout))


def errors(predicted: dict, measured: dict) -> dict:
    """predicted / measured - 1 of every figure that both have; lists entry by entry. A measured 0 has no error."""
    result = {}
    for key, value in predicted.items():
        actual = measured.get(key)
        if isinstance(value, list) and isinstance(actual, list) and len(value) == len(actual):
            if all(_number(a) and a > 0 for a in actual):
                result[key] = [p / a - 1 for p, a in zip(value, actual, strict=True)]
        elif _number(value) and _number(actual) and actual > 0:
            result[key] = value / actual - 1
    return result


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def num_devices(config: RootConfig) -> int:
    """Devices that the run takes (on CPU: processes)."""
    parallel = config.parallel
    return parallel.stages * parallel.tensor * parallel.data


def figures(config: RootConfig, step: Step, memory: list[dict]) -> dict:
    """What `predict` returns."""
    hardware, train = config.hardware, config.train
    tokens_per_s = train.global_batch * train.sequence / step.total
    result = {
        "step_time_s": step.total,
        "tokens_per_s": tokens_per_s,
        "bubble_fraction": step.bubble_fraction,
        "peak_memory_bytes": [rank["total"] - RUNTIME_BYTES for rank in memory],
    }
    peak = getattr(hardware, f"peak_flops_{'bfloat16' if train.precision == 'bfloat16' else 'float32'}")
    if peak:
        cores = min(hardware.devices_per_node, max(num_devices(config), hardware.devices_per_node))
        used = cores if hardware.device == "cpu" else num_devices(config)
        result["mfu"] = model_flops_per_token(config.model, train.sequence) * tokens_per_s / (peak * used)
    if hardware.price_usd_per_hour is not None and hardware.devices_per_node:
        nodes = ceil(num_devices(config) / hardware.devices_per_node)
        hours = step.total * train.steps / 3600
        result["cost_usd"] = nodes * hours * hardware.price_usd_per_hour
    return result


def ranks_memory(config: RootConfig, layout: Layout) -> list[dict]:
    """planning.memory's bytes for each pipeline rank (where fairscale drives several accelerators, for each of them),
    counted from the schedule itself. Its tensor and data ranks hold the same."""
    parallel = config.parallel
    if parallel.engine != "torch":
        every = [layer for specs in layout.stages for layer in specs]
        on_one = parallel.engine == "single" or config.hardware.device == "cpu"  # one process has all
        return [
            peak_memory(config, {0: specs}, _one_stage(config), 0) for specs in ([every] if on_one else layout.stages)
        ]
    schedule = make_schedule(parallel.schedule, parallel.stages, parallel.chunks, parallel.interleave)
    own: list[dict[int, list[LayerSpec]]] = [{} for _ in schedule.actions]
    for stage, (specs, rank) in enumerate(zip(layout.stages, layout.rank_of, strict=True)):
        own[rank][stage] = specs
    last = len(layout.stages) - 1
    return [peak_memory(config, stages, row, last) for stages, row in zip(own, schedule.actions, strict=True)]


def _one_stage(config: RootConfig) -> list[Action]:
    """What a device does without the torch engine: single, each micro-batch in turn; fairscale, fill and drain."""
    m = config.parallel.chunks
    if config.parallel.engine == "single":
        return [Action(0, kind, index) for index in range(m) for kind in "FB"]
    return [Action(0, "F", index) for index in range(m)] + [Action(0, "B", index) for index in reversed(range(m))]


def needed_bytes(config: RootConfig, memory: list[dict]) -> int:
    """What has to fit: on accelerators the fullest rank into one, on processors all ranks together into the machine,
    those of every data and tensor rank too. memory: one a pipeline rank."""
    totals = [rank["total"] for rank in memory]
    return config.parallel.data * config.parallel.tensor * sum(totals) if one_memory(config) else max(totals)


def one_memory(config: RootConfig) -> bool:
    """Whether all ranks share the machine's memory: processors, unless they only emulate accelerators."""
    return config.hardware.device == "cpu" and not config.emulate.enabled


def make_plan(config: RootConfig, stack: str = "torch") -> dict:
    """Everything that plan.json says, of a resolved configuration whose balance is uniform or a list."""
    layout, train = Layout.of(config), config.train
    step = step_time(config, get_stack(stack))
    memory = ranks_memory(config, layout)
    names: list[list[str]] = [[] for _ in memory]
    for specs, rank in zip(layout.stages, layout.rank_of, strict=True):
        names[rank if len(names) > 1 else 0] += [spec.name for spec in specs]
    tokens = train.global_batch * train.sequence
    hours = step.total * train.steps / 3600
    return {
        "predicted": figures(config, step, memory),
        "step": dict(step.parts),
        "parameters": num_parameters(describe(config.model)),
        "devices": num_devices(config),
        "ranks": [{"layers": held} | parts for held, parts in zip(names, memory, strict=True)],
        "needed_bytes": needed_bytes(config, memory),
        "capacity_bytes": config.hardware.memory_bytes,
        "per_machine": one_memory(config),
        "tokens_per_step": tokens,
        "run": {"steps": train.steps, "tokens": train.steps * tokens, "hours": hours},
        "stack": stack,
        "sources": SOURCES,
        "config": to_dict(config),
    }
