"""What `null` means: fills each open value of a configuration from the model, the layout and the hardware."""

from __future__ import annotations

import copy
import math
from pathlib import Path

from omegaconf import OmegaConf

from conf.check import check_values
from conf.check_data import tokenizer_vocabulary
from conf.device import Device, find_device, memory_bytes, num_cores
from conf.schema import HardwareConfig, ModelConfig, RootConfig, TrainConfig
from conf.words import unknown_option

# A run on processors: what a small model gets in full, and a larger one in part.
CPU_STEPS = 240  # the main job in under two minutes on two cores
CPU_MIN_STEPS = 4
CPU_GLOBAL_BATCH = 32  # sequences
CPU_SEQUENCE = 128  # tokens
CPU_VALIDATE_SEQUENCES = 256
CPU_EFFICIENCY = 0.5  # of the peak of all cores, in whole training steps
CPU_BUDGET = 2 / 3  # of max_minutes: what a run is sized for, since the estimate is rough
# A run of some hundred steps learns more at a higher rate, given a warm-up: gpt_tiny in 300 steps to 2.16 nats a token
# at 3e-3, to 2.28 at 1.2e-3 (python_source, one run each).
SHORT_RUN_RATE = 2.5
SHORT_RUN_WARMUP = 10  # steps
# Adam's first step changes every weight by its rate, in the one direction that makes the commonest token likelier: each
# block's feed-forward adds rate x its inner width to the residual stream, which the head multiplies by the width.
# Without a warm-up gpt_1b went from 6.1 to 17.9 nats a token in one step at 3.4e-4, to 16.7 at 3.4e-5, to 8.9 at 4e-6.
# The first step's rate is therefore held to this over (width x inner width x blocks): a logit moves by about 1.
FIRST_STEP = 100
ADAFACTOR_RATE = 0.01  # of a parameter's root mean square: the paper's (arXiv 1804.04235, section 8), and torch's
EMULATED_STEPS = 5
# A run on accelerators.
ACCELERATOR_STEPS = 100_000
ACCELERATOR_SEQUENCE = 2048  # tokens
ACCELERATOR_MICRO_BATCH = 8192  # tokens: large enough to fill the device, fewer above a width of 4,096
ACCELERATOR_VALIDATE_SEQUENCES = 512

VALIDATIONS = 4  # a run
VALIDATION_SHARE = 0.1  # of the run's time at most
LOG_LINES = 20  # a run
WARMUP_PART = 10  # at most one part in this of the run

# What torch calls a device -> the file of conf/hardware/ with its figures.
DEVICE_FILES = {
    "Tesla V100-SXM2-16GB": "v100",
    "Tesla V100-SXM2-32GB": "v100",
    "NVIDIA A100-SXM4-40GB": "a100_40gb",
    "NVIDIA A100-SXM4-80GB": "a100_80gb",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
}
# Figures of the device itself; network and price belong to a node, which a name does not tell.
DEVICE_FIGURES = (
    "precision",
    "peak_flops_float32",
    "peak_flops_bfloat16",
    "memory_bytes_per_s",
    "link_bytes_per_s",
    "matmul_efficiency",
    "matmul_half_size",
    "memory_efficiency",
    "kernel_latency_s",
    "exponentials_per_s",
    "link_efficiency",
    "link_latency_s",
    "network_efficiency",
    "network_latency_s",
    "warmup_steps",
    "max_minutes",
    "checkpoint_every",
)


def resolve(config: RootConfig, *, device: str | None = None) -> RootConfig:
    """A copy in which every null that has an answer is filled. Resolving twice changes nothing.

    device: cpu or cuda in place of what hardware=auto would find. ValueError for a value that is wrong by itself.
    """
    check_values(config)
    config = copy.deepcopy(config)
    found = find_device() if device is None else Device(device)
    _resolve_hardware(config.hardware, found)
    _resolve_model(config)
    _resolve_parallel(config)
    train = config.train
    train.precision = train.precision or config.hardware.precision or "float32"
    if train.max_minutes is None:
        train.max_minutes = float(config.hardware.max_minutes or 0)
    if config.emulate.enabled:
        _resolve_emulation(train)
    if config.hardware.device == "cpu":
        _resolve_cpu_run(config)
    else:
        _resolve_accelerator_run(config)
    _resolve_intervals(config)
    _resolve_optimizer(config)
    return config


