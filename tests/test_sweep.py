"""Sweeps: every job is recorded, whatever becomes of it; names that a person reads; the table; what is run again."""

import json
import re
import signal
import sys
from pathlib import Path

import pytest
from commands import FAKE_TRAIN, SMALL, TRAIN, processes_in, run, start, wait_for
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from training import sweep
from training.record import read_result


@pytest.fixture
def cwd(tmp_path):
    yield tmp_path
    assert processes_in(tmp_path) == []


def jobs(cwd: Path, name: str = "runs") -> dict[str, dict]:
    """Folder's name without its time -> result.json."""
    folders = sorted(path for path in (cwd / "experiments" / name).glob("[!.]*") if path.is_dir())
    return {path.name.split("_", 2)[2]: read_result(path) for path in folders}


def rows(printed: str) -> list[list[str]]:
    """The table's cells; between columns every line has two spaces."""
    lines = re.search(r"^ *job  .*?(?=\n\n)", printed, re.M | re.S)[0].splitlines()
    width = max(map(len, lines))
    blank = [all(line.ljust(width)[i] == " " for line in lines) for i in range(width)]
    starts = [0] + [i for i in range(3, width) if blank[i - 1] and blank[i - 2] and not blank[i]]
    return [[line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)] for line in lines]


# --- the whole of it, with real runs ---


def test_a_sweep_with_every_kind_of_job_and_what_is_missing_afterwards(cwd):
    swept = ["parallel=single", "optimizer.learning_rate=1e-3,1e30", "train.accumulate=1,3", "train.steps=4"]
    first = run(*TRAIN, "-m", *SMALL, *swept, cwd=cwd, timeout=240)
    assert first.returncode == 1, first.stderr
    found = jobs(cwd)
    assert list(found) == [
        "00_learning_rate=0.001_accumulate=1",
        "01_learning_rate=0.001_accumulate=3",
        "02_learning_rate=1e+30_accumulate=1",
        "03_learning_rate=1e+30_accumulate=3",
    ]
    assert [result["status"] for result in found.values()] == ["completed", "invalid", "failed", "invalid"]
    errors = [result.get("failure", "") for result in found.values()]
    assert "not divisible by train.accumulate=3" in errors[1] and "NonFinite" in errors[2]
    header, *table = rows(first.stdout)
    assert header[:7] == ["job", "learning_rate", "accumulate", "status", "loss", "val. loss", "tokens/s"]
    assert header[-1] == "run"
    assert [row[:4] for row in table] == [
        ["0", "0.001", "1", "completed"],
        ["1", "0.001", "3", "invalid"],
        ["2", "1e+30", "1", "failed"],
        ["3", "1e+30", "3", "invalid"],
    ]
    assert table[0][4] == f"{found['00_learning_rate=0.001_accumulate=1']['loss']:.4f}" and all(table[0])
    assert table[0][-1].endswith("00_learning_rate=0.001_accumulate=1")
    assert "look at it: experiments/runs/compare.html" in first.stdout
    assert (cwd / "experiments" / "runs" / "compare.html").stat().st_size > 1e6

    # each job, also one that never started, is a session of TensorBoard's HParams
    for folder in (cwd / "experiments" / "runs").glob("*_0*"):
        assert len(EventAccumulator(str(folder)).Reload().PluginTagToContent("hparams")) == 2

    swept[1] = "optimizer.learning_rate=1e-3,2e-3"
    second = run(*TRAIN, "-m", *SMALL, *swept, "resume_sweep=true", cwd=cwd, timeout=240)
    assert second.returncode == 1, second.stderr
    again = rows(second.stdout)[1:]
    assert [row[0] for row in again] == ["0 (earlier)", "1", "2", "3"]
    assert [row[3] for row in again] == ["completed", "invalid", "completed", "invalid"]
    assert again[0][1:] == table[0][1:]
    assert len(list((cwd / "experiments" / "runs").glob("*_00_*"))) == 1, "no folder for what is not run"


# --- with a worker that does not train ---


def test_two_sweeps_side_by_side_do_not_meet(cwd):
    both = [start(*FAKE_TRAIN, "-m", *SMALL, "parallel.stages=1,2", cwd=cwd) for _ in range(2)]
    assert [process.communicate(timeout=60) and process.returncode for process in both] == [0, 0]
    folders = list((cwd / "experiments" / "runs").glob("*stages=*"))
    assert len(folders) == 4 and {read_result(folder)["status"] for folder in folders} == {"completed"}


