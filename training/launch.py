"""One process a rank: started here (torch's elastic agent), stopped together, and none left behind however a run ends.

    parent (train.py)                        each rank (training.worker)
      launch() ── starts ──────────────────►   die_with_parent()   a kill -9 of the parent ends the ranks too
      Ctrl-C, SIGTERM ── SIGTERM ──────────►   StopFlag            the loop stops after the step it is in
      picks the root cause ◄── error.json ──   guard()             an exception is recorded, the process exits with 1

Ranks of an emulated run are forks of the parent (training.fork). Imports no torch until ranks are started.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conf.device import num_cores
from training.failure import RankError, oom_kills, record_error, root_cause
from training.record import finish_failed, read_result

REPOSITORY = Path(__file__).resolve().parent.parent
PARENT_PID = "TRAIN_PARENT_PID"  # set for the ranks that launch() starts; absent under torchrun
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHUTDOWN_S = 2  # after one rank failed, the others have this long before they are killed
SECOND_SIGNAL_S = 0.5  # `timeout` and terminals send one request twice: what follows sooner is the same request
PR_SET_PDEATHSIG = 1  # linux/prctl.h


# --- in a rank ---


class StopFlag:
    """Takes SIGTERM, SIGINT and SIGHUP from now on: the loop reads `requested` and stops at a step boundary."""

    def __init__(self) -> None:
        self.requested = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._request)

    def _request(self, number: int, frame: Any) -> None:
        self.requested = True


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the one that launched it dies. Does nothing under torchrun."""
    parent = os.environ.get(PARENT_PID)
    if parent is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent):  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def guard(run_dir: str | Path, rank: int) -> Iterator[None]:
    """Around a rank's work: an exception is recorded in RUN/logs/rank_K.error.json and the process exits with code 1.

    The parent prints the root cause. Under torchrun there is no parent of ours: the rank prints its own error and ends
    the run's record, unless it is only the victim of another rank that has done so.
    A rank that launch() started leaves from here when all went well: in the interpreter's own shutdown a thread of
    torch's aborted the process about once in twenty runs ("terminate called without an active exception").
    """
    try:
        yield
        if PARENT_PID in os.environ:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    except Exception as exception:
        _record(run_dir, rank, exception)
        sys.exit(1)


def end(run_dir: str | Path, rank: int, exception: Exception) -> None:
    """What guard() does with an exception, at once and from any thread."""
    _record(run_dir, rank, exception)
    sys.stderr.flush()
    os._exit(1)


def _record(run_dir: str | Path, rank: int, exception: Exception) -> None:
    error = record_error(run_dir, rank, exception)
    if PARENT_PID not in os.environ and not (error.is_victim and read_result(run_dir)):
        report(error, run_dir)
        _finish(run_dir, error)


def own_attempt(store: Any) -> Any:
    """The part of the starter's store that belongs to this attempt: torch's agent gives restarted ranks the same store,
    in which they would find the addresses of the dead."""
    import torch.distributed as dist

    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def agree_on_folder(store: Any, rank: int, run_dir: str | None) -> str:
    """The run folder that rank 0 chose, on every rank; "" when rank 0 refused to start.

    Args:
        store: torch.distributed.Store that all ranks share.
        run_dir: rank 0's folder; on another rank None, or the folder where it is known already.
    """
    if rank == 0:
        assert run_dir is not None
        store.set("run_dir", run_dir)
        return run_dir
    return run_dir if run_dir is not None else store.get("run_dir").decode()


# --- in the parent ---


def launch(
    run_dir: str | Path,
    num_ranks: int,
    worker: tuple[str, ...] = ("-m", "training.worker"),
    max_restarts: int = 0,
    *,
    forked: bool = False,
) -> dict:
    """Run `python WORKER RUN_DIR` once a rank on this machine, wait for all, and return the run's result.json.

    forked: the ranks are forks of this process in place of processes of their own (training.fork).

    When a rank fails the others end within seconds, and all start again, at most `max_restarts` times; then the failing
    rank's own error is printed, and the result says so.
    Ctrl-C, SIGTERM or SIGHUP stops the run at the next step boundary; a second one kills the ranks at once. Call it
    from the main thread (signals). No process is left when it returns.
    """
    killed_before = oom_kills()
    with _environment(num_ranks), _Stopper() as stop:
        if forked:
            exits = _run_forked(str(run_dir), num_ranks, worker, max_restarts, stop)
        else:
            exits = _run_elastic([*worker, str(run_dir)], num_ranks, max_restarts, stop)
    result = read_result(run_dir)
    cause = root_cause(run_dir, exits) if exits else None
    if stop.requested and (cause is None or not cause.type or cause.is_victim):
        if result is None or result["status"] not in ("stopped", "completed"):
            result = finish_failed(run_dir, "stopped", reason="signal")
        return result
    if cause is not None:
        cause.memory_ran_out = cause.exit_code == -signal.SIGKILL and oom_kills() > killed_before
        report(cause, run_dir)
        return _finish(run_dir, cause)
    assert result is not None, f"every rank ended well, but there is no {run_dir}/result.json"
    return result


def report(error: RankError, run_dir: str | Path) -> None:
    """Print the root cause: one line, the rank's own traceback, where its log is."""
    log = Path(run_dir) / "logs" / f"rank_{error.rank}.log"
    lines = [f"\n{error.headline}"]
    details = error.message.partition("\n")[2] if error.is_stall else error.traceback.rstrip()
    if details:
        lines.append(details)
    if log.exists():
        lines.append(f"log of rank {error.rank}: {log}")
    print("\n".join(lines), file=sys.stderr, flush=True)


