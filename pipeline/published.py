"""The published schedules, each a pure function (stages, chunks, interleave) -> the list of actions of each rank.

In the grids below a row is a rank, time runs to the right and a column is the time of one F. A cell is kind and
micro-batch (with more than one model stage a rank: stage, kind, micro-batch). F forward; B the whole backward, two
columns; I backward for the input and W backward for the weights, one column each; `.` idle.
"""

from __future__ import annotations

from pipeline.action import Action


def gpipe(stages: int, chunks: int, interleave: int = 1) -> list[list[Action]]:
    """Fill and drain: all forwards, then all backwards (GPipe, arXiv 1811.06965). Holds every micro-batch.

    stages=3 chunks=4:
        F0 F1 F2 F3 .  .  .  .  .  .  B0    B1    B2    B3
        .  F0 F1 F2 F3 .  .  .  B0    B1    B2    B3    .  .
        .  .  F0 F1 F2 F3 B0    B1    B2    B3    .  .  .  .
    """
    return [
        [Action(rank, "F", m) for m in range(chunks)] + [Action(rank, "B", m) for m in range(chunks)]
        for rank in range(stages)
    ]


def one_f_one_b(stages: int, chunks: int, interleave: int = 1) -> list[list[Action]]:
    """1F1B: as gpipe, but a backward runs as soon as it can (PipeDream-Flush, arXiv 2006.09503).

    The same bubble as gpipe; rank r holds at most stages - r micro-batches.

    stages=3 chunks=4:
        F0 F1 F2 .  .  .  .  B0    F3 B1    .  B2    .  B3
        .  F0 F1 .  .  B0    F2 B1    F3 B2    .  B3    .  .
        .  .  F0 B0    F1 B1    F2 B2    F3 B3    .  .  .  .
    """
    ranks = []
    for rank in range(stages):
        warm_up = min(stages - 1 - rank, chunks)
        row = [Action(rank, "F", m) for m in range(warm_up)]
        for m in range(warm_up, chunks):
            row += [Action(rank, "F", m), Action(rank, "B", m - warm_up)]
        row += [Action(rank, "B", m) for m in range(chunks - warm_up, chunks)]
        ranks.append(row)
    return ranks
