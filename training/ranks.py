"""The processes of a run: who this one is, its device, its memory, and the one reduction that a step needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from conf.device import keep_large_tensors_apart
from training.watch import Board


@dataclass
class Ranks:
    """This process among `world`; with one process no process group is made."""

    rank: int
    world: int
    local_rank: int
    device: torch.device
    memory_baseline: int = 0  # bytes resident when this rank was ready to build its model
    board: Board | None = None  # where it shows what it does, when there are others to see it

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise sum over all ranks, in float64; every rank gets it."""
        return self.sum_of(torch.tensor(values, dtype=torch.float64, device=self.device)).tolist()

    def sum_of(self, values: torch.Tensor) -> torch.Tensor:
        """Element-wise sum over all ranks, in place; every rank gets it."""
        if self.world > 1:
            with self.together("the sum of the step's figures"):
                dist.all_reduce(values)
        return values

    @contextmanager
    def together(self, label: str) -> Iterator[None]:
        """Around something that this rank cannot finish without the others."""
        if self.board is not None:
            self.board.reduces(label)
        yield
        self.works("the step")

    def works(self, label: str) -> None:
        """From here on this rank is on its own."""
        if self.board is not None:
            self.board.works(label)

    def gather(self, value: float) -> list[float]:
        """The value of every rank, in rank order, on every rank."""
        return self.sum([value if rank == self.rank else 0.0 for rank in range(self.world)])

    def start_counting_memory(self) -> None:
        """From here on `peak_memory_bytes` counts: called when the rank is ready to build its model."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        keep_large_tensors_apart()
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark (Linux proc(5))
        except OSError:
            pass  # the mark then also covers start-up, whose peak is small
        self.memory_baseline = _status_bytes("VmRSS")

    def peak_memory_bytes(self) -> int:
        """CUDA: the allocator's peak; CPU: growth of the resident memory since `start_counting_memory`, at its peak."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return max(0, _status_bytes("VmHWM") - self.memory_baseline)

    def peak_resident_bytes(self) -> int:
        """Peak of the whole process' resident memory."""
        return _status_bytes("VmHWM")


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def start(device_kind: str, store: dist.Store | None, rank: int, world: int, timeout_s: float) -> Ranks:
    """Joins the process group (gloo on CPU, NCCL on CUDA) of `store`; None: this process is alone and needs none.

    `timeout_s`: how long a rank waits for another before torch gives up: longer than the watchdog, which can say why.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    device = torch.device("cuda", local_rank) if device_kind == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if store is not None:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("ranks", store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    return Ranks(rank, world, local_rank, device)