def _resolve_emulation(train: TrainConfig) -> None:
    """Every step is like the others, and there is nothing to validate or to save."""
    if train.steps is None and train.tokens is None:
        train.steps = EMULATED_STEPS
    train.validate_every = train.checkpoint_every = 0


def padded_vocabulary(model: ModelConfig) -> int:
    """Rows of the embedding: model.vocabulary rounded up to a multiple of model.vocabulary_multiple."""
    return math.ceil(model.vocabulary / model.vocabulary_multiple) * model.vocabulary_multiple


def _resolve_hardware(hardware: HardwareConfig, found: Device) -> None:
    auto = hardware.device == "auto"
    if auto:
        hardware.device = found.kind
        hardware.name = f"auto ({found.name or found.kind})"
    if auto or hardware.device == "cpu":
        file = "cpu" if hardware.device == "cpu" else DEVICE_FILES.get(found.name, "cuda")
        figures = hardware_file(file)
        if found.count and not found.bfloat16:
            figures["precision"] = "float32"
        for key in DEVICE_FIGURES:
            if getattr(hardware, key) is None and figures.get(key) is not None:
                setattr(hardware, key, figures[key])
                if key in figures.get("sources", {}):
                    hardware.sources[key] = figures["sources"][key]
        if found.count and hardware.device == "cuda":
            hardware.memory_bytes = hardware.memory_bytes or found.memory_bytes
            hardware.devices_per_node = hardware.devices_per_node or found.count
    if hardware.device == "cpu":
        hardware.devices_per_node = hardware.devices_per_node or num_cores()
        hardware.memory_bytes = hardware.memory_bytes or float(memory_bytes())


def hardware_file(name: str) -> dict:
    """The values of conf/hardware/NAME.yaml, laid over those of the file that it starts from. ValueError, with the
    names that there are, where there is no such file."""
    return group_file("hardware", name)


def group_file(group: str, name: str) -> dict:
    """`hardware_file` of any group."""
    folder = Path(__file__).parent / group
    if not (folder / f"{name}.yaml").is_file() or Path(name).name != name:
        raise ValueError(unknown_option(group, name, (path.stem for path in folder.glob("*.yaml"))))
    values = OmegaConf.to_container(OmegaConf.load(folder / f"{name}.yaml"))
    bases = values.pop("defaults", [])
    values = values.get(group, values)  # a file of the whole configuration: emulated hardware
    for base in bases:
        if base != "_self_":
            below = group_file(group, base.partition("@")[0])
            sources = below.get("sources", {}) | values.get("sources", {})
            values = below | values | {"sources": sources}
    return values


def _resolve_model(config: RootConfig) -> None:
    from models.describe import feedforward_width

    model = config.model
    model.feedforward = feedforward_width(model)
    model.key_value_heads = model.key_value_heads or model.heads
    model.vocabulary = model.vocabulary or tokenizer_vocabulary(config.data)
    model.vocabulary = padded_vocabulary(model)


def _resolve_parallel(config: RootConfig) -> None:
    from pipeline.schedule import make_schedule

    parallel = config.parallel
    parallel.chunks = parallel.chunks or 4 * parallel.stages
    if parallel.interleave is None:
        # single and fairscale run one model stage a rank, whatever the schedule's name
        torch = parallel.engine == "torch"
        parallel.interleave = (
            make_schedule(parallel.schedule, parallel.stages, parallel.chunks).interleave if torch else 1
        )


def _nearest_multiple(number: float, unit: int) -> int:
    return max(1, round(number / unit)) * unit


def _batch_unit(config: RootConfig) -> int:
    """global_batch is a multiple of this: data x accumulate x chunks."""
    return config.parallel.data * config.train.accumulate * config.parallel.chunks