def test_jobs_in_processes_of_a_launcher_end_in_the_same_table(cwd):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="pip install -r requirements-slurm.txt")
    words = ["-m", *SMALL, "parallel=single", "train.accumulate=1,3", "hydra/launcher=submitit_local"]
    words += ["hydra.launcher.timeout_min=5"]
    done = run(*TRAIN, *words, cwd=cwd, timeout=240, PYTHONPATH="")
    assert done.returncode == 1, done.stderr
    assert [row[:3] for row in rows(done.stdout)[1:]] == [["0", "1", "completed"], ["1", "3", "invalid"]]
    assert list(jobs(cwd)) == ["00_accumulate=1", "01_accumulate=3"]
    assert "look at it: experiments/runs/compare.html" in done.stdout
    left = [path.name for path in (cwd / "experiments").iterdir()]
    assert left == ["runs"], "what the jobs told the sweep is gone"


def test_ctrl_c_ends_the_sweep_and_what_is_missing_runs_later(cwd):
    process = start(*FAKE_TRAIN, "-m", *SMALL, "train.seed=0,1", cwd=cwd, FAKE="steps")
    wait_for(lambda: len(list(cwd.glob("experiments/runs/*/ready_*"))) == 2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 75
    assert [(name, result["status"]) for name, result in jobs(cwd).items()] == [("00_seed=0", "stopped")]
    assert [row[:2] for row in rows(output)[1:]] == [["0", "stopped"]]
    assert "resume_sweep=true" in output
    again = run(*FAKE_TRAIN, "-m", *SMALL, "train.seed=0,1", "resume_sweep=true", cwd=cwd, timeout=240)
    assert again.returncode == 0, again.stderr
    assert [row[:3] for row in rows(again.stdout)[1:]] == [["0", "0", "completed"], ["1", "1", "completed"]]
    assert "look at it: experiments/runs/compare.html" in again.stdout


def test_an_experiment_that_is_a_sweep(cwd):
    fewer = ["parallel.schedule=1f1b", "parallel.stages=2,4", "parallel.chunks=2,4", "data=synthetic"]
    done = run(*FAKE_TRAIN, "-m", "+experiment=chunks_x_stages", *fewer, cwd=cwd, timeout=240)
    assert done.returncode == 0, done.stderr
    names = ["00_stages=2_chunks=2", "01_stages=2_chunks=4", "02_stages=4_chunks=2", "03_stages=4_chunks=4"]
    assert list(jobs(cwd, "chunks_x_stages")) == names


def test_what_hydra_cannot_compose_starts_nothing(cwd):
    done = run(*TRAIN, "-m", *SMALL, "model=gpt_tiny,nope", cwd=cwd)
    assert done.returncode == 2 and "gpt_124m" in done.stderr and len(done.stderr.splitlines()) == 1
    assert [path.name for path in cwd.rglob("*") if path.is_file()] == ["multirun.yaml"]


# --- names, matching ---


@pytest.mark.parametrize(
    "typed, job, name",
    [
        (["-m", "a.b=1,2", "c=3"], ["a.b=1", "c=3"], "07_b=1"),
        (["-m", "model=x,y"], ["model=x"], "07_model=x"),
        (["-m", "a.name=1,2", "b.name=1,2"], ["a.name=1", "b.name=2"], "07_a.name=1_b.name=2"),
        (["-m", "parallel.balance=[4,4],[3,5]"], ["parallel.balance=[4,4]"], "07_balance=-4-4-"),
        (["-m", "data.path=/a/b.txt,../c"], ["data.path=/a/b.txt"], "07_path=-a-b.txt"),
        (["-m", "a=range(0,3)"], ["a=1"], "07_a=1"),
        (["-m", "+experiment=e", "b=1"], ["+experiment=e", "parallel.stages=4", "b=1"], "07_stages=4"),
    ],
)
def test_job_names(typed, job, name, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", *typed])
    assert sweep.job_name(7, job) == name.strip("-")


def test_names_are_bounded(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "a=x,y"])
    assert len(sweep.job_name(7, ["a=" + 500 * "x"])) <= 130


def finished(folder: Path, overrides: list[str], **result) -> Path:
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(overrides))
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_which_runs_need_not_be_repeated(tmp_path):
    wanted = ["a=1", "b=2", "resume_sweep=true"]
    assert sweep.find_completed(tmp_path / "none", wanted) is None
    finished(tmp_path / "1", ["a=1", "b=2"], status="failed")
    finished(tmp_path / "2", ["a=1", "b=2"], status="stopped", reason="signal")
    finished(tmp_path / "3", ["a=1"], status="completed")
    (tmp_path / "4").mkdir()
    assert sweep.find_completed(tmp_path, wanted) is None
    by_time = finished(tmp_path / "5", ["b=2", "a=1"], status="stopped", reason="max_minutes")
    assert sweep.find_completed(tmp_path, wanted) == by_time
    latest = finished(tmp_path / "6", ["a=1", "b=2", "resume_sweep=true"], status="completed")
    assert sweep.find_completed(tmp_path, wanted) == latest
