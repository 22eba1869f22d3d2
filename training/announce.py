"""What train.py says before the first step: what was built and chosen, and whether the memory suffices."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from pathlib import Path

from conf.device import num_cores
from conf.names import named
from conf.schema import RootConfig, to_dict
from conf.words import count, large, plural, significant
from models.describe import LayerSpec, describe, num_parameters
from pipeline.partition import Certificate, split
from pipeline.placement import num_ranks, placement_lines, ranks_of_stage, ranks_text
from pipeline.schedule import bubble_ideal, make_schedule
from planning.memory import elements, machine_memory_bytes, optimizer_elements
from planning.predict import needed_bytes, one_memory, ranks_memory
from planning.remedies import remedies
from planning.stack import get_stack
from planning.step import Layout, step_time
from training import manifest
from training.data import Corpus

SHARED = {  # parallel.shard: what the data ranks hold
    "none": "every data rank holds all of its layers; one all-reduce of the gradients a step",
    "optimizer": "data ranks share weights, gradients and optimizer state; one gather and one reduce a step",
    "gradients": "as optimizer, and gradients are reduced after each micro-batch",
    "full": "data ranks share weights, gradients and optimizer state; weights are gathered for each use",
}


class DoesNotFit(ValueError):
    """The machine has too little memory for the run."""


def predicted_memory(config: RootConfig) -> list[dict]:
    """planning.memory's bytes of each process; where fairscale drives several accelerators, of each of them."""
    return ranks_memory(config, Layout.of(config))


def preflight(config: RootConfig, memory: list[dict]) -> None:
    """Raises DoesNotFit, with the figures, when the run would hold more than there is. `preflight=false` goes on."""
    totals = [held["total"] for held in memory]
    word = "pipeline rank" if num_ranks(config.parallel) > len(totals) else "rank"
    each = ", ".join(f"{word} {rank} {gib(total)}" for rank, total in enumerate(totals))
    remedy = "take a smaller model, global batch or sequence, or go on with preflight=false"
    fullest = totals.index(max(totals))
    parts = sorted(((size, name) for name, size in memory[fullest].items() if name != "total"), reverse=True)
    remedy = f"{word} {fullest} has {', '.join(f'{gib(size)} of {name}' for size, name in parts[:4])}; {remedy}"
    needed = needed_bytes(config, memory)
    if one_memory(config):
        available = machine_memory_bytes()
        replicas = config.parallel.data * config.parallel.tensor
        if replicas > 1:
            each += f", {replicas} ranks of each"
        if needed > available:
            raise DoesNotFit(
                f"the run would hold {gib(needed)} of memory ({each}) and this machine has "
                f"{gib(available)} free: {remedy}{_what_fits(config, available)}"
            )
    elif config.hardware.memory_bytes and needed > config.hardware.memory_bytes:
        device = f"{gib(config.hardware.memory_bytes)} of memory"
        raise DoesNotFit(
            f"the run would hold {each}, and each device has {device}: {remedy}"
            + _what_fits(config, config.hardware.memory_bytes)
        )


def state_bytes(config: RootConfig) -> int:
    """Bytes of a checkpoint: weights and what the optimizer keeps of each, in the weights' type (build.DTYPES)."""
    layers = describe(config.model)
    width = 8 if config.train.precision == "float64" else 4
    saved = [
        replace(layer, parameters={n: s for n, s in layer.parameters.items() if n not in layer.tied})
        for layer in layers
    ]
    return width * (num_parameters(saved) + optimizer_elements(config.optimizer, saved))


def check_room(config: RootConfig, run_dir: Path) -> None:
    """Raises ValueError when the disk has no room for a checkpoint."""
    if config.train.checkpoint_every and (message := manifest.room_message(run_dir, state_bytes(config))):
        raise ValueError(f"{message}: make room, or go without checkpoints: train.checkpoint_every=0")


def checkpoint_line(config: RootConfig) -> str:
    """When checkpoints are saved, and how large they are."""
    train = config.train
    if not train.checkpoint_every:
        return "none (train.checkpoint_every=0)"
    every = f"every {count(train.checkpoint_every, 'step')}, " if train.checkpoint_every < train.steps else ""
    return (
        f"{every}at the end and when stopped: {gib(state_bytes(config))} each, the newest {train.keep_checkpoints} kept"
    )


