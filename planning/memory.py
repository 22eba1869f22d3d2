"""How many bytes one rank of a run will hold, and how many this machine has. Imports no torch.

Letters: B micro-batch size, in sequences.
"""

from __future__ import annotations

from math import ceil, inf, prod
from pathlib import Path

from conf.schema import OptimizerConfig, ParallelConfig, RootConfig
from models.describe import LayerSpec, document_bytes, is_hidden_matrix
from pipeline.placement import reduces_each
from planning.activations import rank_activation_bytes, tensor_elements

# What a rank's process holds before it builds its model, with torch.distributed up: its proportional share (PSS) was
# 258, 248 and 237 MiB with 1, 2 and 4 ranks (torch 2.13, CPU); a CUDA context lies outside what is counted here
RUNTIME_BYTES = 250 * 2**20


Moment = list[tuple[list[LayerSpec], float]]  # layers, and how many micro-batches of them are held


def rank_memory(
    config: RootConfig, layers: list[LayerSpec], held_micro_batches: int, moments: list[Moment] | None = None
) -> dict[str, int]:
    """What depends on the cut of one rank's bytes, in sums over layers that a search can use, with their `total`; the
    exact peak, which is less and more by temporary tensors, is planning.peak's.

    config: resolved. layers: those of the rank (of all stages where one process runs them all), in list order.
    held_micro_batches: forwards of a model stage that wait for their backward at the worst moment, as
    `pipeline.schedule.held_microbatches` counts them: with interleave v each is 1/v of the rank's layers (1 for the
    single engine, all chunks for fairscale).
    moments: the same stage by stage, where a rank has several; activations and logits are those of the worst.

    weights, gradients, optimizer: both copies of a tied weight count, on whichever ranks they are. activations: kept
    for the backward. logits: with what the loss makes of them.
    """
    parallel = config.parallel
    interleave = (parallel.interleave or 1) if parallel.engine == "torch" else 1
    held = held_micro_batches / interleave  # in units of all the rank's layers
    with_head = [count for moment in moments or [] for stage, count in moment if stage[-1].kind == "head"]
    parts = states(config, layers) | {
        "activations": max(_activations(config, moment) for moment in moments or [[(layers, held)]]),
        "logits": _logits(config, layers, max(with_head, default=held)),
    }
    return parts | {"total": sum(parts.values())}


def elements(config: RootConfig, layers: list[LayerSpec]) -> int:
    """Parameters of these layers on one tensor rank, both copies of a tied weight."""
    return sum(tensor_elements(layer, config.parallel.tensor) for layer in layers)


def states(config: RootConfig, layers: list[LayerSpec]) -> dict[str, int]:
    """Bytes of one rank's weights, their gradients and the optimizer's state."""
    weight = 8 if config.train.precision == "float64" else 4  # bfloat16 is autocast: all of it in float32
    t = config.parallel.tensor
    largest = max((tensor_elements(layer, t) for layer in layers), default=0) * weight
    state = weight * optimizer_elements(config.optimizer, layers, t)
    return _sharded(config.parallel, weight * elements(config, layers), state, largest)


def optimizer_elements(optimizer: OptimizerConfig, layers: list[LayerSpec], tensor: int = 1) -> int:
    """Elements that the optimizer keeps of these layers' parameters on one of `tensor` ranks; step counts aside.

    adamw: two moments. adafactor: the second moment, of a matrix its means over rows and columns (arXiv 1804.04235,
    section 3). muon: the momentum of a block's matrix, adamw's two moments of all else. These two take whole matrices
    only (conf/check.py).
    """
    every = sum(tensor_elements(layer, tensor) for layer in layers)
    matrices = {n: s for layer in layers for n, s in layer.parameters.items() if len(s) == 2}
    if optimizer.name == "adafactor":
        return every - sum(rows * columns - (rows + columns) for rows, columns in matrices.values())
    if optimizer.name == "muon":
        return 2 * every - sum(prod(shape) for name, shape in matrices.items() if is_hidden_matrix(name, shape))
    return every * {"adamw": 2, "sgd": 1 if optimizer.momentum else 0}[optimizer.name]


def _sharded(parallel: ParallelConfig, weights: int, states: int, largest: int) -> dict[str, int]:
    """Weights, gradients and optimizer state when data ranks share them (arXiv 1910.02054).

    In a pipeline the gradients are reduced after the last micro-batch, so all of them are held until then, whatever is
    shared. Full sharding keeps two layers whole: the one that computes, and the next one on its way. Beside its own
    part (without sharding: all of it) torch's FSDP2 computes with a gathered copy of the weights.
    """
    shard, d = parallel.shard, parallel.data
    own = weights if shard == "none" else ceil(weights / d)
    gathered = 0 if d == 1 else min(weights, 2 * largest) if shard == "full" else weights
    return {
        "weights": own + gathered,
        "gradients": ceil(weights / d) if reduces_each(parallel) else weights,
        "optimizer": states if shard == "none" else ceil(states / d),
    }


