"""What a rank is doing at this moment, and when each action began and ended. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pipeline.action import Action


@dataclass(frozen=True)
class Timing:
    """One executed action: start and end in seconds of this process' `time.perf_counter`."""

    action: Action
    start_s: float
    end_s: float


class Board(Protocol):
    """Where a rank shows what it does, for a watchdog: see training.watch."""

    def waits(self, action: Action, peer: int) -> None:
        """For the message that `action` needs, from pipeline rank `peer`."""

    def runs(self, action: Action) -> None: ...

    def ran(self, action: Action) -> None: ...


class Clock:
    """Time stamps of the actions of this rank while `on`; waiting for a message is before an action, not inside it."""

    def __init__(self) -> None:
        self.on = False
        self.timings: list[Timing] = []
        self.board: Board | None = None
        self.settle: Callable[[], None] = lambda: None  # waits for an accelerator to finish what it was given

    def waits(self, action: Action, peer: int) -> None:
        if self.board is not None:
            self.board.waits(action, peer)

    def run(self, action: Action, function, *args, **kwargs):
        if self.board is not None:
            self.board.runs(action)
        start = self._now()
        result = function(*args, **kwargs)
        if self.on:
            self.timings.append(Timing(action, start, self._now()))
        if self.board is not None:
            self.board.ran(action)
        return result

    def extend(self, action: Action, function, *args):
        """Runs `function` as a further part of `action`, which was run last (the loss is part of the last forward)."""
        if self.board is not None:
            self.board.runs(action)
        result = function(*args)
        if self.on:
            self.timings[-1] = Timing(action, self.timings[-1].start_s, self._now())
        if self.board is not None:
            self.board.ran(action)
        return result

    def _now(self) -> float:
        if self.on:
            self.settle()
        return time.perf_counter()
