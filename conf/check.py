"""Everything that can be told to be wrong in a configuration without torch and without the data, in one line each."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

from conf.check_data import check_data, check_data_values, tokenizer_vocabulary
from conf.checkpointing import check_selective, split_recomputation
from conf.device import find_device
from conf.emulation import check_emulation
from conf.names import named
from conf.schema import ModelConfig, ParallelConfig, RootConfig
from conf.words import count

ENGINES = ("single", "torch", "fairscale")
PRECISIONS = ("float32", "bfloat16", "float64")

KNOWN = {
    "model.family": ("gpt", "llama", "mlp"),
    "parallel.engine": ENGINES,
    "parallel.checkpoint": ("never", "except_last", "always", "selective"),
    "parallel.shard": ("none", "optimizer", "gradients", "full"),
    "optimizer.name": ("adamw", "sgd", "adafactor", "muon"),
    "optimizer.schedule": ("cosine", "linear", "constant", "wsd"),
    "hardware.device": ("auto", "cpu", "cuda"),
    "train.nonfinite": ("stop", "skip"),
    "fault.kind": ("none", "exception", "kill", "stall", "slow"),
}

AT_LEAST_ONE = (
    "model.blocks model.hidden model.heads model.key_value_heads model.feedforward model.positions model.vocabulary "
    "model.vocabulary_multiple model.rope_scaling parallel.stages parallel.chunks parallel.interleave parallel.tensor "
    "parallel.data parallel.checkpoint_interval optimizer.update_rms "
    "hardware.devices_per_node data.synthetic_tokens train.steps train.global_batch train.sequence train.accumulate "
    "train.validate_sequences train.log_every train.keep_checkpoints hardware.checkpoint_every fault.step"
).split()
NOT_NEGATIVE = (
    "optimizer.weight_decay optimizer.beta2_decay optimizer.warmup_steps "
    "hardware.price_usd_per_hour hardware.warmup_steps "
    "hardware.matmul_half_size hardware.kernel_latency_s hardware.link_latency_s hardware.network_latency_s "
    "hardware.action_overhead_s hardware.tensor_block_s hardware.sharded_block_s "
    "hardware.replicated_block_s hardware.reduced_block_s hardware.rank_slowdown "
    "hardware.max_minutes data.synthetic_seed train.seed train.max_minutes train.validate_every "
    "train.checkpoint_every train.max_restarts fault.rank fault.seconds "
    "emulate.slow_rank emulate.slow_link emulate.slow_host emulate.slow_host_s"
).split()
POSITIVE = (
    "model.initializer_std model.norm_eps model.rope_theta "
    "parallel.memory_cap_bytes optimizer.learning_rate optimizer.eps optimizer.clip_norm "
    "hardware.peak_flops_float32 hardware.peak_flops_bfloat16 hardware.memory_bytes hardware.memory_bytes_per_s "
    "hardware.exponentials_per_s hardware.link_bytes_per_s hardware.network_bytes_per_s "
    "train.tokens train.stall_timeout_s "
    "emulate.time_scale emulate.slow_factor emulate.slow_link_factor"
).split()
EFFICIENCIES = [f"hardware.{part}_efficiency" for part in ("matmul", "memory", "link", "network", "thread")]
BELOW_ONE = "model.dropout optimizer.beta1 optimizer.beta2 optimizer.momentum emulate.jitter".split()  # [0, 1)


def check_values(config: RootConfig) -> None:
    """Each value by itself: known names and ranges; null passes. ValueError names key, value and what is allowed."""
    for key, known in KNOWN.items():
        if (value := _get(config, key)) not in known:
            raise ValueError(f"{key}={value} is unknown; known are {', '.join(known)}")
    _check_schedule_name(config.parallel)
    _check_trace(config.train.trace)
    check_data_values(config.data, trains=config.evaluate is None)
    for key in ("hardware.precision", "train.precision"):
        _check_precision(key, _get(config, key))
    # of a processor the peak in the file is a rough one, and small tensors stay in its caches
    most = 1 if config.hardware.device == "cuda" else math.inf
    rules = [
        (AT_LEAST_ONE, lambda v: v >= 1, "must be at least 1"),
        (NOT_NEGATIVE, lambda v: 0 <= v < math.inf, "must be 0 or more"),
        (POSITIVE, lambda v: 0 < v < math.inf, "must be more than 0"),
        (BELOW_ONE, lambda v: 0 <= v < 1, "must be at least 0 and less than 1"),
        (["optimizer.decay_fraction", "optimizer.final_fraction"], lambda v: 0 <= v <= 1, "must be between 0 and 1"),
        (EFFICIENCIES, lambda v: 0 < v <= most, "must be more than 0 and at most 1: a part of the peak"),
        (["data.synthetic_vocabulary"], lambda v: v >= 2, "must be at least 2"),
    ]
    for keys, allowed, says in rules:
        for key in keys:
            value = _get(config, key)
            if value is not None and not allowed(value):
                raise ValueError(f"{key}={value} {says}")
    check_corrections(config.hardware.corrections)
    if config.train.steps is not None and config.train.tokens is not None:
        raise ValueError(
            f"train.steps={config.train.steps} and train.tokens={config.train.tokens:g} are both given: "
            "give one, the other follows from it"
        )


def check_corrections(corrections: dict) -> None:
    """hardware.corrections: of a kind of layer points [FLOPs, ratio], FLOPs rising. ValueError."""
    for kind, points in corrections.items():
        try:
            flops, ratios = zip(*points, strict=True)
            good = all(0 < value < math.inf for value in (*flops, *ratios)) and list(flops) == sorted(set(flops))
        except (TypeError, ValueError):
            good = points == []
        if not good:
            raise ValueError(f"hardware.corrections.{kind}={points} must be pairs [FLOPs, ratio] above 0, FLOPs rising")


def check(config: RootConfig, *, here: bool = True) -> list[str]:
    """A resolved configuration as a whole. Returns warnings; raises ValueError with the numbers and the remedy.

    here: the run starts on this machine, so that its accelerators must be there; False for a plan.
    """
    check_values(config)
    assert config.parallel.chunks is not None and config.train.steps is not None, "resolve() comes first"
    _check_model(config)
    _check_layout(config)
    _check_run(config)
    _check_ranks(config)
    if config.evaluate is None:  # which takes no step
        _check_whole_matrices(config)
    check_emulation(config, here=here)
    if here and not config.emulate.enabled:
        check_selective(config.parallel)
        check_data(config.data)
        _check_device(config)
    return list(_warnings(config))


def _get(config: RootConfig, key: str):
    group, name = key.split(".")
    return getattr(getattr(config, group), name)


def _check_schedule_name(parallel: ParallelConfig) -> None:
    from pipeline.own import is_own
    from pipeline.schedule import SCHEDULES

    if parallel.schedule not in SCHEDULES and not is_own(parallel.schedule):
        raise ValueError(
            f"parallel.schedule={parallel.schedule} is unknown; known are {', '.join(SCHEDULES)}, "
            "path/to/file.py:function and path/to/grid.txt"
        )


def _check_trace(trace: object) -> None:
    least, counted = (1, trace) if isinstance(trace, list) else (0, [trace])
    if not all(isinstance(step, int) and not isinstance(step, bool) and step >= least for step in counted):
        raise ValueError(
            f"train.trace={trace} must be a number of steps, 0 or more, or a list of steps, which count from 1: [10,20]"
        )


def _check_precision(key: str, value: str | None) -> None:
    if value in ("float16", "fp16", "half", "16"):
        raise ValueError(
            f"{key}={value} is refused: float16 needs a gradient scaler around each backward, and the schedules "
            "call backward themselves; use bfloat16, or float32 where the hardware has none"
        )
    if value is not None and value not in PRECISIONS:
        raise ValueError(f"{key}={value} is unknown; known are {', '.join(PRECISIONS)}")


def _check_model(config: RootConfig) -> None:
    model, train = config.model, config.train
    if model.family in ("gpt", "llama") and model.hidden % model.heads:
        raise ValueError(
            f"model.hidden={model.hidden} is not divisible by model.heads={model.heads}: "
            f"set model.heads to {_nearest_divisor(model.hidden, model.heads)}"
        )
    if model.family == "llama":
        _check_llama(model)
    if train.sequence > model.positions:
        raise ValueError(
            f"train.sequence={train.sequence} is longer than model.positions={model.positions}: "
            f"set train.sequence to at most {model.positions} or raise model.positions"
        )
    tokens = tokenizer_vocabulary(config.data)
    if model.vocabulary < tokens:
        raise ValueError(
            f"model.vocabulary={model.vocabulary} is smaller than the {tokens} tokens of data={config.data.name}: "
            f"set model.vocabulary to at least {tokens}, or to null"
        )


def _check_llama(model: ModelConfig) -> None:
    width = model.hidden // model.heads
    if width % 2:
        raise ValueError(
            f"model.hidden={model.hidden} over model.heads={model.heads} gives heads of width {width}, and rotary "
            f"positions turn pairs of columns: set model.hidden to {model.heads * (width + 1)}"
        )
    if model.heads % model.key_value_heads:
        raise ValueError(
            f"model.heads={model.heads} is not divisible by model.key_value_heads={model.key_value_heads}: "
            f"set model.key_value_heads to {_nearest_divisor(model.heads, model.key_value_heads)}"
        )


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda d: (abs(d - wanted), d))


def _check_layout(config: RootConfig) -> None:
    parallel, blocks = config.parallel, config.model.blocks
    if parallel.engine == "single" and parallel.stages != 1:
        raise ValueError(
            f"parallel.engine=single runs the whole model in one process, not parallel.stages={parallel.stages}: "
            "set parallel.stages=1, or parallel.engine=torch"
        )
    if parallel.engine == "fairscale" and parallel.schedule != "gpipe":
        raise ValueError(
            f"parallel.engine=fairscale can only fill and drain, not parallel.schedule={parallel.schedule}: "
            "set parallel.schedule=gpipe, or parallel.engine=torch"
        )
    if parallel.engine != "torch" and parallel.interleave != 1:
        raise ValueError(
            f"parallel.engine={parallel.engine} has one model stage a rank, not parallel.interleave="
            f"{parallel.interleave}: set parallel.interleave=1, or parallel.engine=torch"
        )
    model_stages = parallel.stages * parallel.interleave
    if isinstance(parallel.balance, str):
        from pipeline.action import Impossible
        from pipeline.partition import BALANCES

        if parallel.balance not in BALANCES:
            raise ValueError(
                f"parallel.balance={parallel.balance} is unknown; known are {', '.join(BALANCES)}, or a list such as "
                "[4,4]"
            )
        layers, what = (blocks, "block") if parallel.balance == "uniform" else (_num_layers(config), "layer")
        if model_stages > layers:
            raise Impossible(
                f"{model_stages} model stages (parallel.stages={parallel.stages} x parallel.interleave="
                f"{parallel.interleave}) are more than the {count(layers, what)} of {named('model', config.model)}: "
                f"use at most {count(layers, 'stage')}, or a model with more blocks"
            )
    else:
        _check_balance(parallel.balance, model_stages, blocks, _num_layers(config))
    if parallel.engine == "torch":  # last, since a schedule of hundreds of stages takes a while to make
        from pipeline.schedule import make_schedule

        make_schedule(parallel.schedule, parallel.stages, parallel.chunks, parallel.interleave)


def _num_layers(config: RootConfig) -> int:
    from models.describe import describe

    return len(describe(config.model))


def _check_ranks(config: RootConfig) -> None:
    """What tensor and data parallelism and sharding ask of the model and the engine."""
    parallel, model = config.parallel, config.model
    t, d = parallel.tensor, parallel.data
    if parallel.engine != "torch" and (t > 1 or d > 1):
        raise ValueError(
            f"parallel.engine={parallel.engine} runs in one process, not with parallel.tensor={t} and "
            f"parallel.data={d}: set parallel.engine=torch, or both to 1"
        )
    if t > 1 and model.family == "mlp":
        raise ValueError(f"parallel.tensor={t} needs model.family=gpt or llama, not mlp: set parallel.tensor=1")
    if t > 1:
        parts = [("heads", model.heads), ("feedforward", model.feedforward), ("vocabulary", model.vocabulary)]
        if model.family == "llama":
            parts.append(("key_value_heads", model.key_value_heads))
        for key, number in parts:
            if number % t:
                remedy = f"set parallel.tensor to {_nearest_divisor(number, t)}"
                if key == "vocabulary":
                    remedy = f"set model.vocabulary_multiple={t}, which pads it to {-(-number // t) * t}"
                raise ValueError(f"model.{key}={number} is not divisible by parallel.tensor={t}: {remedy}")
    if parallel.sequence_parallel and t == 1:
        raise ValueError(
            "parallel.sequence_parallel=true shares the sequence among tensor ranks, and parallel.tensor=1: "
            "set parallel.tensor to 2 or more, or parallel.sequence_parallel=false"
        )
    if parallel.sequence_parallel and config.train.sequence % t:
        near = " or ".join(str(n) for n in nearest_batches(config.train.sequence, t))
        raise ValueError(
            f"train.sequence={config.train.sequence} is not divisible by parallel.tensor={t}, as "
            f"parallel.sequence_parallel=true needs: set train.sequence to {near}"
        )
    check_sharding(parallel)


def check_sharding(parallel: ParallelConfig) -> None:
    """What data ranks can share under this layout and schedule. ValueError says what would go wrong."""
    d, shard = parallel.data, parallel.shard
    if shard != "none" and d == 1:
        raise ValueError(
            f"parallel.shard={shard} shares memory among data ranks, and parallel.data=1: set parallel.data to 2 or "
            "more, or parallel.shard=none"
        )
    if shard == "gradients" and parallel.stages > 1:
        raise ValueError(
            f"parallel.shard=gradients brings nothing with parallel.stages={parallel.stages}: a pipeline holds whole "
            "gradients until the step's end; set parallel.shard=optimizer"
        )
    if shard in ("gradients", "full") and parallel.engine == "torch":
        from pipeline.schedule import make_schedule

        schedule = make_schedule(parallel.schedule, parallel.stages, parallel.chunks, parallel.interleave)
        if schedule.splits_backward:
            raise ValueError(
                f"parallel.shard={shard} loses gradients with parallel.schedule={parallel.schedule}, whose backward is "
                "split in two: set parallel.shard=optimizer, or parallel.schedule=1f1b"
            )


def _check_whole_matrices(config: RootConfig) -> None:
    """torch's Adafactor fails on sharded matrices (DTensor, torch 2.13), and Muon's bfloat16 products are added in
    another order there: its weights after five steps were 1 % off those of one process."""
    name, parallel = config.optimizer.name, config.parallel
    if name not in ("adafactor", "muon"):
        return
    for key, value, whole in (("shard", parallel.shard, "none"), ("tensor", parallel.tensor, 1)):
        if value != whole:
            raise ValueError(
                f"optimizer={name} needs whole matrices on a rank, and parallel.{key}={value} divides them: set "
                f"parallel.{key}={whole}, or optimizer=adamw"
            )


def _check_balance(balance: object, model_stages: int, blocks: int, layers: int) -> None:
    """A list that sums to the number of blocks counts blocks; one that sums to all layers is literal."""
    if not isinstance(balance, list) or not all(type(part) is int for part in balance):
        raise ValueError(f"parallel.balance={balance} must be a name or a list of whole numbers such as [4,4]")
    if len(balance) != model_stages:
        entries, stages = count(len(balance), "entry"), count(model_stages, "model stage")
        raise ValueError(f"parallel.balance={balance} has {entries} for {stages}: give one a stage")
    if min(balance) < 1:
        raise ValueError(f"parallel.balance={balance} has a stage with {min(balance)} layers: each needs at least 1")
    if sum(balance) not in (blocks, layers):
        raise ValueError(
            f"parallel.balance={balance} sums to {sum(balance)}: it must sum to {blocks} (the blocks) or to {layers} "
            "(all layers: blocks, embedding, head and what else the model has)"
        )


def nearest_batches(global_batch: int, unit: int) -> list[int]:
    """The one or two multiples of `unit` around `global_batch`, at least `unit` each."""
    below = global_batch // unit * unit
    return sorted({max(unit, below), below + unit})


def _check_run(config: RootConfig) -> None:
    train, parallel, optimizer = config.train, config.parallel, config.optimizer
    unit = parallel.data * train.accumulate * parallel.chunks
    if train.global_batch % unit:
        near = " or ".join(str(n) for n in nearest_batches(train.global_batch, unit))
        replicas = f"parallel.data={parallel.data} x " if parallel.data > 1 else ""
        raise ValueError(
            f"train.global_batch={train.global_batch} is not divisible by {replicas}train.accumulate="
            f"{train.accumulate} x parallel.chunks={parallel.chunks} = {unit}: set train.global_batch to {near}"
        )
    if optimizer.learning_rate is None:
        raise ValueError(f"optimizer.learning_rate is null, and only a value will do for optimizer={optimizer.name}")
    if optimizer.warmup_steps > train.steps:
        raise ValueError(
            f"optimizer.warmup_steps={optimizer.warmup_steps} is longer than train.steps={train.steps}: "
            f"set optimizer.warmup_steps to at most {train.steps}, or to null"
        )


def _check_device(config: RootConfig) -> None:
    hardware, parallel = config.hardware, config.parallel
    if hardware.device != "cuda":
        return
    found = find_device()
    if found.kind != "cuda":
        raise ValueError(
            f"hardware={hardware.name} needs an accelerator and this machine has none that torch can see: "
            "use hardware=auto or hardware=cpu"
        )
    joined = "RANK" in os.environ  # torchrun and Slurm start the ranks, maybe on other machines too
    ranks = parallel.stages * parallel.data * parallel.tensor
    if parallel.engine != "single" and ranks > found.count and not joined:
        raise ValueError(
            f"parallel.stages={parallel.stages} x parallel.data={parallel.data} x parallel.tensor={parallel.tensor} "
            f"needs {ranks} accelerators and this machine has {found.count}: take at most "
            f"{count(found.count, 'rank')}, or start with torchrun on more machines"
        )


def _warnings(config: RootConfig) -> Iterable[str]:
    parallel, hardware = config.parallel, config.hardware
    p, m = parallel.stages, parallel.chunks
    if p > 1 and m < 4 * p:
        from pipeline.schedule import bubble_ideal, make_schedule

        now, usual = (bubble_ideal(make_schedule(parallel.schedule, p, n, parallel.interleave)) for n in (m, 4 * p))
        yield (
            f"parallel.chunks={m} is less than 4 x parallel.stages={p}: an ideal bubble of {now:.1%} of the step, "
            f"{usual:.1%} with parallel.chunks={4 * p}"
        )
    if (costly := split_recomputation(config)) is not None:
        yield costly
    if config.train.precision == "bfloat16" and hardware.peak_flops_float32 and not hardware.peak_flops_bfloat16:
        yield f"train.precision=bfloat16 may be emulated on hardware={hardware.name}, many times slower than float32"
