"""A hang names its cause: boards, the report, and real runs with a stopped and a slow rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.action import Action
from ranks import ROOT
from training.launch import children
from training.watch import Board, StallError, Watchdog, read, report

TIMEOUT_S = 4


def test_a_board_shows_what_was_written_last(tmp_path):
    board = Board(tmp_path, 2)
    assert str(read(tmp_path, 2)) == "is in start-up"
    board.waits(Action(5, "F", 17), 4)
    state = read(tmp_path, 2)
    assert str(state) == "waits for the input of 5F17 from rank 4"
    assert state.is_waiting and state.pid == os.getpid() and abs(state.since - time.time()) < 5
    board.runs(Action(5, "I", 3))
    assert str(read(tmp_path, 2)) == "is in 5I3" and not read(tmp_path, 2).is_waiting
    board.waits(Action(5, "B", 3), 6)
    assert str(read(tmp_path, 2)) == "waits for the output gradient of 5B3 from rank 6"
    assert read(tmp_path, 0) is None


def test_the_report_follows_the_chain_of_waiting_to_its_cause(tmp_path):
    boards = [Board(tmp_path, rank) for rank in range(4)]
    boards[0].waits(Action(0, "B", 0), 1)
    boards[1].runs(Action(1, "B", 0))
    boards[2].waits(Action(2, "F", 3), 1)
    boards[3].waits(Action(3, "F", 3), 2)
    states = [read(tmp_path, rank) for rank in range(4)]
    lines = report(states, states[1].since + 40, waiter=3).splitlines()
    assert lines[0] == "rank 2 waits for the input of 2F3 from rank 1, which is in 1B0 since 40 s"
    assert len(lines) == 5 and lines[2].startswith("  rank 1 is in 1B0 since 40.0 s")


def test_the_report_says_when_everyone_waits(tmp_path):
    boards = [Board(tmp_path, rank) for rank in range(2)]
    boards[0].waits(Action(0, "B", 0), 1)
    boards[1].waits(Action(1, "F", 1), 0)
    states = [read(tmp_path, rank) for rank in range(2)]
    assert report(states, time.time(), waiter=0).splitlines()[0].endswith("every rank waits for another")


def test_the_report_names_who_is_missing_from_a_reduction(tmp_path):
    boards = [Board(tmp_path, rank) for rank in range(3)]
    for rank in (0, 2):
        boards[rank].reduces("the gradient norm")
    boards[1].works("the step")
    states = [read(tmp_path, rank) for rank in range(3)]
    first = report(states, states[1].since + 7, waiter=0).splitlines()[0]
    assert first == "rank 0 waits for the other ranks in the gradient norm: rank 1 is in the step since 7 s"


def test_only_waiting_counts_and_one_rank_reports(tmp_path):
    ended: list[StallError] = []
    boards = [Board(tmp_path, rank) for rank in range(3)]
    boards[0].works("the step")  # busy for longer than the limit: no stall of its own
    boards[1].waits(Action(1, "F", 0), 0)
    boards[2].waits(Action(2, "F", 0), 1)
    dogs = [Watchdog(board, tmp_path, 3, 1.0, ended.append) for board in boards]
    time.sleep(2.5)
    for dog in dogs:
        dog.close()
    assert len(ended) == 1
    assert "rank 1 waits for the input of 1F0 from rank 0, which is in the step" in str(ended[0])


def _start(folder: Path, *overrides: str) -> subprocess.Popen:
    command = [sys.executable, "train.py", f"hydra.run.dir={folder}", "train.steps=100000", "train.sequence=32"]
    command += ["train.validate_every=0", f"train.stall_timeout_s={TIMEOUT_S}", *overrides]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _pid_of_rank(process: subprocess.Popen, rank: int) -> int:
    for pid in children(process.pid):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"RANK={rank}".encode() in environment:
            return pid
    raise AssertionError(f"rank {rank} is not there")


@pytest.mark.parametrize("stages, victim", [(3, 1), (4, 2)])
def test_a_stopped_rank_ends_the_run_and_is_named(stages, victim, tmp_path):
    folder = tmp_path / "run"
    process = _start(folder, f"parallel.stages={stages}", "model=gpt_tiny", "model.hidden=32", "parallel.chunks=8")
    try:
        deadline = time.monotonic() + 60
        while not (folder / "metrics.jsonl").exists() or len((folder / "metrics.jsonl").read_text()) < 10:
            assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
            time.sleep(0.2)
        pids = children(process.pid)
        os.kill(_pid_of_rank(process, victim), signal.SIGSTOP)
        stopped = time.monotonic()
        _, errors = process.communicate(timeout=60)
        seconds = time.monotonic() - stopped
    finally:
        process.kill()
    assert process.returncode == 1
    assert seconds < TIMEOUT_S + 5, f"took {seconds} s"
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "failed"
    assert result["failure"].startswith("stalled: rank ")
    assert f"rank {victim}" in result["failure"] and "(stopped)" in result["failure"], result["failure"]
    for rank in range(stages):
        assert any(line.startswith(f"  rank {rank} ") for line in errors.splitlines()), errors
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


SLOW = """
import sys, time
from pipeline.engines.base import Stage
from training import launch, worker
forward, calls = Stage.forward, []
def slow(self, x, key=None):
    calls.append(1)
    if "block.2" in self.names and len(calls) == 20:
        time.sleep(60)
    return forward(self, x, key)
Stage.forward = slow
launch.die_with_parent()
worker.main(sys.argv[1])
"""


def test_a_slow_rank_is_named_with_the_action_it_is_in(tmp_path):
    """The very front and launcher, with a worker whose second stage hangs in one forward."""
    folder, script = tmp_path / "run", tmp_path / "slow_worker.py"
    script.write_text(SLOW)
    front = (
        "import sys, functools; sys.argv[0] = 'train.py'; from training import front, launch;"
        f"front.launch = functools.partial(launch.launch, worker=({str(script)!r},));"
        "import train; sys.exit(train.main())"
    )
    command = [sys.executable, "-c", front, f"hydra.run.dir={folder}", "parallel.stages=4", "model.hidden=32"]
    command += ["train.steps=50", "train.sequence=32", "parallel.chunks=8", f"train.stall_timeout_s={TIMEOUT_S}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert done.returncode == 1, done.stdout + done.stderr
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "failed"
    assert "from rank 1, which is in 1F" in result["failure"], result["failure"]
