"""hardware=auto on processors: what this machine reaches, measured once in child processes and cached. No torch here.

Of one core while all others do the same, since ranks share memory and clock: the bandwidth of an optimizer's step, and
the figures of planning/rates.py that predict the measured pieces best: products' efficiency and half size, the
bandwidth of element-wise kernels beside the optimizer's, exponentials, the start of a kernel; and, for layers like
those that were measured, what these figures leave (HardwareConfig.corrections). Besides, what threads lose, and what
two ranks cost each other: messages, the host's work around them, and by how much computing beside them is slower.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import statistics
from dataclasses import asdict, replace
from pathlib import Path

from conf.check import check_corrections
from conf.device import num_cores
from conf.resolve import hardware_file
from conf.schema import (
    DataConfig,
    HardwareConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RootConfig,
    TrainConfig,
)
from models.describe import describe
from planning.children import LARGE_BYTES, ask
from planning.layers import forward_flops, layer_cost, layer_ops
from planning.links import Group, links
from planning.rates import rates
from planning.stack import get_stack
from planning.step import Layout, run_flush, stage_times

CACHE = Path(__file__).parent.parent / ".cache" / "calibration.json"
# hidden, heads, batch, sequence, vocabulary, from a toy's kernels, which are all overhead, to a small model's; blocks
# in a row: a stage's, since small ones find less in the caches the more of them there are
SHAPES = [
    (16, 2, 1, 8, 32, 4),
    (128, 4, 4, 128, 256, 4),
    (128, 4, 8, 128, 256, 4),
    (256, 8, 2, 256, 4096, 2),
    (768, 12, 1, 128, 8192, 2),
]
THREADED = 2  # of SHAPES: what several threads are tried on
PIPELINED = 1  # of SHAPES: what two ranks run as a pipeline, so many blocks each
CHUNKS = 8
TRIED_S = 1e-3  # an action's overhead, to see what it makes of a flush
MOST_OVERHEAD_S, MOST_SLOWDOWN = 0.004, 0.12  # more than this is other work on the machine
FITTED = {  # figure: least, most
    "matmul_efficiency": (0.02, 6.0),  # the peak in the file is a rough one
    "matmul_half_size": (1.0, 300.0),
    "memory_efficiency": (0.02, 50.0),  # of small tensors, which stay in the caches
    "kernel_latency_s": (1e-7, 1e-3),
    "exponentials_per_s": (1e8, 1e9),
}
KINDS = ("block", "head")  # of layers that are measured
SHARED = ("tensor_block_s", "sharded_block_s", "replicated_block_s", "reduced_block_s")
PAIR = ("link_bytes_per_s", "link_efficiency", "link_latency_s", "action_overhead_s", "rank_slowdown", *SHARED)
MAY_BE_ZERO = ("link_latency_s", "action_overhead_s", "rank_slowdown", *SHARED)
DIRECT = ("memory_bytes_per_s", "thread_efficiency")  # measured as they are


def calibrated(config: RootConfig) -> RootConfig:
    """The resolved configuration with this machine's own figures, where hardware=auto is a processor; else as it is.

    Measures at the first call, which takes 10 to 15 s and says so; where a child fails, the defaults stay, and
    so does each figure that was typed: one that differs from hardware=auto's own.
    """
    hardware = config.hardware
    if hardware.device != "cpu" or not hardware.name.startswith("auto") or config.train.precision != "float32":
        return config
    default = replace(HardwareConfig(**hardware_file("cpu")), devices_per_node=num_cores())
    figures = _cached()
    if figures is None:
        print("measuring what this machine reaches, once: 10 to 15 s", flush=True)
        figures = _found(default)
        if figures is None:
            print("measuring failed: the rough figures of conf/hardware/cpu.yaml are taken", flush=True)
            return config
        _store(figures)
    # what was typed stands
    figures = {key: value for key, value in figures.items() if getattr(hardware, key) == getattr(default, key)}
    sources = hardware.sources | dict.fromkeys(figures, "measured on this machine (planning/calibrate.py)")
    return replace(config, hardware=replace(hardware, **figures, sources=sources))


def _found(default: HardwareConfig) -> dict | None:
    """All figures of this machine; None where a child failed or measured what cannot be. default: what hardware=auto
    starts from, whatever was typed over it: the figures are kept for runs of which nothing is."""
    measured = _measure(default.devices_per_node)
    if measured is None:
        return None
    try:
        figures = {key: measured[key] for key in DIRECT}
        figures |= fit(measured["pieces"], replace(default, **figures))
        figures["corrections"] = corrections(measured["pieces"], replace(default, **figures))
        if "pair" in measured:
            figures |= between_ranks(measured["pair"], replace(default, **figures))
        return _checked(figures)
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        return None


def _checked(figures: dict) -> dict:
    """The same as numbers. ValueError, KeyError or TypeError where one is missing or cannot be."""
    pair = PAIR if PAIR[0] in figures else ()  # one core has no second rank
    found = {key: float(figures[key]) for key in (*DIRECT, *FITTED, *pair)}
    for key, value in found.items():
        if not 0 <= value < math.inf or (value == 0 and key not in MAY_BE_ZERO):
            raise ValueError(f"{key}={value} cannot be")
    points = {kind: [[float(f), float(r)] for f, r in figures["corrections"][kind]] for kind in KINDS}
    check_corrections(points)
    return found | {"corrections": points}


def fit(seconds: list[dict], hardware: HardwareConfig) -> dict[str, float]:
    """The figures under which the planner predicts the measured pieces best (squared logarithms), by coordinate search.

    seconds: planning.probe's answer for SHAPES.
    """
    theta = {key: math.log(getattr(hardware, key)) for key in FITTED}
    configs = [_config(shape, hardware) for shape in SHAPES]

    def loss(values: dict[str, float]) -> float:
        total = 0.001 * sum((values[key] - math.log(getattr(hardware, key))) ** 2 for key in FITTED)
        figures = {key: math.exp(value) for key, value in values.items()}
        for config, measured in zip(configs, seconds, strict=True):
            predicted = pieces(config, replace(hardware, **figures))
            total += sum(math.log(predicted[key] / measured[key]) ** 2 for key in measured)
        return total

    best, step = loss(theta), 0.7
    while step > 0.003:
        moved = False
        for key, (least, most) in FITTED.items():
            for direction in (step, -step):
                tried = theta | {key: min(math.log(most), max(math.log(least), theta[key] + direction))}
                if (value := loss(tried)) < best - 1e-9:
                    theta, best, moved = tried, value, True
                    break
        step = step if moved else step / 2
    return {key: float(f"{math.exp(value):.4g}") for key, value in theta.items()}


def corrections(seconds: list[dict], hardware: HardwareConfig) -> dict[str, list[list[float]]]:
    """HardwareConfig.corrections: what the fitted figures leave of each measured piece, by its FLOPs.

    hardware: with the fitted figures. seconds: as for `fit`.
    """
    stack, found = get_stack("torch"), {kind: [] for kind in KINDS}
    for shape, measured in zip(SHAPES, seconds, strict=True):
        config = _config(shape, hardware)
        predicted = pieces(config, hardware)
        for spec in describe(config.model)[config.model.blocks :]:
            if spec.kind in found:
                flops = forward_flops(layer_ops(spec, config, stack))
                found[spec.kind].append([flops, round(measured[spec.kind] / predicted[spec.kind], 4)])
    return {kind: sorted(points) for kind, points in found.items()}


def between_ranks(pair: dict[str, float], hardware: HardwareConfig) -> dict[str, float]:
    """PAIR, of which a link's are as reached. pair: planning.probe_ranks' answer; hardware: calibrated else."""
    latency_s = pair["small_s"] / 2  # two messages one after the other: planning/links.py
    figures = {
        "link_bytes_per_s": LARGE_BYTES / 2 / max(1e-9, pair["large_s"] / 2 - latency_s),
        "link_efficiency": 1.0,
        "link_latency_s": latency_s,
        # each way two sums of tensor ranks; full sharding gathers twice and scatters once, a message each
        "tensor_block_s": pair["tensor_s"] - pair["block_s"] - 4 * pair["small_s"],
        "sharded_block_s": pair["sharded_s"] - pair["block_s"] - 3 * latency_s,
        "replicated_block_s": pair["replicated_s"] - pair["block_s"],
        "reduced_block_s": pair["reduced_s"] - pair["replicated_s"] - pair["small_s"],
    }
    hardware = replace(hardware, **figures, devices_per_node=2)
    # of a toy's flush nearly all is overhead; what it leaves of a real one goes with the computing
    none, some = (_flush_s(SHAPES[0], replace(hardware, action_overhead_s=tried)) for tried in (0.0, TRIED_S))
    overhead = min(MOST_OVERHEAD_S, max(0.0, (pair["small_flush_s"] - none) / (some - none) * TRIED_S))
    figures["action_overhead_s"] = overhead
    hardware = replace(hardware, action_overhead_s=overhead)
    none, some = (_flush_s(SHAPES[PIPELINED], replace(hardware, rank_slowdown=tried)) for tried in (0.0, 0.1))
    figures["rank_slowdown"] = min(MOST_SLOWDOWN, (pair["shape_flush_s"] - none) / (some - none) * 0.1)
    return {key: float(f"{max(0.0, value):.4g}") for key, value in figures.items()}


def _flush_s(shape: tuple[int, ...], hardware: HardwareConfig) -> float:
    """Planned seconds of probe_ranks' flush."""
    one = _config(shape, hardware)
    parallel = ParallelConfig(
        name="probe", engine="torch", schedule="1f1b", stages=2, chunks=CHUNKS, interleave=1,
        balance=[one.model.blocks + 1, one.model.blocks + 2],
    )  # fmt: skip
    train = replace(one.train, global_batch=one.train.global_batch * CHUNKS)
    model, stack = replace(one.model, blocks=2 * one.model.blocks), get_stack("torch")
    config = replace(one, model=model, parallel=parallel, train=train)
    device = rates(hardware, "float32", ranks_here=2)
    times = stage_times(config, Layout.of(config), stack, device, links(hardware, parallel))
    return run_flush(parallel, times).makespan


