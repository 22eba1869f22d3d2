"""Ranks that are forks: what launch() promises holds for them too, with one parent that launches run after run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import FAKE_WORKER, REPOSITORY, wait_for

from training import launch
from training.launch import children
from training.record import read_result

# reads one run a line, launches it and prints its result; no test's own process is forked, whose threads would be lost
SERVER = f"""
import json, os, sys
from training.launch import launch
for line in sys.stdin:
    run = json.loads(line)
    os.environ.update(FAKE=run["fake"], FAKE_WAIT=run["wait"])
    result = launch(run["run_dir"], run["ranks"], ({FAKE_WORKER!r},), run["restarts"], forked=True)
    print(json.dumps(result), flush=True)
"""


class Parent:
    """The process that launches."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        environment.pop("OMP_NUM_THREADS", None)
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )

    def begin(self, run_dir: Path, fake: str, *, ranks: int = 2, wait: str = "sleep", restarts: int = 0) -> None:
        run = {"run_dir": str(run_dir), "fake": fake, "ranks": ranks, "wait": wait, "restarts": restarts}
        self.process.stdin.write(json.dumps(run) + "\n")
        self.process.stdin.flush()

    def result(self) -> dict:
        result = json.loads(self.process.stdout.readline())
        assert children(self.process.pid) == []
        return result

    def launch(self, run_dir: Path, fake: str, **how) -> tuple[dict, float]:
        """The result, and the seconds from the ranks' start to the end."""
        self.begin(run_dir, fake, **how)
        result = self.result()
        return result, time.time() - max(path.stat().st_mtime for path in run_dir.glob("ready_*"))


@pytest.fixture(scope="module")
def parent():
    parent = Parent()
    yield parent
    parent.process.kill()
    parent.process.communicate()


def wait_until_ready(run_dir: Path, ranks: int = 2) -> None:
    wait_for(lambda: len(list(run_dir.glob("ready_*"))) == ranks)


def test_every_rank_runs_and_the_result_is_returned(parent, tmp_path):
    result, _ = parent.launch(tmp_path, "finish", ranks=3)
    assert result["status"] == "completed" and result == read_result(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("ready_*")) == ["ready_0", "ready_1", "ready_2"]
    assert (tmp_path / "ready_0").read_text() == str(max(1, len(os.sched_getaffinity(0)) // 3))


def test_a_rank_that_raises_ends_the_sleeping_others(parent, tmp_path):
    result, seconds = parent.launch(tmp_path, "raise@1", ranks=3)
    assert result["status"] == "failed" and result["failure"] == "rank 1 failed: ValueError: the deed of rank 1"
    assert launch.SHUTDOWN_S - 1 < seconds < launch.SHUTDOWN_S + 4
    assert json.loads((tmp_path / "logs" / "rank_1.error.json").read_text())["type"] == "ValueError"


@pytest.mark.parametrize(
    "fake, failure",
    [
        ("raise@1", "rank 1 failed: ValueError: the deed of rank 1"),
        ("kill@1", "rank 1 was killed by SIGKILL"),
        ("exit@1", "rank 1 exited with code 3 and recorded no error"),
    ],
)
def test_the_cause_is_named_and_not_its_victims(fake, failure, parent, tmp_path):
    result, seconds = parent.launch(tmp_path, fake, wait="gloo")
    assert result["status"] == "failed" and result["failure"].startswith(failure)
    assert seconds < launch.SHUTDOWN_S + 1


def test_all_ranks_start_again(parent, tmp_path):
    assert parent.launch(tmp_path, "kill_once", restarts=1)[0]["status"] == "completed"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_after_the_step(number, parent, tmp_path):
    parent.begin(tmp_path, "steps")
    wait_until_ready(tmp_path)
    parent.process.send_signal(number)
    parent.process.send_signal(number)  # as `timeout` does; the same request
    result = parent.result()
    assert (result["status"], result["reason"]) == ("stopped", "signal")


def test_a_second_signal_kills_at_once(parent, tmp_path):
    parent.begin(tmp_path, "long", restarts=1000)
    wait_until_ready(tmp_path)
    parent.process.send_signal(signal.SIGTERM)
    time.sleep(launch.SECOND_SIGNAL_S + 0.3)
    begin = time.monotonic()
    parent.process.send_signal(signal.SIGTERM)
    assert parent.result()["status"] == "stopped" and time.monotonic() - begin < 4


def test_no_rank_outlives_a_killed_parent(parent, tmp_path):
    """The last test: the parent is gone after it."""
    parent.begin(tmp_path, "long")
    wait_until_ready(tmp_path)
    ranks = children(parent.process.pid)
    assert len(ranks) == 2
    parent.process.kill()
    parent.process.wait()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), seconds=5)
