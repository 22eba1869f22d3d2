"""What a rank is doing at this moment, and when each action began and ended. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from pipeline.action import Action
from pipeline.spans import RankStep, Span, Timing


class Board(Protocol):
    """Where a rank shows what it does, for a watchdog: see training.watch."""

    def waits(self, action: Action, peer: int) -> None:
        """For the message that `action` needs, from pipeline rank `peer`."""

    def runs(self, action: Action) -> None: ...

    def ran(self, action: Action) -> None: ...


class Stamps:
    """Moments as the host sees them: a stamp is the time itself, in seconds."""

    def begin(self) -> None:
        """Before the first stamp of a step."""

    def now(self) -> Any:
        """A stamp of this moment."""
        return time.perf_counter()

    def seconds(self, stamp: Any) -> float:
        """The time of a stamp, on `time.perf_counter`'s scale; asked once the step is over."""
        return stamp


class Clock:
    """Time stamps of this rank while `on`: of its actions, of the messages that they wait for, of all else in a step.

    Waiting for a message is before an action, not inside it. A stamp costs a fraction of a microsecond on a CPU.
    """

    def __init__(self) -> None:
        self.on = False
        self.board: Board | None = None
        self.stamps = Stamps()  # on an accelerator: events in its stream (pipeline/engines/cuda_stamps.py)
        self.timings: list[Timing] = []  # of this step; their times are stamps, as those of the spans
        self._spans: list[Span] = []
        self._begin: Any = None
        self._wait: Any = None  # of the action that comes next
        self._arrived: Any = None

    def begin(self) -> None:
        """A step begins; the one before is forgotten."""
        self.timings, self._spans, self._wait, self._arrived, self.on = [], [], None, None, True
        self.stamps.begin()
        self._begin = self.stamps.now()

    def end(self) -> RankStep:
        """The step is over: all of it since `begin`, in seconds."""
        end, self.on = self.stamps.now(), False

        def seconds(stamp: Any) -> float | None:
            return None if stamp is None else self.stamps.seconds(stamp)

        timings = [timing.read(seconds) for timing in self.timings]
        return RankStep(seconds(self._begin), seconds(end), timings, [span.read(seconds) for span in self._spans])

    def waits(self, action: Action, peer: int) -> None:
        """From now on for the message that `action`, which comes next, needs from pipeline rank `peer`."""
        if self.on:
            self._wait = self.stamps.now()
        if self.board is not None:
            self.board.waits(action, peer)

    def arrived(self) -> None:
        """The message that was waited for is there. The last call before the action counts."""
        if self.on:
            self._arrived = self.stamps.now()

    def run(self, action: Action, function, *args, **kwargs):
        if self.board is not None:
            self.board.runs(action)
        if not self.on:
            result = function(*args, **kwargs)
        else:
            wait, self._wait = self._wait, None
            arrived = None if wait is None else self._arrived
            start = self.stamps.now()
            result = function(*args, **kwargs)
            self.timings.append(Timing(action, start, self.stamps.now(), wait, arrived))
        if self.board is not None:
            self.board.ran(action)
        return result

    def extend(self, action: Action, function, *args):
        """Runs `function` as a further part of `action`, which was run last (the loss is part of the last forward)."""
        if self.board is not None:
            self.board.runs(action)
        result = function(*args)
        if self.on:
            self.timings[-1].end_s = self.stamps.now()
        if self.board is not None:
            self.board.ran(action)
        return result

    def sends(self) -> None:
        """From now on the result of the action that was run last is handed to the link."""
        if self.on:
            self.timings[-1].sent_s = self.stamps.now()

    def sent(self) -> None:
        """It has been handed over. The last call counts."""
        if self.on:
            self.timings[-1].handed_s = self.stamps.now()

    @contextmanager
    def span(self, kind: str, label: str) -> Iterator[None]:
        """Around what is no action: see `Span`."""
        start = self.stamps.now() if self.on else None
        yield
        if self.on:
            self._spans.append(Span(kind, label, start, self.stamps.now()))
