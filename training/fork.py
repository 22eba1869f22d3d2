"""Ranks as forks of this process, which has imported what they need: sixteen are ready in the time of one import.

For ranks that compute nothing (training.emulate). This process must never have touched an accelerator nor computed
with torch: neither survives a fork. Others are started anew (training.launch).
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

POLL_S = 0.02
Exits = dict[int, tuple[int, float]]  # rank -> exit code (negative: a signal), when it was seen


def run(
    run_dir: str,
    num_ranks: int,
    worker: tuple[str, ...],
    *,
    max_restarts: int,
    shutdown_s: float,
    stop_signals: tuple[int, ...],
    stopped: Callable[[], bool],
    begin: Callable[[], None],
) -> Exits:
    """Fork the ranks, wait for all, and return how those ended that did not exit with 0.

    A rank does what `python WORKER RUN_DIR` does: worker is ("-m", module) or (script,).

    Where one fails the others are told to end, are killed `shutdown_s` later, and all start again, at most max_restarts
    times, unless `stopped()`. `begin` is called in each rank first. Call it from the main thread.
    """
    import torch.distributed as dist

    warm_up()
    gc.freeze()  # else every rank's collector would copy these pages
    exits: Exits = {}
    for attempt in range(max_restarts + 1):
        if stopped():
            return exits
        listener = socket.create_server(("localhost", 0))  # a free port; connections wait until the store takes them
        address, port = listener.getsockname()
        environment = {
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here, and not rank 0's
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        }
        ranks: dict[int, int] = {}  # pid -> rank
        try:
            for rank in range(num_ranks):
                own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks[_fork(worker, run_dir, own, stop_signals, begin)] = rank
            # its threads take locks, in which a rank that was forked meanwhile would wait for ever: it comes last
            store = dist.TCPStore(
                address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
            exits = _wait(ranks, shutdown_s)
            del store
        finally:
            _signal(ranks, signal.SIGKILL)
        if not exits:
            break
    return exits


def warm_up() -> None:
    """Imports what a rank needs."""
    for name in ("torch.distributed.pipelining", "torch.utils.tensorboard", "training.worker", "training.emulate"):
        importlib.import_module(name)


def _fork(
    worker: tuple[str, ...], run_dir: str, environment: dict[str, str], stop_signals: tuple[int, ...], begin: Any
) -> int:
    """The new rank's pid. A stop signal meets either this process' handlers or none."""
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals)
    try:
        pid = os.fork()
        if pid == 0:
            _be_rank(worker, run_dir, environment, stop_signals, begin)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals)


def _be_rank(
    worker: tuple[str, ...], run_dir: str, environment: dict[str, str], stop_signals: tuple[int, ...], begin: Any
) -> None:
    """Never returns: what this process was doing is the parent's to go on with."""
    code = 1
    try:
        os.setsid()
        for number in stop_signals:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals)
        os.environ.update(environment)
        begin()
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        sys.argv = [worker[-1], run_dir]
        if worker[0] == "-m":
            importlib.import_module(worker[1]).main(run_dir)
        else:
            runpy.run_path(worker[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(ranks: dict[int, int], shutdown_s: float) -> Exits:
    """Until all have ended; takes them out of `ranks` (pid -> rank)."""
    exits: Exits = {}
    kill_at = None  # once one has failed
    while ranks:
        for pid, rank in list(ranks.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del ranks[pid]
                if code := os.waitstatus_to_exitcode(status):
                    exits[rank] = (code, time.time())
        if exits and kill_at is None:
            kill_at = time.monotonic() + shutdown_s
            _signal(ranks, signal.SIGTERM)
        elif kill_at is not None and time.monotonic() > kill_at:
            _signal(ranks, signal.SIGKILL)
        time.sleep(POLL_S)
    return exits


def _signal(ranks: dict[int, int], number: int) -> None:
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
