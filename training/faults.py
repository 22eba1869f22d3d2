"""Faults on purpose: one rank raises, dies, falls silent or slows down at a step (`fault` in conf/config.yaml)."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from conf.schema import FaultConfig


class InjectedFault(RuntimeError):
    """fault.kind=exception."""


def before_step(fault: FaultConfig, rank: int, step: int, run_dir: Path) -> None:
    """What `fault` says, as step number `step` (from 1) begins on `rank`. All but `slow` happen once a run folder: a
    run that has started again, or goes on from it, is not hit again."""
    if fault.kind == "none" or rank != fault.rank or step < fault.step:
        return
    if fault.kind == "slow":
        time.sleep(fault.seconds)
    elif step == fault.step and _first_time(run_dir):
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "stall":
            threading.Event().wait()
        raise InjectedFault(f"fault.kind=exception at step {step} on rank {rank}")


def _first_time(run_dir: Path) -> bool:
    try:
        os.close(os.open(run_dir / "logs" / "fault", os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False
