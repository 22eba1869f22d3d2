"""What is measured of a step: when a rank's actions and everything else began and ended. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pipeline.action import Action

REDUCE, OPTIMIZER, DATA, FLUSH = "reduce", "optimizer", "data", "flush"  # kinds of Span


@dataclass(slots=True)
class Timing:
    """One executed action; times in seconds of the rank's clock.

    start_s, end_s: of the computation, the loss included in the last stage's F. wait_s: when the rank began to wait
    for the message that the action needs; arrived_s: when that was there; None: it needs no message. sent_s: when the
    host began to hand the result to the link; handed_s: when it had; None: it goes to no other rank.
    """

    action: Action
    start_s: float
    end_s: float
    wait_s: float | None = None
    arrived_s: float | None = None
    sent_s: float | None = None
    handed_s: float | None = None

    def read(self, seconds: Callable[[Any], float | None]) -> Timing:
        """The same with every time (None too) as `seconds` gives it."""
        times = (self.start_s, self.end_s, self.wait_s, self.arrived_s, self.sent_s, self.handed_s)
        return Timing(self.action, *map(seconds, times))


@dataclass(frozen=True, slots=True)
class Span:
    """What a rank did that is no action: kind (REDUCE, OPTIMIZER, DATA; FLUSH where actions cannot be told apart), what
    exactly, and when, seconds."""

    kind: str
    label: str
    start_s: float
    end_s: float

    def read(self, seconds: Callable[[Any], float]) -> Span:
        """The same with both times as `seconds` gives them."""
        return Span(self.kind, self.label, seconds(self.start_s), seconds(self.end_s))


@dataclass
class RankStep:
    """One optimizer step of one rank, from `begin_s` to `end_s`; actions in the order in which they ran."""

    begin_s: float
    end_s: float
    timings: list[Timing] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def moved(self, by_s: float) -> RankStep:
        """The same on a clock that shows `by_s` more."""

        return self._read(lambda time: None if time is None else time + by_s)

    def scaled(self, factor: float) -> RankStep:
        """The same on a clock that runs `factor` times as fast."""
        return self._read(lambda time: None if time is None else time * factor)

    def _read(self, seconds: Callable[[float | None], float | None]) -> RankStep:
        timings = [timing.read(seconds) for timing in self.timings]
        return RankStep(seconds(self.begin_s), seconds(self.end_s), timings, [s.read(seconds) for s in self.spans])
