"""What train.py says before the first step: what was built and chosen, and whether the memory suffices."""

from __future__ import annotations

from pathlib import Path

from conf.device import memory_bytes, num_cores
from conf.schema import RootConfig, to_dict
from models.describe import LayerSpec, describe, num_parameters
from pipeline.partition import num_ranks, split
from pipeline.schedule import bubble_ideal, held_microbatches, make_schedule
from planning.memory import rank_memory
from training.data import Corpus


class DoesNotFit(ValueError):
    """The machine has too little memory for the run."""


def rank_layers(config: RootConfig) -> list[list[LayerSpec]]:
    """The layers of each rank (fairscale: of each device), of a resolved configuration."""
    by_name = {layer.name: layer for layer in describe(config.model)}
    return [[by_name[name] for name in names] for names in split(config.parallel, list(by_name))]


def predicted_memory(config: RootConfig) -> list[dict]:
    """planning.memory's bytes for each rank (fairscale: for each device)."""
    parallel = config.parallel
    ranks = rank_layers(config)
    if parallel.engine == "torch":
        schedule = make_schedule(parallel.schedule, parallel.stages, parallel.chunks, parallel.interleave)
        held = held_microbatches(schedule)
    else:  # single runs one micro-batch at a time; fairscale fills and drains
        held = [1 if parallel.engine == "single" else parallel.chunks] * len(ranks)
    return [rank_memory(config, layers, count) for layers, count in zip(ranks, held, strict=True)]


def preflight(config: RootConfig, memory: list[dict]) -> None:
    """Raises DoesNotFit, with the figures, when the ranks hold more than there is. `preflight=false` goes on."""
    totals = [rank["total"] for rank in memory]
    each = ", ".join(f"rank {rank} {gib(total)}" for rank, total in enumerate(totals))
    remedy = "take a smaller model, batch or sequence, or go on with preflight=false"
    if config.hardware.device == "cpu":
        available = available_bytes()
        if sum(totals) > available:
            raise DoesNotFit(
                f"the run needs {gib(sum(totals))} of memory ({each}) and this machine has {gib(available)} free: "
                f"{remedy}"
            )
    elif config.hardware.memory_bytes and max(totals) > config.hardware.memory_bytes:
        raise DoesNotFit(f"a device has {gib(config.hardware.memory_bytes)} and the run needs {each}: {remedy}")


def available_bytes() -> int:
    """Memory that new processes can take: the kernel's estimate, and what a container's limit leaves (cgroup v2)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        cached = next(
            int(line.split()[1])
            for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
            if line.startswith("inactive_file ")
        )
        return min(available, memory_bytes() - used + cached)
    except (OSError, ValueError, StopIteration):
        return available


def describe_run(config: RootConfig, corpus: Corpus, memory: list[dict]) -> str:
    """A few lines on what is about to run: layers and memory of each rank, batch, bubble, length, data."""
    model, parallel, train, optimizer = config.model, config.parallel, config.train, config.optimizer
    micro_batch = train.global_batch // train.accumulate // parallel.chunks
    tokens = train.global_batch * train.sequence
    flushes = f"{train.accumulate} x " if train.accumulate > 1 else ""
    limit = f", at most {train.max_minutes:g} minutes" if train.max_minutes else ""
    clipping = f", gradients clipped at {optimizer.clip_norm:g}" if optimizer.clip_norm else ""
    threads = _threads(config)
    lines = [
        f"model      {model.name}: {num_parameters(describe(model)):,} parameters, {model.blocks} blocks of width "
        f"{model.hidden}, vocabulary {model.vocabulary}",
        f"parallel   {_layout(config)}",
        *map(_rank_line, range(len(memory)), rank_layers(config), memory),
        f"batch      {train.global_batch} sequences of {train.sequence} tokens = {tokens:,} tokens a step: "
        f"{flushes}{parallel.chunks} micro-batches of {micro_batch}",
        f"run        {train.steps:,} steps = {train.steps * tokens:,} tokens "
        f"({train.steps * tokens / corpus.train_tokens:.2g} of the training data){limit}",
        f"optimizer  {optimizer.name}, learning rate {optimizer.learning_rate:g}, {optimizer.warmup_steps} warm-up "
        f"steps, then {optimizer.schedule}{clipping}",
        f"hardware   {config.hardware.name}, {train.precision}{threads}",
        f"data       {corpus.description}",
    ]
    return "\n".join(lines)


def chosen_values(composed: RootConfig, resolved: RootConfig) -> list[str]:
    """What null was filled with, as overrides: ["parallel.chunks=8", …]."""
    before, after = to_dict(composed), to_dict(resolved)
    return [
        f"{group}.{key}={value:g}" if isinstance(value, float) else f"{group}.{key}={value}"
        for group, values in after.items()
        if isinstance(values, dict)
        for key, value in values.items()
        if before[group][key] is None and value is not None
    ]


def gib(count: float) -> str:
    """A number of bytes for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _layout(config: RootConfig) -> str:
    parallel = config.parallel
    if parallel.engine == "single":
        return f"{parallel.name}: one process runs every layer, {parallel.chunks} micro-batches in turn"
    interleaved = f" x {parallel.interleave} model stages" if parallel.interleave > 1 else ""
    schedule = parallel.schedule if parallel.engine == "torch" else "gpipe"  # fairscale's own
    bubble = bubble_ideal(make_schedule(schedule, parallel.stages, parallel.chunks, parallel.interleave))
    return (
        f"{parallel.name}: engine {parallel.engine}, schedule {schedule}, {parallel.stages} stages{interleaved}, "
        f"{parallel.chunks} micro-batches: ideal bubble {bubble:.1%} of a step"
    )


def _threads(config: RootConfig) -> str:
    if config.hardware.device != "cpu":
        return ""
    ranks, cores = num_ranks(config.parallel), num_cores()
    note = "; more ranks than cores: waiting for a core counts as bubble" if ranks > cores else ""
    return f", {ranks} processes on {cores} cores{note}"


def _rank_line(rank: int, layers: list[LayerSpec], held: dict) -> str:
    names = [layer.name for layer in layers]
    blocks = [name for name in names if name.startswith("block.")]
    if len(blocks) > 2 and names[names.index(blocks[0]) :][: len(blocks)] == blocks:
        first = names.index(blocks[0])
        names[first : first + len(blocks)] = [f"{blocks[0]} ... {blocks[-1]}"]
    return f"  rank {rank}   {', '.join(names)}: {num_parameters(layers):,} parameters, {gib(held['total'])}"
