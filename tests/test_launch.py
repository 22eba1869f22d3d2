"""Launching ranks: every way in which a run ends leaves the right result, the right message, and no process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.launcher.api as launcher
from commands import FAKE_WORKER, REPOSITORY, processes_in, wait_for

from training import launch
from training.failure import RankError, record_error, root_cause
from training.record import read_result


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    folder = tmp_path / "run"
    folder.mkdir()
    yield folder
    assert processes_in(folder) == []


def run_fake(run_dir: Path, monkeypatch, fake: str, *, ranks: int = 2, wait: str = "sleep") -> tuple[dict, float]:
    """The result, and the seconds from the ranks' start to the end."""
    monkeypatch.setenv("FAKE", fake)
    monkeypatch.setenv("FAKE_WAIT", wait)
    environment = dict(os.environ)
    result = launch.launch(run_dir, ranks, (FAKE_WORKER,))
    ended = time.time()
    assert dict(os.environ) == environment
    return result, ended - max(path.stat().st_mtime for path in run_dir.glob("ready_*"))


# --- how ranks are started ---


def test_every_rank_runs_and_the_result_is_returned(run_dir, monkeypatch):
    result, _ = run_fake(run_dir, monkeypatch, "finish", ranks=3)
    assert result["status"] == "completed" and result == read_result(run_dir)
    assert sorted(path.name for path in run_dir.glob("ready_*")) == ["ready_0", "ready_1", "ready_2"]
    assert (run_dir / "ready_0").read_text() == str(max(1, len(os.sched_getaffinity(0)) // 3))


def test_threads_that_the_user_set_are_kept(run_dir, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    run_fake(run_dir, monkeypatch, "finish", ranks=1)
    assert (run_dir / "ready_0").read_text() == "5"


@pytest.mark.parametrize("cores, ranks, threads", [(8, 2, 4), (8, 3, 2), (2, 2, 1), (2, 4, 1)])
def test_cores_are_shared_out(cores, ranks, threads, monkeypatch):
    monkeypatch.setattr(launch, "num_cores", lambda: cores)
    assert launch.threads_per_rank(ranks) == threads


# --- how runs fail ---


def test_a_rank_that_raises_ends_the_sleeping_others(run_dir, monkeypatch, capsys):
    result, seconds = run_fake(run_dir, monkeypatch, "raise_late@1", ranks=3)
    assert result["status"] == "failed" and result["rank"] == 1 and "the deed of rank 1" in result["failure"]
    assert launch.SHUTDOWN_S - 1 < seconds < launch.SHUTDOWN_S + 4
    printed = capsys.readouterr().err
    assert printed.strip().startswith("rank 1 failed: ValueError: the deed of rank 1")
    assert 'raise ValueError(f"the deed' in printed and "elastic" not in printed
    recorded = json.loads((run_dir / "logs" / "rank_1.error.json").read_text())
    assert recorded["type"] == "ValueError" and recorded["message"] == "the deed of rank 1"


def test_the_cause_is_named_and_not_its_victims(run_dir, monkeypatch, capsys):
    result, seconds = run_fake(run_dir, monkeypatch, "raise@1", wait="gloo")
    assert result["rank"] == 1 and seconds < launch.SHUTDOWN_S
    assert "rank 0" not in capsys.readouterr().err


def test_a_killed_rank_is_named_and_not_its_victims(run_dir, monkeypatch, capsys):
    result, seconds = run_fake(run_dir, monkeypatch, "kill@1", wait="gloo")
    assert result["status"] == "failed" and result["failure"].startswith("rank 1 was killed by SIGKILL")
    assert seconds < launch.SHUTDOWN_S
    assert capsys.readouterr().err.strip().startswith("rank 1 was killed by SIGKILL")


def test_a_rank_killed_for_memory_is_out_of_memory(run_dir, monkeypatch):
    counts = iter([7, 8])
    monkeypatch.setattr(launch, "oom_kills", lambda: next(counts))  # the kernel's count, before and after
    result, _ = run_fake(run_dir, monkeypatch, "kill@0", ranks=1)
    assert result["status"] == "out_of_memory"
    assert result["failure"] == "rank 0 was killed by SIGKILL: the kernel ran out of memory"


def test_a_rank_that_just_exits_is_named(run_dir, monkeypatch):
    result, _ = run_fake(run_dir, monkeypatch, "exit@1")
    assert result["failure"] == "rank 1 exited with code 3 and recorded no error"


def test_an_allocation_that_fails_is_out_of_memory(tmp_path):
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert record_error(tmp_path, 0, caught.value).is_out_of_memory
    assert record_error(tmp_path, 0, torch.OutOfMemoryError("CUDA out of memory")).is_out_of_memory
    assert not record_error(tmp_path, 0, ValueError("something else")).is_out_of_memory


CLOSED, KEY, BACKEND = "Connection closed by peer", "KeyError", "DistBackendError"


@pytest.mark.parametrize(
    "errors, exits",
    [
        # a victim may be seen first
        ([(0, 9.0, "RuntimeError", CLOSED), (1, 9.1, KEY, "k")], {0: (1, 9.0), 1: (1, 9.0)}),
        # of two errors the earlier
        ([(0, 9.5, KEY, "k"), (1, 9.1, KEY, "k")], {0: (1, 9.0), 1: (1, 9.0)}),
        # the agent kills what outlives SIGTERM: no cause
        ([(1, 9.1, KEY, "k")], {0: (-9, 14.0), 1: (1, 9.0)}),
        # a kill comes before what it causes, whatever that says
        ([(0, 9.4, KEY, "k")], {0: (1, 9.0), 1: (-9, 9.0)}),
        # the agent terminates the others: no cause
        ([], {0: (-15, 9.0), 1: (3, 9.0)}),
        # where all are victims, the first
        ([(0, 9.2, BACKEND, "x"), (1, 9.1, BACKEND, "x")], {0: (1, 9.0), 1: (1, 9.0)}),
    ],
)
def test_the_root_cause_is_rank_1(errors, exits, tmp_path):
    (tmp_path / "logs").mkdir()
    for rank, *error in errors:
        (tmp_path / "logs" / f"rank_{rank}.error.json").write_text(json.dumps(vars(RankError(rank, *error))))
    assert root_cause(tmp_path, exits).rank == 1


# --- how runs are stopped ---


def start_parent(run_dir: Path, fake: str, ranks: int = 2, restarts: int = 0) -> subprocess.Popen:
    """A parent process whose exit code is 0 when launch() says stopped."""
    code = (
        "import sys; from training.launch import launch; "
        f"sys.exit(launch({str(run_dir)!r}, {ranks}, ({FAKE_WORKER!r},), {restarts})['status'] != 'stopped')"
    )
    environment = {**os.environ, "FAKE": fake, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)


def ready(run_dir: Path, ranks: int = 2, name: str = "ready") -> bool:
    return len(list(run_dir.glob(f"{name}_*"))) == ranks


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_after_the_step(number, run_dir):
    parent = start_parent(run_dir, "steps")
    wait_for(lambda: ready(run_dir))
    parent.send_signal(number)
    parent.send_signal(number)  # as `timeout` does; the same request
    assert parent.wait(10) == 0
    assert read_result(run_dir)["reason"] == "signal"
    assert "once more" in parent.communicate()[1]


def test_a_signal_while_the_ranks_start(run_dir):
    parent = start_parent(run_dir, "slow_start")
    wait_for(lambda: ready(run_dir, name="starting"))
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(15) == 0
    assert read_result(run_dir)["status"] == "stopped"
    parent.communicate()


def test_a_signal_before_the_ranks_start(run_dir, monkeypatch):
    real = launcher.LaunchConfig

    def config_and_signal(**arguments):
        signal.raise_signal(signal.SIGTERM)
        return real(**arguments)

    monkeypatch.setattr(launcher, "LaunchConfig", config_and_signal)
    assert launch.launch(run_dir, 2, (FAKE_WORKER,))["status"] == "stopped"
    assert not ready(run_dir, name="ready")


@pytest.mark.parametrize("restarts", [0, 1000])
def test_a_second_signal_kills_at_once(restarts, run_dir):
    parent = start_parent(run_dir, "long", restarts=restarts)
    wait_for(lambda: ready(run_dir))
    parent.send_signal(signal.SIGINT)
    time.sleep(launch.SECOND_SIGNAL_S + 0.3)
    assert parent.poll() is None, "a step may take minutes"
    begin = time.monotonic()
    parent.send_signal(signal.SIGINT)
    assert parent.wait(15) == 0 and time.monotonic() - begin < 4
    assert read_result(run_dir) == {**read_result(run_dir), "status": "stopped", "reason": "signal"}
    parent.communicate()


def test_no_rank_outlives_a_killed_parent(run_dir):
    parent = start_parent(run_dir, "long")
    wait_for(lambda: ready(run_dir))
    parent.kill()
    parent.communicate()
    wait_for(lambda: processes_in(run_dir) == [], seconds=5)
