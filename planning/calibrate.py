"""hardware=auto on processors: what this machine reaches, measured once in a child process and cached. No torch here.

Of one core while all others do the same, since ranks share memory and clock: the bandwidth of an optimizer's step, and
the figures of planning/rates.py that predict the measured pieces best: products' efficiency and half size, the
bandwidth of element-wise kernels beside the optimizer's, the start of a kernel. Besides, what threads lose.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

from conf.device import num_cores
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
from planning.layers import layer_cost
from planning.links import Group
from planning.rates import rates
from planning.stack import get_stack

REPOSITORY = Path(__file__).parent.parent
CACHE = REPOSITORY / ".cache" / "calibration.json"
# hidden, heads, batch, sequence, vocabulary: from a toy's kernels, which are all overhead, to a small model's
SHAPES = [
    (16, 2, 1, 8, 32),
    (128, 4, 4, 128, 256),
    (128, 4, 8, 128, 256),
    (256, 8, 2, 256, 4096),
    (768, 12, 1, 128, 8192),
]
THREADED = 2  # of SHAPES: what several threads are tried on
BLOCKS = 2  # in a row
MOST_CHILDREN = 8
FITTED = {  # figure: least, most
    "matmul_efficiency": (0.02, 6.0),  # the peak in the file is a rough one
    "matmul_half_size": (1.0, 300.0),
    "memory_efficiency": (0.02, 50.0),  # of small tensors, which stay in the caches
    "kernel_latency_s": (1e-7, 1e-3),
}
DIRECT = ("memory_bytes_per_s", "thread_efficiency")  # measured as they are
TIMEOUT_S = 120


def calibrated(config: RootConfig) -> RootConfig:
    """The resolved configuration with this machine's own figures, where hardware=auto is a processor; else as it is.

    Measures at the first call (a few seconds); where the child fails, the defaults stay.
    """
    hardware = config.hardware
    if hardware.device != "cpu" or not hardware.name.startswith("auto") or config.train.precision != "float32":
        return config
    figures = _cached()
    if figures is None:
        measured = _measure(hardware.devices_per_node or 1)
        if measured is None:
            return config
        figures = {key: measured[key] for key in DIRECT}
        figures |= fit(measured["pieces"], replace(hardware, **figures))
        _store(figures)
    sources = hardware.sources | dict.fromkeys(figures, "measured on this machine (planning/calibrate.py)")
    return replace(config, hardware=replace(hardware, **figures, sources=sources))


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


def pieces(config: RootConfig, hardware: HardwareConfig) -> dict[str, float]:
    """Predicted seconds of forward and backward of a block, and of norm and head with the loss, on one core."""
    device, stack = rates(replace(hardware, devices_per_node=1), "float32"), get_stack("torch")
    result = {"block": 0.0, "head": 0.0}
    for spec in describe(config.model)[BLOCKS:]:  # one block, norm, head
        cost = layer_cost(spec, config, stack, device, Group())
        total = cost.forward.total + cost.backward_input.total + cost.backward_weight.total
        result["block" if spec.kind == "block" else "head"] += total
    return result


def _config(shape: tuple[int, ...], hardware: HardwareConfig) -> RootConfig:
    hidden, heads, batch, sequence, vocabulary = shape
    return RootConfig(
        model=ModelConfig(
            name="probe", family="gpt", blocks=BLOCKS, hidden=hidden, heads=heads, feedforward=4 * hidden,
            positions=sequence, vocabulary=vocabulary, tied=False,
        ),
        parallel=ParallelConfig(name="probe", engine="single", stages=1, chunks=1, interleave=1),
        optimizer=OptimizerConfig(name="adamw"),
        hardware=hardware,
        data=DataConfig(name="none", source="synthetic"),
        train=TrainConfig(steps=1, global_batch=batch, sequence=sequence, precision="float32"),
    )  # fmt: skip


def _measure(cores: int) -> dict | None:
    """planning.probe's answer, the median of as many children as there are cores, all at once; one tries threads."""
    shapes = []
    for shape in SHAPES:
        config = _config(shape, HardwareConfig(name="probe", device="cpu"))
        shapes.append(
            {"model": asdict(config.model), "batch": config.train.global_batch, "sequence": config.train.sequence}
        )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command, pipe = [sys.executable, "-m", "planning.probe"], subprocess.PIPE
    children, answers = [], []
    end = threading.Timer(TIMEOUT_S, lambda: [child.kill() for child in children])
    end.start()
    try:
        for _ in range(min(cores, MOST_CHILDREN)):
            children.append(
                subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, cwd=REPOSITORY,
                    env=environment,
                )
            )  # fmt: skip
        for child in children:
            child.stdout.readline()  # it has imported torch
        asked = {"shapes": shapes, "threads": cores, "threaded": THREADED}
        for child in children:
            print(json.dumps(asked), file=child.stdin, flush=True)
        answers = [json.loads(child.stdout.readline()) for child in children]
        if cores > 1:  # now that the others are done
            print(file=children[0].stdin, flush=True)
            answers[0] |= json.loads(children[0].stdout.readline())
    except (OSError, ValueError):
        return None
    finally:
        end.cancel()
        for child in children:
            child.kill()
            child.communicate()
    pieces = [
        {key: statistics.median(answer["pieces"][index][key] for answer in answers) for key in ("block", "head")}
        for index in range(len(SHAPES))
    ]
    bandwidth = statistics.median(answer["bytes_per_s"] for answer in answers)
    efficiency = min(1.0, max(1 / cores, answers[0].get("thread_efficiency", 1.0)))
    return {"pieces": pieces, "memory_bytes_per_s": bandwidth, "thread_efficiency": efficiency}


def _key() -> list[str]:
    """What the figures depend on."""
    return [_processor(), importlib.metadata.version("torch"), str(SHAPES), str(num_cores())]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _cached() -> dict[str, float] | None:
    try:
        stored = json.loads(CACHE.read_text())
        return {key: float(stored["figures"][key]) for key in (*DIRECT, *FITTED)} if stored["key"] == _key() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # never measured, or a file that is not ours


def _store(figures: dict[str, float]) -> None:
    try:
        CACHE.parent.mkdir(parents=True, exist_ok=True)
        partial = CACHE.with_name(f"{CACHE.name}.{os.getpid()}.tmp")
        partial.write_text(json.dumps({"key": _key(), "figures": figures}, indent=1) + "\n")
        os.replace(partial, CACHE)
    except OSError:
        pass  # a read-only checkout measures each time
