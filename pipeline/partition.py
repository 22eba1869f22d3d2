"""Cuts the ordered list of layers into model stages, and says which rank holds which. Imports no torch."""

from __future__ import annotations

from conf.schema import ParallelConfig
from pipeline.schedule import make_schedule


def num_ranks(parallel: ParallelConfig) -> int:
    """Processes that a run of this layout needs: the torch engine has one a stage, the other engines one in all."""
    return parallel.stages if parallel.engine == "torch" else 1


def rank_of_stage(parallel: ParallelConfig) -> list[int]:
    """The pipeline rank (for fairscale: the device) of every model stage, in stage order; chunks must be resolved."""
    if parallel.engine != "torch":
        return list(range(parallel.stages))
    return make_schedule(parallel.schedule, parallel.stages, parallel.chunks, parallel.interleave).rank_of


def split_stages(balance: str | list[int], num_stages: int, layers: list[str]) -> list[list[str]]:
    """Layer names of each model stage: every layer once, in order, no stage empty.

    `balance` is "uniform" (blocks spread evenly; where they do not divide, the middle stages take one more, since the
    first stage also has the embedding and the last one the head) or a list with one count for each model stage.
    A list that sums to the number of blocks counts blocks (the embedding joins the first stage, norm and head the
    last); one that sums to all layers is literal.

    Raises ValueError when there are more stages than blocks or the list does not fit.
    """
    blocks = [name for name in layers if name.startswith("block.")]
    if balance == "uniform":
        return _with_ends(_uniform(len(blocks), num_stages), layers, blocks)
    if isinstance(balance, str):
        raise ValueError(f"parallel.balance={balance} is unknown; known: uniform, or a list of {num_stages} counts")
    counts = list(balance)
    if len(counts) != num_stages:
        raise ValueError(
            f"parallel.balance={counts} has {len(counts)} entries, but there are {num_stages} model stages: "
            f"give one count for each"
        )
    if any(not isinstance(count, int) or isinstance(count, bool) or count < 1 for count in counts):
        raise ValueError(f"parallel.balance={counts}: every model stage needs a whole number of at least 1")
    if sum(counts) == len(blocks):
        return _with_ends(counts, layers, blocks)
    if sum(counts) == len(layers):
        return _cut(counts, layers)
    raise ValueError(
        f"parallel.balance={counts} sums to {sum(counts)}: it must sum to {len(blocks)} (the blocks) "
        f"or to {len(layers)} (all layers: {', '.join(_abbreviated(layers))})"
    )


def split(parallel: ParallelConfig, layers: list[str]) -> list[list[str]]:
    """Layer names of each rank (of each device for fairscale), in stage order; see `split_stages`."""
    ranks = rank_of_stage(parallel)
    held: list[list[str]] = [[] for _ in range(max(ranks) + 1)]
    for rank, names in zip(ranks, split_stages(parallel.balance, len(ranks), layers), strict=True):
        held[rank] += names
    return held


def _uniform(num_blocks: int, num_stages: int) -> list[int]:
    if num_stages > num_blocks:
        raise ValueError(
            f"{num_stages} model stages cannot share {num_blocks} blocks without an empty one: "
            f"use at most {num_blocks} stages, or a deeper model"
        )
    each, extra = divmod(num_blocks, num_stages)
    counts = [each] * num_stages
    # the head is usually the dearest extra layer, the embedding the next: the last stage takes one more block last
    takers = [*range(1, num_stages - 1), 0, num_stages - 1]
    for stage in takers[:extra]:
        counts[stage] += 1
    return counts


def _with_ends(counts: list[int], layers: list[str], blocks: list[str]) -> list[list[str]]:
    counts = list(counts)
    counts[0] += layers.index(blocks[0])
    counts[-1] += len(layers) - 1 - layers.index(blocks[-1])
    return _cut(counts, layers)


def _cut(counts: list[int], layers: list[str]) -> list[list[str]]:
    stages, start = [], 0
    for count in counts:
        stages.append(layers[start : start + count])
        start += count
    assert start == len(layers)
    return stages


def _abbreviated(layers: list[str]) -> list[str]:
    return layers if len(layers) <= 6 else [*layers[:2], "…", *layers[-3:]]
