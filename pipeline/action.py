"""What a schedule is made of: actions such as 2F0, and for each rank the list of those that it runs in order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

KINDS = {
    "F": "forward",
    "B": "backward, whole (input and weights)",
    "I": "backward for the input (what the stage before waits for)",
    "W": "backward for the weights (nobody waits for it)",
}

_PATTERN = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """One micro-batch through one model stage: `2F0` is stage 2, forward, micro-batch 0."""

    stage: int
    kind: str  # one of KINDS
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """`"2F0"` -> Action(2, "F", 0). ValueError for anything else."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is not an action: write stage, kind (one of {''.join(KINDS)}) and micro-batch, e.g. 2F0"
            )
        return cls(int(match[1]), match[2], int(match[3]))


class Impossible(ValueError):
    """A layout that its schedule does not have: a sweep over schedules, stages and chunks leaves it out."""


@dataclass(frozen=True)
class Schedule:
    """The order in which each rank runs its actions; sends and receives follow from it.

    Ranks, model stages and micro-batches count from 0. Rank r runs `actions[r]` from left to right, each action as
    soon as its inputs are there.
    """

    name: str
    stages: int  # pipeline ranks, p
    chunks: int  # micro-batches, m
    interleave: int  # model stages a rank, v
    actions: list[list[Action]]  # one list a rank

    @property
    def num_stages(self) -> int:
        """Model stages, p * v."""
        return self.stages * self.interleave

    @cached_property
    def rank_of(self) -> list[int]:
        """The rank of each model stage. ValueError when a stage is nowhere."""
        ranks: dict[int, int] = {}
        for rank, row in enumerate(self.actions):
            for stage in {action.stage for action in row}:
                ranks.setdefault(stage, rank)
        missing = [stage for stage in range(self.num_stages) if stage not in ranks]
        if missing:
            raise ValueError(f"schedule {self.name}: no rank runs model stage {missing[0]} of {self.num_stages}")
        return [ranks[stage] for stage in range(self.num_stages)]

    @cached_property
    def splits_backward(self) -> bool:
        """Whether some backward runs as I and W."""
        return any(action.kind in "IW" for row in self.actions for action in row)

    @cached_property
    def reverses_backward(self) -> bool:
        """Whether some stage's backwards take the micro-batches out of ascending order: gradients are then summed in
        another order than one process would, equal to rounding only."""
        last: dict[tuple[int, str], int] = {}
        for row in self.actions:
            for stage, kind, microbatch in row:
                if kind != "F":
                    # a whole backward adds to the weights' gradients at B, a split one at W
                    key = (stage, "I" if kind == "I" else "W")
                    if last.get(key, -1) > microbatch:
                        return True
                    last[key] = microbatch
        return False
