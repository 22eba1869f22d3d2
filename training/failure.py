"""Which rank's error ended a run: each rank records its own, and the parent picks the cause from among the victims."""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# what the ranks that were talking to a dead one say
VICTIM_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")
VICTIM_MESSAGES = (
    "Connection closed by peer",
    "Connection reset",
    "Connection refused",
    "Broken pipe",
    "Application timeout caused pair closure",
    "Timed out waiting",
    "Socket Timeout",
    "failed to recv",
    "remote process exited",
    "NCCL communicator was aborted",
    "ncclRemoteError",
)
OUT_OF_MEMORY_MESSAGES = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")

# a signal that a rank brings on itself or gets from outside; SIGTERM is what a failing group is sent, SIGABRT what a
# broken connection can end in
KILLS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
# seconds within which a kill counts as the first event: the ranks that outlive SIGTERM are killed later than this
KILL_WINDOW_S = 1.5


@dataclass
class RankError:
    """One rank's end: what it recorded itself, or only how it exited."""

    rank: int
    time: float  # seconds since the epoch
    type: str  # the exception's class; "" when the rank recorded nothing
    message: str
    traceback: str = ""
    exit_code: int | None = None  # negative: killed by that signal
    memory_ran_out: bool = False  # the kernel has killed a process for memory meanwhile

    @property
    def is_victim(self) -> bool:
        """True when the error only says that another rank went away or never answered."""
        return self.type in VICTIM_TYPES or any(text.lower() in self.message.lower() for text in VICTIM_MESSAGES)

    @property
    def is_stall(self) -> bool:
        """True for training.watch's report of a hang: it has looked at every rank."""
        return self.type == "StallError"

    @property
    def is_out_of_memory(self) -> bool:
        """True for an allocation that failed, on the accelerator or in the machine's memory."""
        known = self.type in ("OutOfMemoryError", "MemoryError")
        return known or self.memory_ran_out or any(text in self.message for text in OUT_OF_MEMORY_MESSAGES)

    @property
    def headline(self) -> str:
        """One line: which rank, and what happened to it."""
        if self.is_stall:
            return f"stalled: {self.message.strip().partition(chr(10))[0]}"
        if self.type:
            first_line = self.message.strip().partition("\n")[0]
            return f"rank {self.rank} failed: {self.type}: {first_line}".removesuffix(": ")
        if self.exit_code is not None and self.exit_code < 0:
            name = signal.Signals(-self.exit_code).name
            hint = ": the kernel ran out of memory" if self.memory_ran_out else ""
            return f"rank {self.rank} was killed by {name}{hint}"
        return f"rank {self.rank} exited with code {self.exit_code} and recorded no error"


def oom_kills() -> int:
    """Processes that the kernel has killed for memory since it started, containers' limits included."""
    for line in Path("/proc/vmstat").read_text().splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0


def record_error(run_dir: str | Path, rank: int, exception: BaseException) -> RankError:
    """Write RUN/logs/rank_K.error.json for the parent (and the reader), and return what it says."""
    text = "".join(traceback.format_exception(exception))
    error = RankError(rank, time.time(), type(exception).__name__, str(exception), text)
    path = _error_path(run_dir, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(vars(error), indent=1))
    return error


def read_error(run_dir: str | Path, rank: int) -> RankError | None:
    """What rank K recorded, or None."""
    try:
        return RankError(**json.loads(_error_path(run_dir, rank).read_text()))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def clear(run_dir: str | Path) -> None:
    """Remove what an earlier attempt recorded, before ranks start in the same folder again."""
    for path in Path(run_dir, "logs").glob("rank_*.error.json"):
        path.unlink()
    Path(run_dir, "logs", "stalled").unlink(missing_ok=True)


def cause_of_restart(run_dir: str | Path, num_ranks: int) -> str:
    """The headline of what ended the last attempt, from what its ranks recorded; a rank that was killed is silent."""
    errors = [read_error(run_dir, rank) for rank in range(num_ranks)]
    known = [error for error in errors if error is not None and not error.is_victim]
    stalls = [error for error in known if error.is_stall]
    if known:
        return _earliest(stalls or known).headline
    silent = [str(rank) for rank, error in enumerate(errors) if error is None]
    return f"rank {' or '.join(silent) or '?'} died and recorded no error"


def root_cause(run_dir: str | Path, exits: dict[int, tuple[int, float]]) -> RankError:
    """The error that ended the run, among the ranks that ended badly.

    Args:
        exits: rank -> (exit code, when it was seen, in seconds since the epoch).
    """
    assert exits
    recorded, silent = [], []
    for rank, (code, seen) in exits.items():
        error = read_error(run_dir, rank)
        if error is None:
            silent.append(RankError(rank, seen, "", "", exit_code=code))
        else:
            error.exit_code = code
            recorded.append(error)
    first = min(error.time for error in recorded + silent)
    candidates = (
        [e for e in recorded if e.is_stall],
        [e for e in silent if -e.exit_code in KILLS and e.time < first + KILL_WINDOW_S],
        [e for e in recorded if not e.is_victim],
        [e for e in silent if e.exit_code != -signal.SIGTERM and -e.exit_code not in KILLS],
        recorded,
        silent,
    )
    return _earliest(next(group for group in candidates if group))


def _earliest(errors: Iterable[RankError]) -> RankError:
    return min(errors, key=lambda error: (error.time, error.rank))


def _error_path(run_dir: str | Path, rank: int) -> Path:
    return Path(run_dir) / "logs" / f"rank_{rank}.error.json"