def pieces(config: RootConfig, hardware: HardwareConfig) -> dict[str, float]:
    """Predicted seconds of forward and backward of a block, and of norm and head with the loss, on one core."""
    device, stack = rates(replace(hardware, devices_per_node=1), "float32"), get_stack("torch")
    result = {"block": 0.0, "head": 0.0}
    for spec in describe(config.model)[config.model.blocks :]:  # one block, norm, head
        cost = layer_cost(spec, config, stack, device, Group())
        total = cost.forward.total + cost.backward_input.total + cost.backward_weight.total
        result["block" if spec.kind == "block" else "head"] += total
    return result


def _config(shape: tuple[int, ...], hardware: HardwareConfig) -> RootConfig:
    hidden, heads, batch, sequence, vocabulary, blocks = shape
    return RootConfig(
        model=ModelConfig(
            name="probe", family="gpt", blocks=blocks, hidden=hidden, heads=heads, feedforward=4 * hidden,
            positions=sequence, vocabulary=vocabulary, tied=False,
        ),
        parallel=ParallelConfig(name="probe", engine="single", stages=1, chunks=1, interleave=1),
        optimizer=OptimizerConfig(name="adamw"),
        hardware=hardware,
        data=DataConfig(name="none", source="synthetic"),
        train=TrainConfig(steps=1, global_batch=batch, sequence=sequence, precision="float32"),
    )  # fmt: skip


