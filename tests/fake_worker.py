"""A rank in place of training.worker, for tests of the launcher: `fake_worker.py RUN_DIR` does as FAKE says.

FAKE is "deed@rank" ("raise@1"); the other ranks sleep, or with FAKE_WAIT=gloo wait in an all-reduce.
"""

import os
import signal
import sys
import time
from pathlib import Path

from training.launch import StopFlag, die_with_parent, guard
from training.record import write_result


def main(run_dir: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    deed, _, who = os.environ.get("FAKE", "finish").partition("@")
    if deed == "slow_start":  # before any handler is there
        (run_dir / f"starting_{rank}").touch()
        time.sleep(60)
    die_with_parent()
    stop = StopFlag()
    with guard(run_dir, rank):
        if os.environ.get("FAKE_WAIT") == "gloo":
            connect(rank, world)
        (run_dir / f"ready_{rank}").write_text(os.environ["OMP_NUM_THREADS"])
        while len(list(run_dir.glob("ready_*"))) < world:
            time.sleep(0.02)
        if not who or rank == int(who):
            DEEDS[deed](run_dir, rank, stop)
        elif os.environ.get("FAKE_WAIT") == "gloo":
            import torch

            torch.distributed.all_reduce(torch.zeros(1))
        else:
            time.sleep(60)


def connect(rank: int, world: int) -> None:
    import torch

    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    torch.distributed.all_reduce(torch.zeros(1))


def finish(run_dir: Path, rank: int, stop: StopFlag) -> None:
    if rank == 0:
        write_result(run_dir, {"status": "completed"})


def steps(run_dir: Path, rank: int, stop: StopFlag) -> None:
    """Steps of a tenth of a second until it is told to stop; `long` ones outlast any test."""
    while not stop.requested:
        time.sleep(0.1)
    if rank == 0:
        write_result(run_dir, {"status": "stopped", "reason": "signal"})


def long(run_dir: Path, rank: int, stop: StopFlag) -> None:
    while True:
        time.sleep(0.1)


def fail(run_dir: Path, rank: int, stop: StopFlag) -> None:
    raise ValueError(f"the deed of rank {rank}")


def fail_late(run_dir: Path, rank: int, stop: StopFlag) -> None:
    """In the half of a second where whole seconds would blame the rank that the launcher kills two seconds later."""
    while not 0.55 < time.time() % 1 < 0.65:
        time.sleep(0.01)
    fail(run_dir, rank, stop)


def kill_once(run_dir: Path, rank: int, stop: StopFlag) -> None:
    """Every rank dies, and finishes when it is started again."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    finish(run_dir, rank, stop)


DEEDS = {
    "finish": finish,
    "steps": steps,
    "long": long,
    "raise": fail,
    "raise_late": fail_late,
    "kill": lambda run_dir, rank, stop: os.kill(os.getpid(), signal.SIGKILL),
    "kill_once": kill_once,
    "exit": lambda run_dir, rank, stop: os._exit(3),
}

if __name__ == "__main__":
    main(Path(sys.argv[1]))