def _what_fits(config: RootConfig, capacity: float) -> str:
    """The cheapest changes under which the run would fit, with what they cost; empty where none is known."""
    try:
        step_s = step_time(config, get_stack("torch"), explain=False).total
        found = remedies(config, config.parallel.balance, "torch", capacity)
    except ValueError:  # the hardware file lacks a figure: no time can be told
        return ""
    shown = "; ".join(remedy.describe(step_s) for remedy in found[:3])
    return f"; what fits, cheapest first: {shown}" if shown else ""


def describe_run(config: RootConfig, corpus: Corpus | None, memory: list[dict]) -> str:
    """A few lines on what is about to run: layers and memory of each rank, batch, bubble, length, data (`corpus`; None:
    an emulated run, which learns nothing)."""
    model, parallel, train, optimizer = config.model, config.parallel, config.train, config.optimizer
    micro_batch = train.global_batch // train.accumulate // parallel.data // parallel.chunks
    replicas = f"{parallel.data} data ranks x " if parallel.data > 1 else ""
    tokens = train.global_batch * train.sequence
    flushes = f"{train.accumulate} x " if train.accumulate > 1 else ""
    limit = f", at most {train.max_minutes:g} {plural(train.max_minutes, 'minute')}" if train.max_minutes else ""
    clipping = f", gradients clipped at {optimizer.clip_norm:g}" if optimizer.clip_norm else ""
    lines = [
        f"model      {named('model', model)}: {num_parameters(describe(model)):,} parameters, "
        f"{count(model.blocks, 'block')} of width {model.hidden}, vocabulary {model.vocabulary}",
        f"parallel   {_layout(config)}",
        *(f"{'placement' if not index else '':<10} {line}" for index, line in enumerate(_placement(config))),
        *_part_lines(config, memory),
        f"batch      {count(train.global_batch, 'sequence')} of {count(train.sequence, 'token')} = "
        f"{count(tokens, 'token')} a step: "
        f"{replicas}{flushes}{count(parallel.chunks, 'micro-batch')} of {micro_batch}",
        f"run        {count(train.steps, 'step')} = {count(train.steps * tokens, 'token')}"
        f"{_epochs(config, corpus)}{limit}",
        f"optimizer  {optimizer.name}, learning rate {optimizer.learning_rate:g}, "
        f"{count(optimizer.warmup_steps, 'warm-up step')}, then {optimizer.schedule}{clipping}",
        f"checkpoint {checkpoint_line(config)}",
        f"hardware   {named('hardware', config.hardware)}, {train.precision}{_processes(config)}",
    ]
    if corpus is None:
        lines = [line for line in lines if not line.startswith(("optimizer", "checkpoint"))]
    else:
        lines.append(f"data       {corpus.description}")
    return "\n".join(lines)


def _epochs(config: RootConfig, corpus: Corpus | None) -> str:
    train = config.train
    if corpus is None:
        return ""
    return f" ({significant(train.steps * train.global_batch * train.sequence / corpus.train_tokens, 2)} epochs)"


def split_line(split: Certificate) -> str:
    """How good the cut is, in a line: the list that repeats it, the slowest rank, and what no cut can beat."""

    def cost(value: float) -> str:
        return f"{significant(1e3 * value, 4)} ms" if split.unit == "seconds" else f"{large(value)} {split.unit}"

    proven = "proven best" if split.gap == 0 else f"{split.gap:.2%} over the bound of {cost(split.lower_bound)}"
    whose = ""
    if split.unit == "seconds":
        whose = " a micro-batch " + ("measured" if split.method == "time" else "predicted")
    balance = str(split.balance).replace(" ", "")
    text = (
        f"split      {split.method}: parallel.balance={balance}; slowest is pipeline rank {split.slowest_rank}, "
        f"{cost(split.costs[split.slowest_rank])}{whose}, {proven}; balance efficiency {split.efficiency:.1%}"
    )
    if split.cap_bytes is not None:
        text += f"; fullest rank {gib(max(split.bytes))} of a cap of {gib(split.cap_bytes)}"
    return text


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