def _measure(cores: int) -> dict | None:
    """What planning.probe's children answer, the median of them; None where one failed."""
    shapes = []
    for shape in SHAPES:
        config = _config(shape, HardwareConfig(name="probe", device="cpu"))
        shapes.append(
            {"model": asdict(config.model), "batch": config.train.global_batch, "sequence": config.train.sequence}
        )
    answers = ask(shapes, cores, threaded=THREADED, pipelined=PIPELINED, chunks=CHUNKS)
    if answers is None:
        return None
    pieces = [
        {key: statistics.median(answer["pieces"][index][key] for answer in answers) for key in KINDS}
        for index in range(len(SHAPES))
    ]
    bandwidth = statistics.median(answer["bytes_per_s"] for answer in answers)
    efficiency = min(1.0, max(1 / cores, answers[0].get("thread_efficiency", 1.0)))
    measured = {"pieces": pieces, "memory_bytes_per_s": bandwidth, "thread_efficiency": efficiency}
    return measured | ({"pair": answers[0]["pair"]} if "pair" in answers[0] else {})


def _key() -> list[str]:
    """What the figures depend on."""
    return [_processor(), importlib.metadata.version("torch"), str(SHAPES), str(num_cores())]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _cached() -> dict | None:
    try:
        stored = json.loads(CACHE.read_text())
        if stored["key"] != _key():
            return None
        return _checked(stored["figures"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # never measured, or a file that is not ours


def _store(figures: dict) -> None:
    try:
        CACHE.parent.mkdir(parents=True, exist_ok=True)
        partial = CACHE.with_name(f"{CACHE.name}.{os.getpid()}.tmp")
        partial.write_text(json.dumps({"key": _key(), "figures": figures}, indent=1) + "\n")
        os.replace(partial, CACHE)
    except OSError:
        pass  # a read-only checkout measures each time
