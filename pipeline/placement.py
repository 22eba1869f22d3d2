"""Which part of a layout each process is: ranks are numbered tensor first, then data, then pipeline. No torch.

stages=2 data=2 tensor=2      pipeline rank 0        pipeline rank 1
                 data rank 0  0 1                    4 5             tensor ranks side by side: they talk most and
                 data rank 1  2 3                    6 7             stay inside a node; pipeline ranks talk least
"""

from __future__ import annotations

from typing import NamedTuple

from conf.schema import ParallelConfig
from conf.words import count

DIMENSIONS = ("pipeline", "data", "tensor")  # of the device mesh, outermost first


class Place(NamedTuple):
    """A rank's coordinates in the device mesh."""

    pipeline: int = 0
    data: int = 0
    tensor: int = 0


FIRST = Place()  # also of a layout with one rank


def mesh_shape(parallel: ParallelConfig) -> Place:
    """Pipeline, data and tensor ranks; the engines other than torch are one process."""
    return Place(parallel.stages, parallel.data, parallel.tensor) if parallel.engine == "torch" else Place(1, 1, 1)


def num_ranks(parallel: ParallelConfig) -> int:
    """Processes that a run of this layout needs."""
    p, d, t = mesh_shape(parallel)
    return p * d * t


def reduces_each(parallel: ParallelConfig) -> bool:
    """Whether data ranks add up their gradients after each micro-batch: a pipeline does it once, at its end."""
    return parallel.shard in ("gradients", "full") and parallel.stages == 1 and parallel.data > 1


def place(rank: int, parallel: ParallelConfig) -> Place:
    """Of a rank 0 .. num_ranks - 1."""
    _, d, t = mesh_shape(parallel)
    return Place(rank // (d * t), rank // t % d, rank % t)


def pipeline_of(rank: int, parallel: ParallelConfig) -> list[int]:
    """The ranks of this rank's pipeline, by pipeline rank."""
    p, d, t = mesh_shape(parallel)
    return [rank % (d * t) + index * d * t for index in range(p)]


def ranks_of_stage(pipeline_rank: int, parallel: ParallelConfig) -> list[int]:
    """The data and tensor ranks of a pipeline rank, ascending."""
    _, d, t = mesh_shape(parallel)
    return list(range(pipeline_rank * d * t, (pipeline_rank + 1) * d * t))


def ranks_text(ranks: list[int]) -> str:
    """Consecutive ranks for the reader: "rank 3", "ranks 2, 3", "ranks 0 ... 63"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks))}" if len(ranks) <= 4 else f"ranks {ranks[0]} ... {ranks[-1]}"


def placement_lines(parallel: ParallelConfig, devices_per_node: int | None) -> list[str]:
    """Where the ranks of a layout with data or tensor ranks go, for the reader; empty for a pipeline alone."""
    p, d, t = mesh_shape(parallel)
    if d * t == 1:
        return []
    lines = [f"{p} pipeline x {d} data x {t} tensor ranks; rank = (pipeline x {d} + data) x {t} + tensor"]
    if devices_per_node:
        nodes = -(-p * d * t // devices_per_node)
        inside = [f"tensor {min(t, devices_per_node)} of {t}"]
        inside.append(f"data {min(d, max(1, devices_per_node // t))} of {d}")
        inside.append(f"pipeline {min(p, max(1, devices_per_node // (t * d)))} of {p}")
        lines.append(f"{count(nodes, 'node')} of {count(devices_per_node, 'device')}; inside one: {', '.join(inside)}")
    return lines