def _resolve_cpu_run(config: RootConfig) -> None:
    """A small model gets CPU_STEPS steps of CPU_GLOBAL_BATCH sequences; one that cannot do that within the hardware's
    time limit gets micro-batches of one sequence and as many steps as fit."""
    from models.describe import model_flops_per_token

    train, hardware = config.train, config.hardware
    unit = _batch_unit(config)
    train.sequence = train.sequence or min(CPU_SEQUENCE, config.model.positions)
    rate = hardware.peak_flops_float32 * hardware.devices_per_node * CPU_EFFICIENCY
    second_a_token = model_flops_per_token(config.model, train.sequence) / rate
    if train.global_batch is None:
        small = _nearest_multiple(CPU_GLOBAL_BATCH, unit)
        limit_s = CPU_BUDGET * 60 * (hardware.max_minutes or math.inf)
        fits = CPU_STEPS * small * train.sequence * second_a_token <= limit_s
        train.global_batch = small if fits else unit
    step_s = train.global_batch * train.sequence * second_a_token
    limit_s = CPU_BUDGET * 60 * (train.max_minutes or hardware.max_minutes or math.inf)
    _resolve_steps(config, round(min(CPU_STEPS, max(CPU_MIN_STEPS, limit_s / step_s))))
    if train.validate_sequences is None:
        affordable = _validation_budget(config) / VALIDATIONS
        flush = max(1, train.global_batch // train.accumulate)
        train.validate_sequences = max(flush, min(CPU_VALIDATE_SEQUENCES, int(affordable)) // flush * flush)


def _resolve_accelerator_run(config: RootConfig) -> None:
    train = config.train
    unit = _batch_unit(config)
    train.sequence = train.sequence or min(ACCELERATOR_SEQUENCE, config.model.positions)
    tokens = min(ACCELERATOR_MICRO_BATCH, ACCELERATOR_MICRO_BATCH * 4096 // config.model.hidden)
    train.global_batch = train.global_batch or unit * max(1, tokens // train.sequence)
    _resolve_steps(config, ACCELERATOR_STEPS)
    if train.validate_sequences is None:
        flush = max(1, train.global_batch // train.accumulate)
        train.validate_sequences = _nearest_multiple(ACCELERATOR_VALIDATE_SEQUENCES, flush)


def _resolve_steps(config: RootConfig, steps: int) -> None:
    train = config.train
    if train.tokens is not None:
        steps = math.ceil(train.tokens / (train.global_batch * train.sequence))
        train.tokens = None  # said by steps from here on
    train.steps = train.steps or steps


def _validation_budget(config: RootConfig) -> float:
    """Sequences that validation may take in a whole run; a forward costs a third of a training step's work."""
    return VALIDATION_SHARE * 3 * config.train.steps * config.train.global_batch


def _resolve_intervals(config: RootConfig) -> None:
    train = config.train
    if train.validate_every is None:
        affordable = int(_validation_budget(config) / train.validate_sequences)
        train.validate_every = math.ceil(train.steps / max(1, min(VALIDATIONS, affordable)))
    if train.checkpoint_every is None:  # without a recipe: at the end, and when the run is stopped
        train.checkpoint_every = config.hardware.checkpoint_every or train.steps
    train.log_every = train.log_every or max(1, round(train.steps / LOG_LINES))


def _resolve_optimizer(config: RootConfig) -> None:
    optimizer = config.optimizer
    if optimizer.warmup_steps is None:
        wanted = config.hardware.warmup_steps
        most = config.train.steps // WARMUP_PART
        optimizer.warmup_steps = most if wanted is None else min(wanted, most)
    if optimizer.learning_rate is not None or optimizer.name == "sgd":
        return
    from models.describe import describe, num_parameters

    model = config.model
    first_step = FIRST_STEP / (model.hidden * model.feedforward * model.blocks) * max(1, optimizer.warmup_steps)
    if optimizer.name == "adafactor":
        rate = ADAFACTOR_RATE
        first_step /= model.initializer_std  # its rate is relative to the weights, which start at this
    else:
        rate = adam_learning_rate(num_parameters(describe(model)))
    if config.hardware.device == "cpu" and optimizer.warmup_steps >= SHORT_RUN_WARMUP:
        rate *= SHORT_RUN_RATE
    optimizer.learning_rate = float(f"{min(rate, first_step):.1e}")


def adam_learning_rate(parameters: int) -> float:
    """Peak rate for Adam by the number of parameters, two digits: Kaplan et al. 2020, arXiv 2001.08361, eq. D.1.

    Held between 6e-5 (GPT-3 175B's: the formula breaks down past 10^10 parameters) and 1.5e-3.
    """
    rate = 0.003239 - 0.0001395 * math.log(parameters)
    return float(f"{min(1.5e-3, max(6e-5, rate)):.1e}")
