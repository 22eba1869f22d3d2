"""A rank's state under canonical names, and torch.distributed.checkpoint's files of it: written, hashed, read.

Each rank saves the names that it holds and loads the names that it needs; a tied weight is saved once, by its owner's
name, and loaded into both copies.
"""

from __future__ import annotations

import errno
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from pipeline.engines.base import is_shared, own_part
from pipeline.placement import Place
from training import manifest
from training.manifest import CheckpointError
from training.parts import counted_here

ENTRY_BYTES = 4096  # of file a tensor takes beside its values, at most


def state_of(parameters: dict[str, nn.Parameter], tied: dict[str, str], optimizer: torch.optim.Optimizer) -> dict:
    """Canonical name -> tensor, all that this rank holds and no other rank saves: no copies, the tensors themselves."""
    state = {}
    for name, parameter in parameters.items():
        if name not in tied:
            state[name] = parameter.detach()
            held = optimizer.state.get(parameter, {})
            state |= {f"optimizer.{name}.{key}": value for key, value in held.items() if isinstance(value, Tensor)}
    return state


class Target:
    """Where this rank's part of a checkpoint goes: parameters in place, the optimizer's tensors made for it."""

    def __init__(self, trainer, metadata: Metadata, *, weights_only: bool = False):
        self.state: dict[str, Tensor] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []  # (from, to): a tied weight's two copies on one rank
        self._trainer, saved = trainer, metadata.state_dict_metadata
        keys: dict[str, list[str]] = {}
        for name in saved:
            if name.startswith("optimizer.") and not weights_only:
                owner, _, key = name.removeprefix("optimizer.").rpartition(".")
                keys.setdefault(owner, []).append(key)
        for name, parameter in trainer.engine.parameters.items():
            owner = trainer.engine.tied.get(name, name)
            self._add(owner, parameter.detach(), saved)
            held = {}
            for key in keys.get(owner, []):
                full = f"optimizer.{owner}.{key}"
                size, dtype = saved[full].size, saved[full].properties.dtype
                held[key] = _empty(size, dtype, parameter)
                self._add(full, held[key], saved)
            trainer.optimizer.state[parameter] = held

    def _add(self, name: str, tensor: Tensor, saved: dict) -> None:
        if name not in saved or saved[name].size != tensor.shape:
            there = list(saved[name].size) if name in saved else "nothing of that name"
            raise CheckpointError(f"{name} is {list(tensor.shape)} in this run's model and {there} in the checkpoint")
        if saved[name].properties.dtype != tensor.dtype:
            raise CheckpointError(f"{name} is {tensor.dtype} here and {saved[name].properties.dtype} in the checkpoint")
        if name in self.state:
            self._copies.append((self.state[name], tensor))
        else:
            self.state[name] = tensor

    def finish(self) -> None:
        for source, copy in self._copies:
            copy.copy_(source)


def _empty(size: torch.Size, dtype: torch.dtype, parameter: nn.Parameter) -> Tensor:
    """A tensor of the optimizer's for this parameter; shared among ranks as the parameter is."""
    if not is_shared(parameter) or not size:
        return torch.empty(size, dtype=dtype, device=parameter.device)
    if size == parameter.shape:
        return torch.empty_like(parameter.detach(), dtype=dtype)
    from torch.distributed.tensor import zeros  # of another shape, such as Adafactor's rows: every rank has all of it

    return zeros(*size, dtype=dtype, device_mesh=parameter.device_mesh, placements=parameter.placements)


# --- torch.distributed.checkpoint ---

_ALLOWED = {  # all that a Metadata of plain tensors pickles
    "torch.distributed.checkpoint.metadata": (
        "Metadata MetadataIndex StorageMeta ChunkStorageMetadata TensorStorageMetadata TensorProperties "
        "_MEM_FORMAT_ENCODING"
    ).split(),
    "torch.distributed.checkpoint.filesystem": ["_StorageInfo"],
    "torch.serialization": ["_get_layout"],
    "torch": ["Size", "float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8"],
    "pathlib": ["PosixPath"],
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f".metadata names {module}.{name}, which no checkpoint of this project does")
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    """Tensors are read with weights_only=True (torch's own reader does); .metadata, a pickle, by an allow-list."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            return _Unpickler(file).load()


class Writer(dcp.FileSystemWriter):
    """Writes into step_N.tmp; when every rank has written and hashed its files, rank 0 makes it the complete step_N."""

    def __init__(self, folder: Path, facts: dict, keep: int):
        super().__init__(folder)
        self.folder, self._facts, self._keep = folder, facts, keep

    def write_data(self, plan, planner):
        written = super().write_data(plan, planner)
        names = {result.storage_data.relative_path for result in written.wait()}
        manifest.record_files(self.folder, self._facts["rank"], names)
        return written

    def finish(self, metadata, results) -> None:  # on the coordinator alone
        super().finish(metadata, results)
        manifest.record_files(self.folder, -1, [".metadata"])
        facts = {key: value for key, value in self._facts.items() if key != "rank"}
        manifest.commit(self.folder, facts | {"files": manifest.collect_files(self.folder)})
        manifest.prune(self.folder.parent.parent, self._keep)


def read_state(folder: Path) -> dict[str, Tensor]:
    """All of a complete checkpoint's tensors by name, on CPU, in one process and without a model."""
    reader = Reader(folder)
    saved = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty(meta.size, dtype=meta.properties.dtype) for name, meta in saved.items()}
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    dcp.load(state, storage_reader=reader, planner=DefaultLoadPlanner(False, False), no_dist=True)
    return state


def state_bytes(state: dict[str, Tensor], where: Place | None = None) -> int:
    """Bytes of this rank's part of the state, as they take on disk at most; `where`: without what another rank saves
    for this one, the same."""
    own = [own_part(tensor) for tensor in state.values() if where is None or counted_here(tensor, where)]
    return sum(tensor.numel() * tensor.element_size() + ENTRY_BYTES for tensor in own)


def cause(error: BaseException) -> str:
    """The cause inside what torch.distributed.checkpoint raises, which lists every rank's traceback."""
    where = ""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (error, _) = min(error.failures.items())
        where = f"rank {rank}: "
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{where}the disk is full"
    return where + (str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}")
