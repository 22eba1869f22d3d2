"""Is the gradient right? One optimizer step of an engine against one process with plain autograd, in float64.

    measure()    each rank: loss, every gradient, the global norm, the weights after one step of plain SGD
    reference()  one process: the same from the layers alone, the whole batch at once, a tied weight truly shared
    compare()    the relative difference of every number, and parameters that are missing or there twice

`python -m training.parity FOLDER` is one rank of verify.py: it takes the cases in FOLDER/cases.json one after the
other and rank 0 leaves FOLDER/reports.json.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as fn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import models
from conf.schema import RootConfig, from_dict
from models.describe import describe
from models.dropout import sample_keys
from pipeline.engines.base import Batch, Engine
from pipeline.placement import Place, mesh_shape, num_ranks, place
from training import launch
from training.build import build_engine, canonical_order, make_mesh
from training.comparison import Report, Row
from training.optimizer import clip_, global_norm
from training.parts import whole
from training.record import write_result

LEARNING_RATE = 0.1  # of the one step of plain SGD; any value that moves the weights would do
REFERENCE_TOKENS = 8192  # the reference takes the batch in slices of about this many tokens: its memory is bounded


@dataclass
class Measured:
    """One optimizer step of one rank (of the reference: of everything). Tensors float64 on the CPU."""

    loss: float  # mean over tokens, nats; 0 on ranks without the last stage
    norm: float  # of the whole model's gradient, before clipping
    gradients: dict[str, Tensor]  # before clipping, canonical names
    weights: dict[str, Tensor]  # after the step, canonical names


def batch_of(config: RootConfig) -> Batch:
    """Random inputs and targets [N, T], independent of each other: no wrong pairing can hide. Dropout keys [N]; and
    where attention stays inside documents, those of each sequence [N, T]."""
    generator = torch.Generator().manual_seed(config.train.seed)
    shape = (2, config.train.global_batch, config.train.sequence)
    inputs, targets = torch.randint(0, config.model.vocabulary, shape, generator=generator)
    keys = sample_keys(config.train.seed, 0, torch.arange(len(inputs))) if config.model.dropout else None
    documents = None
    if not config.data.cross_documents:  # about five a sequence, with ends of its own, and one in the middle of each
        ends = torch.rand(inputs.shape, generator=generator) < min(0.5, 4 / config.train.sequence)
        ends[:, (config.train.sequence - 1) // 2] = True
        documents = ends.cumsum(1) - ends.long()
    return Batch(inputs, targets, keys, documents)


def measure(
    config: RootConfig,
    rank: int,
    group: dist.ProcessGroup | None,
    engine: Engine | None = None,
    mesh: DeviceMesh | None = None,
) -> Measured:
    """One optimizer step of this rank through the engine of `config`: flushes, tied sum, norm, clipping, SGD.

    `group`: the ranks of the layout (None when there is one); `mesh`: `make_mesh`'s. All of them call it. Gradients and
    weights that ranks share are put together.
    """
    engine = engine or build_engine(config, rank=rank, device=torch.device("cpu"), group=group, mesh=mesh)
    where = place(rank, config.parallel)
    try:
        batch, data = batch_of(config), config.parallel.data
        loss, scale = 0.0, 1.0 / batch.inputs.numel()
        flushes = batch.chunk(config.train.accumulate * data)[where.data :: data]
        for number, flush in enumerate(flushes, 1):
            flush.inputs = flush.inputs if engine.needs_inputs else None
            flush.targets = flush.targets if engine.needs_targets else None
            loss += float(engine.step(flush, scale, last=number == len(flushes)))
        engine.sum_tied_gradients()
        norm = global_norm(engine.parameters, canonical_order(describe(config.model)), engine.tied, group, where)
        gradients = {name: whole(parameter.grad).clone() for name, parameter in engine.parameters.items()}
        if config.optimizer.clip_norm is not None:
            clip_(engine.parameters, norm, config.optimizer.clip_norm)
        torch.optim.SGD(engine.parameters.values(), lr=LEARNING_RATE, foreach=False).step()
        weights = {name: whole(parameter.detach()) for name, parameter in engine.parameters.items()}
        own_loss = loss if where.tensor == 0 else 0.0  # the same on all tensor ranks
        return Measured(own_loss, float(norm), gradients, weights)
    finally:
        engine.close()


def reference(config: RootConfig) -> Measured:
    """The same step by plain autograd: no stages, no engine, torch's own clipping, one leaf for a tied weight."""
    layers = models.build(config.model, seed=config.train.seed, dtype=torch.float64)
    modules = dict(layers)
    parameters = {f"{name}.{own}": p for name, module in layers for own, p in module.named_parameters()}
    for layer in describe(config.model):
        for copy, owner in layer.tied.items():
            setattr(modules[layer.name], copy.removeprefix(f"{layer.name}."), parameters[owner])
            del parameters[copy]
    batch = batch_of(config)
    loss, scale = 0.0, 1.0 / batch.inputs.numel()
    for piece in batch.chunk(min(len(batch.inputs), -(-batch.inputs.numel() // REFERENCE_TOKENS))):
        x = piece.inputs
        for _, module in layers:
            x = module(x, piece.keys, piece.documents)
        part = fn.cross_entropy(x.flatten(0, 1), piece.targets.flatten(), reduction="sum")
        (part * scale).backward()
        loss += float(part.detach()) * scale
    gradients = {name: parameter.grad.clone() for name, parameter in parameters.items()}
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
    if config.optimizer.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(parameters.values(), config.optimizer.clip_norm)
    torch.optim.SGD(parameters.values(), lr=LEARNING_RATE).step()
    return Measured(loss, norm, gradients, {name: p.detach() for name, p in parameters.items()})


def compare(config: RootConfig, ranks: list[Measured], expected: Measured) -> Report:
    """Every rank's numbers against the reference's; a parameter that no rank has, or two have, counts as infinite."""
    tied = {copy: owner for layer in describe(config.model) for copy, owner in layer.tied.items()}
    rows, seen = [], set()
    for rank, measured in enumerate(ranks):
        for name, gradient in measured.gradients.items():
            owner = tied.get(name, name)
            gradient_error = _relative(gradient, expected.gradients[owner])
            weight_error = _relative(measured.weights[name], expected.weights[owner])
            key = (place(rank, config.parallel)[1:], name)  # each pipeline has the model once
            twice = math.inf if key in seen else 0.0
            rows.append(Row(name, rank, max(gradient_error, twice), weight_error))
            seen.add(key)
    _, data, tensor = mesh_shape(config.parallel)
    for where in product(range(data), range(tensor)):
        names = [name for name in [*expected.gradients, *tied] if (where, name) not in seen]
        rows += [Row(name, -1, math.inf, math.inf) for name in names]
    rows.sort(key=lambda row: -max(row.gradient_error, row.weight_error))
    loss = sum(measured.loss for measured in ranks)
    norms = [abs(measured.norm / expected.norm - 1) for measured in ranks]
    return Report(abs(loss / expected.loss - 1), max(norms), rows)


def _relative(got: Tensor, expected: Tensor) -> float:
    scale = float(expected.norm())
    distance = float((got - expected).norm())
    error = distance / scale if scale > 0 else distance
    return error if math.isfinite(error) else math.inf


# --- one rank of verify.py ---


def main(folder: Path) -> None:
    """Every case of FOLDER/cases.json on the first ranks that it needs; the others wait for the next."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    # putting a weight together that is shared over two dimensions takes two collectives, of which torch warns
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    with launch.guard(folder, rank):
        configs = [from_dict(values) for values in json.loads((folder / "cases.json").read_text())]
        dist.init_process_group("gloo", timeout=timedelta(seconds=configs[0].train.stall_timeout_s))
        groups = {world: dist.group.WORLD} if world > 1 else {}
        meshes: dict[Place, DeviceMesh | None] = {}
        reports, expected = [], {}
        for number, config in enumerate(configs):
            needed = num_ranks(config.parallel)
            if needed > 1 and needed not in groups:
                groups[needed] = dist.new_group(list(range(needed)))  # every rank makes it, in the same order
            shape = mesh_shape(config.parallel)
            if shape not in meshes:
                meshes[shape] = make_mesh(config.parallel, "cpu")
            if rank < needed:
                measured = measure(config, rank, groups.get(needed), mesh=meshes[shape])
                torch.save(asdict(measured), _path(folder, rank))
            if world > 1:
                dist.barrier()
            if rank == 0:
                reports.append(_report(config, folder, needed, expected))
                _say_progress(number + 1, len(configs))
            if world > 1:
                dist.barrier()  # rank files are read before the next case overwrites them
        if rank == 0:
            (folder / "reports.json").write_text(json.dumps([asdict(report) for report in reports]))
            write_result(folder, {"status": "completed"})
        dist.destroy_process_group()


def _report(config: RootConfig, folder: Path, needed: int, expected: dict[str, Measured]) -> Report:
    """`expected` keeps the last reference: cases that differ only in how they are run share it."""
    train, documents = config.train, config.data.cross_documents
    key = repr((config.model, train.global_batch, train.sequence, train.seed, config.optimizer, documents))
    if key not in expected:
        expected.clear()
        expected[key] = reference(config)
    ranks = [Measured(**torch.load(_path(folder, rank), weights_only=True)) for rank in range(needed)]
    return compare(config, ranks, expected[key])


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.pt"


def _say_progress(done: int, total: int) -> None:
    if total > 1 and (done % 20 == 0 or done == total):
        print(f"{done} of {total} cases", flush=True)


if __name__ == "__main__":
    launch.die_with_parent()
    main(Path(sys.argv[1]))