def gib(size: float) -> str:
    """A number of bytes for people."""
    if size < 2**20:
        return f"{size / 2**10:.0f} KiB"
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _layout(config: RootConfig) -> str:
    parallel, name = config.parallel, named("parallel", config.parallel)
    if parallel.engine == "single":
        return f"{name}: one process runs every layer, {count(parallel.chunks, 'micro-batch')} in turn"
    interleaved = f" x {parallel.interleave} model stages" if parallel.interleave > 1 else ""
    schedule = parallel.schedule if parallel.engine == "torch" else "gpipe"  # fairscale's own
    bubble = bubble_ideal(make_schedule(schedule, parallel.stages, parallel.chunks, parallel.interleave))
    text = (
        f"{name}: engine {parallel.engine}, schedule {schedule}, {count(parallel.stages, 'stage')}"
        f"{interleaved}, {count(parallel.chunks, 'micro-batch')}: ideal bubble {bubble:.1%} of a step"
    )
    if parallel.engine == "fairscale" and config.hardware.device == "cpu":
        text += ";\n           on CPU fairscale's stages share one worker thread and do not overlap: nothing is gained"
    return text


def _placement(config: RootConfig) -> list[str]:
    """Where data and tensor ranks go, and what data ranks share; empty for a pipeline alone."""
    parallel = config.parallel
    lines = placement_lines(parallel, config.hardware.devices_per_node if config.hardware.device != "cpu" else None)
    if lines and parallel.data > 1:
        lines.append(f"shard={parallel.shard}: {SHARED[parallel.shard]}")
    if lines and parallel.sequence_parallel:
        lines.append("sequence parallel: norms, dropout and residuals on a part of the sequence each")
    return lines


def _processes(config: RootConfig) -> str:
    if config.emulate.enabled:
        scale = config.emulate.time_scale
        slower = "" if scale == 1 else f", a second of it in {scale:g} s"
        return f", EMULATED by {count(config.parallel.stages, 'process')} that only wait{slower}"
    if config.hardware.device != "cpu":
        return ""
    ranks, cores = num_ranks(config.parallel), num_cores()
    note = "; more ranks than cores: waiting for a core counts as bubble" if ranks > cores else ""
    return f", {count(ranks, 'process')} on {count(cores, 'core')}{note}"


def _part_lines(config: RootConfig, memory: list[dict]) -> list[str]:
    """What each rank holds: its layers, parameters and memory; the ranks of a stage together."""
    lines = [
        f"  {_holders(config, index)}: {_layer_names(layers)}: {_held(config, layers)}"
        for index, layers in enumerate(_parts(config))
    ]
    totals = [gib(held["total"]) for held in memory]
    if len(totals) == len(lines):
        return [f"{line}, {total} of memory" for line, total in zip(lines, totals, strict=True)]
    return [*lines, f"  in one process: {totals[0]} of memory"]


def _holders(config: RootConfig, index: int) -> str:
    if config.parallel.engine == "fairscale":
        return f"stage {index}"
    return ranks_text(ranks_of_stage(index, config.parallel))


def _held(config: RootConfig, layers: list[LayerSpec]) -> str:
    """Parameters that a rank with these layers holds between steps."""
    parallel, whole = config.parallel, num_parameters(layers)
    if parallel.data * parallel.tensor == 1:
        return f"{whole:,} parameters"
    own = elements(config, layers)
    if parallel.shard != "none":
        own = ceil(own / parallel.data)
    return f"{own:,} parameters each" + (f" of {whole:,}" if own < whole else "")


def _parts(config: RootConfig) -> list[list[LayerSpec]]:
    """The layers of each rank; of each stage where fairscale runs all in one process."""
    by_name = {layer.name: layer for layer in describe(config.model)}
    return [[by_name[name] for name in names] for names in split(config.parallel, list(by_name))]


def _layer_names(layers: list[LayerSpec]) -> str:
    """ "embedding, block.0 ... block.3": a run of consecutive blocks by its ends."""
    names: list[str] = []
    last = None  # number of the block before
    for layer in layers:
        block = int(layer.name.split(".")[1]) if layer.kind == "block" else None
        if block is not None and last is not None and block == last + 1:
            names[-1] = f"{names[-1].partition(' ...')[0]} ... {layer.name}"
        else:
            names.append(layer.name)
        last = block
    return ", ".join(names)