def threads_per_rank(num_ranks: int) -> int:
    """CPU threads of one rank: the cores this process may use, shared out; 1 when ranks outnumber cores."""
    return max(1, num_cores() // num_ranks)


def _finish(run_dir: str | Path, error: RankError) -> dict:
    status = "out_of_memory" if error.is_out_of_memory else "failed"
    return finish_failed(run_dir, status, failure=error.headline, rank=error.rank)


def _run_forked(
    run_dir: str, num_ranks: int, worker: tuple[str, ...], max_restarts: int, stop: _Stopper
) -> dict[int, tuple[int, float]]:
    """As `_run_elastic`, by training.fork."""
    from training import fork

    return fork.run(
        run_dir,
        num_ranks,
        worker,
        max_restarts=max_restarts,
        shutdown_s=SHUTDOWN_S,
        stop_signals=STOP_SIGNALS,
        stopped=lambda: stop.requested,
        begin=die_with_parent,
    )


def _run_elastic(
    arguments: list[str], num_ranks: int, max_restarts: int, stop: _Stopper
) -> dict[int, tuple[int, float]]:
    """Start the ranks and wait for them. Returns how the ranks that did not exit with 0 ended: rank -> (code, when)."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # it warns of every rank that it ends, beside the cause that we print
    elastic = logging.getLogger("torch.distributed.elastic")
    elastic.propagate = False
    elastic.addHandler(logging.NullHandler())
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port
        local_addr="localhost",
        max_restarts=max_restarts,
        monitor_interval=0.1,
        signals_to_handle="SIGQUIT",  # the others are ours (_Stopper)
        shutdown_timeout=SHUTDOWN_S,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    if stop.requested:
        return {}
    previous = signal.getsignal(signal.SIGQUIT)
    try:
        with _no_restart_after(stop), _timed_ends() as ends:
            elastic_launch(config, sys.executable)("-u", *arguments)
    except ChildFailedError as failed:
        return {rank: (failure.exitcode, ends[rank]) for rank, failure in failed.failures.items()}
    except SignalException:  # SIGQUIT: the agent has killed the ranks
        stop.requested = True
    finally:
        signal.signal(signal.SIGQUIT, previous)
    return {}


@contextlib.contextmanager
def _timed_ends() -> Iterator[dict[int, float]]:
    """rank -> when it ended, of the last attempt that failed: when the others were told to end for the ranks that were
    dead by then, when all were dead for the rest.

    torch keeps whole seconds, which cannot tell a rank that was killed from those that outlive SIGTERM and are killed
    here. And torch 2.13 closes a failed group with this method's default, 30 s, whatever shutdown_timeout is.
    """
    from torch.distributed.elastic.multiprocessing import PContext

    ends: dict[int, float] = {}
    closed = []  # it is closed once more when all are dead
    close = PContext.close

    def timed(context: Any, death_sig: Any = None, timeout: int = SHUTDOWN_S) -> None:
        running = {rank: handler.proc.poll() is None for rank, handler in context.subprocess_handlers.items()}
        start = time.time()
        close(context, death_sig, timeout)
        if context not in closed:
            closed.append(context)
            ends.update({rank: time.time() if alive else start for rank, alive in running.items()})

    PContext.close = timed
    try:
        yield ends
    finally:
        PContext.close = close


@contextlib.contextmanager
def _no_restart_after(stop: _Stopper) -> Iterator[None]:
    """Ranks that a stop request has ended are not brought back; torch's agent would, and has no switch for it."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import SignalException

    restart = LocalElasticAgent._restart_workers

    def unless_stopped(agent: Any, group: Any) -> None:
        if stop.requested:
            raise SignalException("stopped", signal.SIGTERM)
        restart(agent, group)

    LocalElasticAgent._restart_workers = unless_stopped
    try:
        yield
    finally:
        LocalElasticAgent._restart_workers = restart


@contextlib.contextmanager
def _environment(num_ranks: int) -> Iterator[None]:
    """What the ranks inherit, set for as long as they run."""
    before = dict(os.environ)
    os.environ[PARENT_PID] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(num_ranks)))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), before.get("PYTHONPATH")]))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _Stopper:
    """Passes stop signals on to the ranks: SIGTERM for the first, SIGKILL for a second. They are in sessions of their
    own, so that a Ctrl-C in the terminal reaches only this process."""

    def __init__(self) -> None:
        self.requested = False
        self._kill = False
        self._first = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._forward, daemon=True)

    def __enter__(self) -> _Stopper:
        ignored = [number for number in STOP_SIGNALS if signal.getsignal(number) == signal.SIG_IGN]  # nohup
        self._previous = {n: signal.signal(n, self._request) for n in STOP_SIGNALS if n not in ignored}
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: Any) -> None:
        if not self.requested:
            self.requested, self._first = True, time.monotonic()
            os.write(2, b"\nstopping after this step; once more to stop at once\n")  # print is not safe in a handler
        elif time.monotonic() - self._first > SECOND_SIGNAL_S:
            self._kill = True

    def _forward(self) -> None:
        """Repeats: a rank may start after the request, and one between fork and exec loses a signal."""
        terminated = 0.0
        while not self._over.wait(0.1):
            if self._kill:
                _signal_children(signal.SIGKILL)
            elif self.requested and time.monotonic() - terminated > 1.0:
                _signal_children(signal.SIGTERM)
                terminated = time.monotonic()


def _signal_children(number: int) -> None:
    for pid in children(os.getpid()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGKILL and os.getpgid(pid) == pid:
                os.killpg(pid, number)  # and what the rank started
            else:
                os.kill(pid, number)


def children(pid: int) -> list[int]:
    """The processes whose parent is `pid` (Linux: from /proc)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == pid:
                    found.append(int(entry.name))
    return found
