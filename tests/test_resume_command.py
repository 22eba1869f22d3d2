"""Resuming, restarts, faults and stops through the real command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from commands import REPOSITORY, SMALL, TRAIN, processes_in, run, start, wait_for
from composing import composed, resolved

from conf.schema import to_dict
from training import manifest, resume
from training.record import read_result

STEPS = 10
RUN = [*SMALL, f"train.steps={STEPS}", "train.checkpoint_every=3", "train.validate_every=5"]


def only_run(cwd: Path, name: str = "runs") -> Path:
    (folder,) = (cwd / "experiments" / name).glob("*")
    return folder


def losses(run_dir: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that nothing disturbs; its folder."""
    cwd = tmp_path_factory.mktemp("whole")
    done = run(*TRAIN, *RUN, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return only_run(cwd)


@pytest.fixture
def cwd(tmp_path):
    yield tmp_path
    assert processes_in(tmp_path) == []


# --- restarts ---


@pytest.mark.parametrize(
    "fault, told",
    [
        (["fault.kind=kill", "fault.rank=1"], "rank 1 died and recorded no error: restart 1 of 1"),
        (["fault.kind=stall", "fault.rank=1", "train.stall_timeout_s=2"], "stalled: "),
    ],
    ids=["kill", "stall"],
)
def test_all_ranks_go_on_from_the_newest_checkpoint(fault, told, whole, cwd):
    done = run(*TRAIN, *RUN, *fault, "fault.step=8", "train.max_restarts=1", cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert told in done.stdout and ": the loss of 4 held-out sequences" in done.stdout
    folder = only_run(cwd)
    assert read_result(folder)["status"] == "completed"
    assert losses(folder) == losses(whole)


def test_a_fault_ends_a_run_and_auto_goes_on_with_it(whole, cwd):
    """As one run: the same losses, one point a step in TensorBoard, the failure kept beside the result."""
    fresh = run(*TRAIN, *RUN, "resume=auto", "name=mine", "fault.kind=exception", "fault.step=8", cwd=cwd)
    assert fresh.returncode == 1 and "has a checkpoint: a fresh start" in fresh.stdout
    folder = only_run(cwd, "mine")
    assert read_result(folder)["failure"].startswith("rank 0 failed: InjectedFault: fault.kind=exception at step 8")
    done = run(*TRAIN, "resume=auto", "name=mine", cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert only_run(cwd, "mine") == folder and losses(folder) == losses(whole)
    assert read_result(folder)["status"] == "completed" and read_result(folder)["checkpoint"]["step"] == STEPS
    (earlier,) = folder.glob("result.step_*.json")
    assert json.loads(earlier.read_text())["status"] == "failed"
    assert [step for step, _ in _curve(folder, "loss/train")] == list(range(1, STEPS + 1))
    assert _curve(folder, "loss/validation") == _curve(whole, "loss/validation")
    again = run(*TRAIN, f"resume={folder.relative_to(cwd)}", cwd=cwd)
    assert again.returncode == 0 and "all 10 steps done already" in again.stdout


def _curve(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


# --- stopped, and on in another layout and folder ---


def test_sigterm_saves_and_another_layout_goes_on_in_another_folder(cwd):
    process = start(*TRAIN, *SMALL, "train.steps=100000", cwd=cwd)
    wait_for(lambda: any(path.stat().st_size for path in cwd.glob("experiments/*/*/metrics.jsonl")))
    folder = only_run(cwd)
    taken = run(*TRAIN, f"resume={folder.relative_to(cwd)}", cwd=cwd)
    assert taken.returncode == 2 and "no complete checkpoint (it ended before one was saved)" in taken.stderr
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 75
    steps = read_result(folder)["steps"]
    assert manifest.newest(folder)[1]["step"] == steps and read_result(folder)["status"] == "stopped"
    names = sorted(path.name for path in folder.rglob("*"))
    done = run(
        *TRAIN,
        f"resume={folder.relative_to(cwd)}",
        "parallel=single",
        "train.max_minutes=0.005",
        "hydra.run.dir=moved",
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.rglob("*")) == sorted({*names, "lock"})
    moved = [step for step, _ in losses(cwd / "moved")]
    assert moved == list(range(1, len(moved) + 1)) and len(moved) > steps
    assert [step for step, _ in _curve(cwd / "moved", "loss/train")] == moved
    assert manifest.newest(cwd / "moved")[1]["step"] == len(moved)
    assert json.loads((cwd / "moved" / "resolved.json").read_text())["train"]["steps"] == 100000


# --- bad input: one line, nothing touched ---

BAD_INPUT = {
    "resume=nowhere": "resume=nowhere is no run folder",
    "resume=RUN model.hidden=32": "another model: embedding.token.weight is [64, 32] here and [64, 16] in",
    "resume=RUN model.heads=4": "model.heads=4 cannot be changed on resume from 2",
    "resume=RUN data.synthetic_vocabulary=32 model.vocabulary=64": "another vocabulary",
    "resume=RUN data=python_source": "another tokenizer",
    "resume=RUN train.seed=1": "train.seed=1 cannot be changed on resume from 0",
    "resume=RUN train.global_batch=16": "data would be replayed or skipped",
    "resume=RUN optimizer=sgd optimizer.learning_rate=0.1": "optimizer.name=sgd cannot be changed",
    "resume=RUN train.steps=5": "train.steps=5 is less than the 10 steps",
    "resume=RUN +experiment=quickstart": "experiment= cannot be typed with resume=",
    "-m resume=RUN parallel.stages=1,2": "resume= goes on with one run",
}


@pytest.mark.parametrize("typed", BAD_INPUT)
def test_bad_input(typed, whole, cwd):
    shutil.copytree(whole, cwd / "RUN", symlinks=True)
    before = _contents(cwd / "RUN")
    done = run(*TRAIN, *typed.split(), cwd=cwd)
    assert _contents(cwd / "RUN") == before
    if "-m" in typed:
        assert BAD_INPUT[typed] in done.stdout and done.returncode == 1
        return
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and len(lines) == 1 and BAD_INPUT[typed] in lines[0], done.stderr
    assert not (cwd / "experiments").exists()


def _contents(folder: Path) -> dict:
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_another_process_trains(whole, cwd):
    from training import resume

    shutil.copytree(whole, cwd / "RUN", symlinks=True)
    resume.lock(cwd / "RUN")
    done = run(*TRAIN, "resume=RUN", "train.steps=20", cwd=cwd)
    assert done.returncode == 2 and "RUN is being trained by another process" in done.stderr


def test_no_right_to_write(whole, cwd):
    shutil.copytree(whole, cwd / "RUN", symlinks=True)
    (cwd / "RUN" / "logs" / "lock").unlink()
    (cwd / "RUN" / "logs" / "lock").mkdir()  # root may write everywhere, but not a file over a folder
    before = _contents(cwd / "RUN")
    done = run(*TRAIN, "resume=RUN", "train.steps=20", cwd=cwd)
    assert done.returncode == 2 and "cannot write to RUN" in done.stderr and _contents(cwd / "RUN") == before


def test_no_room_for_a_checkpoint(cwd):
    code = (
        "import shutil, sys, train; shutil.disk_usage = lambda path: shutil._ntuple_diskusage(1, 1, 0)\n"
        f"sys.argv = ['train.py', *{SMALL}]; sys.exit(train.main())"
    )
    done = run(sys.executable, "-c", code, cwd=cwd)
    assert done.returncode == 2 and "has 0 free: make room, or go without checkpoints" in done.stderr
    assert not (cwd / "experiments").exists()


@pytest.mark.parametrize("typed, expected", [({"steps": 4}, 4), ({"steps": None, "tokens": 3 * 8 * 16}, 3)])
def test_a_chosen_warmup_is_no_longer_than_a_run_that_is_shorter_now(typed, expected):
    facts = {"config": to_dict(resolved(*SMALL, "train.steps=100"))}
    assert facts["config"]["optimizer"]["warmup_steps"] > 4
    for warmup, kept in ((None, expected), (7, 7)):  # what was typed stays, for the check to refuse
        config = composed(*SMALL)
        config.optimizer.warmup_steps = warmup
        for key, value in typed.items():
            setattr(config.train, key, value)
        resume.keep_chosen(config, ["train.steps=4"], facts)
        assert config.optimizer.warmup_steps == kept


# --- any moment ---


def test_kills_at_random_moments_change_nothing(tmp_path):
    """100 kills are a command: benchmarks/checkpoint/soak.py."""
    command = (sys.executable, str(REPOSITORY / "benchmarks/checkpoint/soak.py"), "--kills=2", f"--folder={tmp_path}")
    done = run(*command, cwd=REPOSITORY, timeout=170, PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["wrong"] == []


def test_what_a_resume_was_typed_with_is_not_kept_when_it_took_no_step(whole, cwd):
    """It fails inside the ranks; the next start goes on as if it had never been. (The copy has a folder for a link.)"""
    shutil.copytree(whole.parent.parent, cwd / "experiments")
    folder = only_run(cwd)
    settings = {name: (folder / name).read_text() for name in (".hydra/overrides.yaml", "resolved.json", "plan.json")}
    more = [*TRAIN, f"resume={folder}", f"train.steps={STEPS + 2}"]
    failed = run(*more, "optimizer.learning_rate=0.5", "fault.kind=exception", f"fault.step={STEPS + 1}", cwd=cwd)
    assert failed.returncode == 1 and "rank 0 failed" in failed.stderr
    assert {name: (folder / name).read_text() for name in settings} == settings
    done = run(*more, cwd=cwd)
    assert done.returncode == 0, done.stderr
    rates = [json.loads(line).get("learning_rate") for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(losses(folder)) == STEPS + 2 and max(rate for rate in rates if rate is not None) < 0.1