def micro_batch(config: RootConfig) -> int:
    """B: sequences that a stage takes at once: global_batch = data x accumulate x chunks x B."""
    return config.train.global_batch // (config.parallel.data * config.train.accumulate * config.parallel.chunks)


def _activations(config: RootConfig, moment: Moment) -> int:
    """Held micro-batches times what the layers keep; checkpointed ones keep the input of each unit that is recomputed
    together, and one unit at a time is whole again in its backward."""
    parallel = config.parallel
    total, one_unit = 0.0, 0
    for layers, held in moment:
        full = sum(layer_bytes(config, layer) for layer in layers)
        if parallel.checkpoint in (
            "never",
            "selective",
        ):  # fused attention keeps no scores
            total += held * full
            continue
        units = recomputed_units(parallel, layers)
        recomputed = {layer.name for unit in units for layer in unit}
        kept = sum(layer_bytes(config, unit[0], checkpointed=True) for unit in units)
        kept += sum(layer_bytes(config, layer) for layer in layers if layer.name not in recomputed)
        one_unit = max([one_unit, *(sum(layer_bytes(config, layer) for layer in unit) for unit in units)])
        whole = min(held, 1) if parallel.checkpoint == "except_last" else 0  # the last micro-batch is not checkpointed
        total += whole * full + (held - whole) * kept
    return ceil(total + one_unit)


def layer_bytes(config: RootConfig, layer: LayerSpec, checkpointed: bool = False) -> int:
    train, parallel = config.train, config.parallel
    work = layer, config.model, micro_batch(config), train.sequence, train.precision
    inside = 0 if checkpointed or config.data.cross_documents else document_bytes(*work, parallel.tensor)
    fused = config.hardware.device != "cpu"
    kept = rank_activation_bytes(*work, checkpointed, parallel.tensor, parallel.sequence_parallel, fused_norm=fused)
    return kept + inside


def recomputed_units(parallel: ParallelConfig, layers: list[LayerSpec]) -> list[list[LayerSpec]]:
    """Runs of layers that are recomputed together: checkpoint_interval consecutive blocks; a whole stage in fairscale
    (about: the layers in equal parts)."""
    if parallel.engine == "fairscale":
        size = ceil(len(layers) / parallel.stages)
        return [layers[start : start + size] for start in range(0, len(layers), size)]
    units: list[list[LayerSpec]] = []
    previous = None
    for layer in layers:
        index = int(layer.name.split(".")[1]) if layer.kind == "block" else None
        if index is not None:
            if previous is not None and index == previous + 1 and len(units[-1]) < parallel.checkpoint_interval:
                units[-1].append(layer)
            else:
                units.append([layer])
        previous = index
    return units


def _logits(config: RootConfig, layers: list[LayerSpec], held: float) -> int:
    """The log-probabilities that the loss keeps of every held micro-batch, and the logits where the engine keeps them
    too; for the one in its backward the gradients of both."""
    if all(layer.kind != "head" for layer in layers):
        return 0
    loss = 8 if config.train.precision == "float64" else 4
    logits = 2 if config.train.precision == "bfloat16" else loss
    kept = loss + (logits if config.parallel.engine == "torch" else 0)
    number = micro_batch(config) * config.train.sequence * config.model.vocabulary // config.parallel.tensor
    return number * (ceil(held) * kept + 2 * loss)


def machine_memory_bytes(root: str = "/") -> int:
    """Bytes that new processes can take without swapping: MemAvailable, or what the control groups above this process
    leave, whichever is less. `root`: where /proc and /sys are."""
    proc, groups = Path(root, "proc"), Path(root, "sys/fs/cgroup")
    meminfo = dict(line.split(":") for line in (proc / "meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            available = min(available, _left_in_groups(groups, path, "memory.max", "memory.current"))
        elif "memory" in controllers.split(","):  # version 1
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            available = min(available, _left_in_groups(groups / "memory", path, *names))
    return max(0, available)


def _left_in_groups(mount: Path, path: str, limit_name: str, usage_name: str) -> float:
    """The least that any group from `path` up to the mount leaves; infinity where none has a limit. Inactive file pages
    count as free: the kernel drops them first."""
    folder, left = mount / path.strip("/"), inf
    for group in [folder, *folder.parents]:
        limit, usage = _read(group / limit_name).strip(), _read(group / usage_name).strip()
        if limit.isdigit() and usage.isdigit():
            pages = dict(line.split() for line in _read(group / "memory.stat").splitlines())
            inactive = pages.get("total_inactive_file", pages.get("inactive_file", 0))  # version 1, version 2
            left = min(left, int(limit) - int(usage) + int(inactive))
        if group == mount:
            break
    return left


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
