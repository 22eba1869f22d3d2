"""train.py through the real command line: bad input, folders, exit codes, stop signals, torchrun."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
import yaml
from commands import FAKE_TRAIN, REPOSITORY, SMALL, TRAIN, processes_in, run, start, wait_for

from training.join import check_world
from training.record import read_result


@pytest.fixture
def cwd(tmp_path):
    yield tmp_path
    assert processes_in(tmp_path) == []


def runs(cwd: Path, name: str = "runs") -> list[Path]:
    return sorted((cwd / "experiments" / name).glob("*"))


# --- bad input: one line with the numbers, exit code 2, nothing left ---

BAD_INPUT = {
    "train.global_batch=30": "train.global_batch=30 is not divisible",
    "parallel.stages=12": "12",
    "parallel.chunks=0": "parallel.chunks=0 must be at least 1",
    "parallel.schedule=nope": "1f1b",
    "parallel.engine=nope": "fairscale",
    "model.heads=3": "model.hidden=128 is not divisible by model.heads=3",
    "train.sequence=2048": "model.positions=1024",
    "model.vocabulary=100": "100",
    "data=synthetic data.synthetic_tokens=200": "128",
    "data=text data.path=missing.txt": "missing.txt",
    "data=text data.path=empty.txt": "empty.txt",
    "parallel.chunk=8": "Did you mean parallel.chunks?",
    "+parallel.foo=1": "parallel.foo is no key",
    "train.steps=many": "train.steps=many must be a whole number",
    "model=nope": "model=nope is unknown; known are gpt3_175b, ",
    "experiment=quickstart": "experiment=quickstart needs a plus: +experiment=quickstart",
    "train.precision=fp16": "float16 needs a gradient scaler",
    "hardware=h100": "this machine has none",
    "model=gpt3_175b": "preflight=false",
    "name=a@b": "name=a@b names a folder",
    "parallel.stages=1,2": "--multirun",
}


@pytest.mark.parametrize("overrides", BAD_INPUT)
def test_bad_input(overrides, cwd):
    (cwd / "empty.txt").touch()
    before = sorted(cwd.iterdir())
    done = run(*TRAIN, *overrides.split(), cwd=cwd)
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and "parameters" not in done.stdout
    assert len(lines) == 1 and lines[0].startswith("train.py: "), done.stderr
    assert BAD_INPUT[overrides] in lines[0]
    assert [path for path in sorted(cwd.iterdir()) if path.name != ".cache"] == before


def test_help_and_the_configuration_come_without_torch(cwd):
    for arguments in (["--help"], ["--cfg", "job"], ["train.steps=0"]):
        code = f"import sys; sys.argv = ['train.py', *{arguments}]; import train, atexit; " + (
            "atexit.register(lambda: print('torch' in sys.modules)); sys.exit(train.main())"
        )
        done = run(sys.executable, "-c", code, cwd=cwd)
        assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_help_lists_every_option_of_every_group(cwd):
    done = run(*TRAIN, "--help", cwd=cwd)
    conf = REPOSITORY / "conf"
    options = {path.stem for path in conf.glob("*/*.yaml") if path.parent.name != "hydra"}
    assert done.returncode == 0 and options <= set(done.stdout.replace(",", " ").split())
    assert "Exit codes" in done.stdout and "+experiment" in done.stdout


def test_everything_is_raised_when_asked_for(cwd):
    done = run(*TRAIN, "parallel.chunks=0", cwd=cwd, HYDRA_FULL_ERROR="1")
    assert "Traceback" in done.stderr and "parallel.chunks=0" in done.stderr


# --- the folder ---


def test_a_run_and_what_it_leaves(cwd):
    done = run(*TRAIN, *SMALL, "name=mine", cwd=cwd)
    assert done.returncode == 0, done.stderr
    (folder,) = runs(cwd, "mine")
    assert folder.name.endswith("_gpt_tiny_blocks-4_hidden-16_heads-2_positions-32_pp2")
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {".hydra/config.yaml", ".hydra/overrides.yaml", ".hydra/hydra.yaml", "metrics.jsonl"} < names
    assert {"resolved.json", "corpus.json", "logs/rank_0.log", "logs/rank_1.log"} < names
    assert len([name for name in names if name.startswith("events.out")]) == 1
    assert yaml.safe_load((folder / ".hydra/overrides.yaml").read_text()) == [*SMALL, "name=mine"]
    result = read_result(folder)
    assert (result["status"], result["steps"]) == ("completed", 2)
    resolved = json.loads((folder / "resolved.json").read_text())
    assert resolved["train"]["global_batch"] == 8 and resolved["parallel"]["interleave"] == 1
    # what is said before the first step, and after the last
    parameters = 64 * 16 + 32 * 16 + 4 * (12 * 16**2 + 13 * 16) + 2 * 16
    for text in (f"{parameters:,} parameters", "rank 0: embedding, block.0 ... block.1", "rank 1: block.2 ... block.3"):
        assert text in done.stdout
    for text in ("ideal bubble 20.0%", "4 micro-batches of 2", "float32", "train.log_every=1", str(folder.name)):
        assert text in done.stdout
    assert "tensorboard --logdir experiments" in done.stdout.splitlines()[-1]


def test_starts_in_the_same_second_get_folders_of_their_own(tmp_path):
    """Real processes that claim the same folder at the same moment."""
    folder, gate = tmp_path / "experiments" / "run", tmp_path / "gate"
    code = (
        "import os, time; from pathlib import Path; from training.front import claim\n"
        f"while not os.path.exists({str(gate)!r}): time.sleep(0.001)\n"
        f"print(claim(Path({str(folder)!r})))"
    )
    processes = [start(sys.executable, "-c", code, cwd=tmp_path) for _ in range(6)]
    time.sleep(1)
    gate.touch()
    claimed = [process.communicate(timeout=30)[0].strip() for process in processes]
    assert sorted(claimed) == [str(folder), *(f"{folder}-{number}" for number in range(2, 7))]


def test_a_folder_that_holds_a_run_is_refused(cwd):
    (cwd / "mine").mkdir()
    (cwd / "mine" / "result.json").write_text("{}")
    done = run(*TRAIN, *SMALL, "hydra.run.dir=mine", cwd=cwd)
    assert done.returncode == 2 and "already holds a run" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stdout == ""
    assert [path.name for path in (cwd / "mine").iterdir()] == ["result.json"]


def test_a_folder_of_the_users_own(cwd):
    done = run(*FAKE_TRAIN, *SMALL, "hydra.run.dir=mine", cwd=cwd)
    assert done.returncode == 0 and read_result(cwd / "mine")["status"] == "completed"


# --- exit codes and signals ---


def test_a_failing_rank(cwd):
    done = run(*FAKE_TRAIN, *SMALL, cwd=cwd, FAKE="raise@1")
    assert done.returncode == 1
    assert "\nrank 1 failed: ValueError: the deed of rank 1\n" in done.stderr
    (folder,) = runs(cwd)
    assert read_result(folder)["status"] == "failed" and f"failed: {folder.relative_to(cwd)}" in done.stdout


def test_ctrl_c_while_training(cwd):
    process = start(*TRAIN, *SMALL, "train.steps=100000", cwd=cwd)
    wait_for(lambda: any(path.stat().st_size for path in cwd.glob("experiments/*/*/metrics.jsonl")))
    os.killpg(process.pid, signal.SIGINT)  # a terminal signals the foreground group
    process.communicate(timeout=20)
    assert process.returncode == 75
    (folder,) = runs(cwd)
    result = read_result(folder)
    assert (result["status"], result["reason"]) == ("stopped", "signal")
    assert result["steps"] == len((folder / "metrics.jsonl").read_text().splitlines()) < 100000


def test_a_time_limit_is_no_failure(cwd):
    done = run(*TRAIN, *SMALL, "parallel=single", "train.steps=100000", "train.max_minutes=0.01", cwd=cwd)
    (folder,) = runs(cwd)
    assert done.returncode == 0 and read_result(folder)["reason"] == "max_minutes"
    assert "train.max_minutes=0 lifts it" in done.stdout and f"resume={folder.relative_to(cwd)}" in done.stdout


def test_ctrl_c_before_anything_started_leaves_nothing(cwd):
    process = start(*FAKE_TRAIN, *SMALL, cwd=cwd, FAKE_PREPARE="slow")
    wait_for(lambda: (cwd / "experiments").exists())
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 75 and not (cwd / "experiments").exists()


# --- torchrun ---


def torchrun(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *arguments]


def test_another_number_of_processes_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="needs 4 processes and 3 were started.* must be 4 = .*, or change these$"):
        check_world(4)


ONE_MACHINE = torchrun("--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")


def test_torchrun_joins_and_makes_one_folder(cwd):
    done = run(*ONE_MACHINE, TRAIN[1], *SMALL, cwd=cwd)
    assert done.returncode == 0, done.stderr
    (folder,) = runs(cwd)
    assert read_result(folder)["status"] == "completed"
    assert done.stdout.count("ideal bubble") == 1 and done.stdout.count("completed: ") == 1


def test_two_torchruns_as_two_machines_make_one_folder(cwd):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    nodes = [
        start(*torchrun("--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1", f"--master-port={port}"), TRAIN[1],
              *SMALL, cwd=cwd)
        for node in range(2)
    ]  # fmt: skip
    output = [node.communicate(timeout=60) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], output
    (folder,) = runs(cwd)
    assert read_result(folder)["status"] == "completed"
    assert "ideal bubble" in output[0][0] and output[1][0] == ""


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([*SMALL, "train.global_batch=7"], "train.global_batch=7 is not divisible"),
        ([*SMALL, "parallel.stages=4"], "this layout needs 4 processes and 2 were started"),
        (["-m", "parallel.chunks=4,8"], "start it without torchrun"),
    ],
)
def test_bad_input_under_torchrun_is_said_once(arguments, message, cwd):
    done = run(*ONE_MACHINE, TRAIN[1], *arguments, cwd=cwd)
    assert done.returncode != 0 and not (cwd / "experiments").exists()
    assert done.stderr.count("train.py: ") == 1 and message in done.stderr


def test_a_rank_that_fails_under_torchrun(cwd):
    done = run(*ONE_MACHINE, TRAIN[1], *SMALL, "optimizer.learning_rate=1e30", "train.steps=20", cwd=cwd)
    assert done.returncode != 0
    (folder,) = runs(cwd)
    assert read_result(folder)["status"] == "failed" and "NonFinite" in read_result(folder)["failure"]
