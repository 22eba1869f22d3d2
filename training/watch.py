"""A hang that names its cause: each rank shows what it does, and a rank that waits too long ends the run with a report.

    board      RUN/logs/rank_K.state, a few bytes in a memory map: written before and after each action (about a
               microsecond), readable by every rank, also when its owner is stopped or stuck
    watchdog   a thread a rank: has this rank waited longer than train.stall_timeout_s? Then the first to notice reads
               all boards and ends the run: "rank 2 waits for the input of 2F3 from rank 1, which is in 1B0 since 40 s"

Ranks of several machines need the run folder on a shared file system for each other's boards, which such systems may
show late; a rank's own wait is always told.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pipeline.action import Action

# pid, state, since (seconds since the epoch), action's stage, kind (its letter), micro-batch, peer rank, label
_RECORD = struct.Struct("<i i d i i i i 40s")
WORKS, RUNS, RAN, WAITS, REDUCES = range(5)
WAITING = (RAN, WAITS, REDUCES)  # states that last only as long as other ranks make them
POLL_S = 0.25


class StallError(RuntimeError):
    """A rank waited longer than train.stall_timeout_s; the message says for whom, and what every rank was doing."""


@dataclass(frozen=True)
class State:
    """What a rank was doing when its board was read."""

    rank: int
    pid: int
    state: int
    since: float  # seconds since the epoch
    action: Action | None
    peer: int
    label: str

    @property
    def is_waiting(self) -> bool:
        return self.state in WAITING

    @cached_property
    def is_stopped(self) -> bool:
        """By a signal (a process of this machine): it can do nothing, whatever it was doing."""
        try:
            letter = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return letter in "Tt"

    @property
    def is_held_up(self) -> bool:
        """By another rank, not by itself."""
        return self.is_waiting and not self.is_stopped

    def __str__(self) -> str:
        return self._what() + (" (stopped)" if self.is_stopped else "")

    def _what(self) -> str:
        if self.state == WAITS:
            what = "input" if self.action.kind == "F" else "output gradient"
            return f"waits for the {what} of {self.action} from rank {self.peer}"
        if self.state == RUNS:
            return f"is in {self.action}"
        if self.state == RAN:
            return f"has finished {self.action} and waits for its messages to be taken"
        if self.state == REDUCES:
            return f"waits for the other ranks in {self.label}"
        return f"is in {self.label}"


class Board:
    """This rank's part of what all ranks can read; the methods are called by the engine and the loop."""

    def __init__(self, run_dir: Path, rank: int):
        path = board_path(run_dir, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w+b") as file:
            file.truncate(_RECORD.size)
            self._map = mmap.mmap(file.fileno(), _RECORD.size)
        self.rank, self._pid = rank, os.getpid()
        self.peers: list[int] | None = None  # pipeline rank -> rank, where data or tensor ranks make them differ
        self.works("start-up")

    def waits(self, action: Action, peer: int) -> None:
        """For the message that `action` needs, from pipeline rank `peer`."""
        self._write(WAITS, action, peer if self.peers is None else self.peers[peer], b"")

    def runs(self, action: Action) -> None:
        self._write(RUNS, action, -1, b"")

    def ran(self, action: Action) -> None:
        """Until the next action, or the end of the flush, where the last messages must have been taken."""
        self._write(RAN, action, -1, b"")

    def reduces(self, label: str) -> None:
        """In something that all ranks do together."""
        self._write(REDUCES, None, -1, label.encode())

    def works(self, label: str) -> None:
        """On its own: no other rank can hold it up."""
        self._write(WORKS, None, -1, label.encode())

    def _write(self, state: int, action: Action | None, peer: int, label: bytes) -> None:
        stage, kind, microbatch = (action.stage, ord(action.kind), action.microbatch) if action else (-1, 0, -1)
        _RECORD.pack_into(self._map, 0, self._pid, state, time.time(), stage, kind, microbatch, peer, label)


def board_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"rank_{rank}.state"


def read(run_dir: Path, rank: int) -> State | None:
    """What rank K shows now; None when it has no board (yet)."""
    try:
        pid, state, since, stage, kind, microbatch, peer, label = _RECORD.unpack(board_path(run_dir, rank).read_bytes())
    except (FileNotFoundError, struct.error):
        return None
    action = Action(stage, chr(kind), microbatch) if kind else None
    return State(rank, pid, state, since, action, peer, label.rstrip(b"\0").decode(errors="replace"))


def report(states: list[State], now: float, waiter: int) -> str:
    """Who waits for whom: one sentence that ends at the rank which holds the others up, then every rank's state."""
    by_rank = {state.rank: state for state in states}
    headline, seen = "", set()
    state = by_rank[waiter]
    while state is not None and state.is_held_up and state.rank not in seen:
        seen.add(state.rank)
        cause = by_rank.get(state.peer) if state.state == WAITS else _first_missing(states, state)
        headline = f"rank {state.rank} {state}"
        if cause is not None and not cause.is_held_up:
            headline += f", which {cause}" if state.state == WAITS else f": rank {cause.rank} {cause}"
            headline += f" since {now - cause.since:.0f} s"
        state = cause
    if state is not None and state.is_held_up:
        headline += "; every rank waits for another"
    return "\n".join([headline, *(f"  rank {s.rank} {s} since {now - s.since:.1f} s" for s in states)])


def _first_missing(states: list[State], waiting: State) -> State | None:
    """The rank that keeps others waiting: one that nobody holds up, else one that waits for something else."""
    same = (waiting.state, waiting.label)
    others = [state for state in states if state.is_stopped or (state.state, state.label) != same]
    return min(others, key=lambda state: (state.is_held_up, state.since), default=None)


class Watchdog:
    """Ends the run when this rank waits longer than `timeout_s`.

    Args:
        end: called once, with the StallError, by the first rank that notices; must not return.
    """

    def __init__(self, board: Board, run_dir: Path, world: int, timeout_s: float, end: Callable[[StallError], None]):
        self._board, self._run_dir, self._world, self._timeout, self._end = board, run_dir, world, timeout_s, end
        self._over = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def close(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        last, ticks = None, 0.0
        while not self._over.wait(POLL_S):
            state = read(self._run_dir, self._board.rank)
            # the machine may sleep and clocks may jump: what counts is how long this thread saw the rank wait
            ticks = ticks + POLL_S if state == last else 0.0
            last = state
            if state.is_waiting and ticks >= self._timeout and self._is_first():
                states = [s for s in (read(self._run_dir, rank) for rank in range(self._world)) if s is not None]
                self._end(StallError(report(states, time.time(), self._board.rank)))
                return

    def _is_first(self) -> bool:
        try:
            os.close(os.open(self._run_dir / "logs" / "stalled", os.O_CREAT | os.O_EXCL))
            return True
        except FileExistsError:
            return False
