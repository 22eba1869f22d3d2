"""The README is true: its commands run as printed (long ones with short overrides), its examples run."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import run_folders

from ranks import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)
BASH = [text.strip() for kind, text in BLOCKS if kind == "bash"]
COMMANDS = [line for text in BASH[2:] for line in text.splitlines() if line.startswith("python ")]
# what makes a command short without changing what it shows
SHORT = {
    "train.py": "train.steps=2 train.sequence=16 train.validate_sequences=8 model.hidden=48 model.blocks=8".split(),
    "emulated": "train.steps=1 emulate.time_scale=0.3 train.trace=0".split(),
    "plan.py": [],
    "compare.py": [],
    "verify.py": "verify.width=32 train.sequence=8".split(),
}
EMULATED = re.compile("hardware=emulated_|experiment=chunks_x_stages")


def test_the_first_two_blocks_are_the_two_commands():
    assert BASH[0] == "pip install -r requirements.txt && python train.py"
    assert BASH[1] == "pip install -r requirements-dev.txt && python -m pytest"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the commands run: with the files that the README tells its reader to save."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copy(ROOT / "README.md", folder)
    for chunks in (4, 8):  # what compare.py is shown on, beside what the commands before it leave
        run_folders.write_run(folder / "experiments" / "microbatch" / str(chunks), chunks=chunks)
    (folder / "my_schedule.py").write_text(next(text for kind, text in BLOCKS if "def eager_1f1b" in text))
    return folder


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess:
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_runs(command, folder):
    words = shlex.split(command)[1:]
    if words[0] in SHORT:
        words = [str(ROOT / words[0]), *words[1:], *SHORT["emulated" if EMULATED.search(command) else words[0]]]
        if "+experiment=chunks_x_stages" in words:
            words += ["parallel.stages=2", "parallel.chunks=2,4", "parallel.schedule=1f1b"]
        elif "+experiment=microbatch" in words:
            words += ["parallel.chunks=2,4", "train.global_batch=8"]
        elif "-m" in words:
            words += ["train.global_batch=8", "parallel.stages=1,2", "parallel.chunks=4"]  # fewer jobs
        elif words[0].endswith("train.py") and not any(word.startswith(("parallel", "evaluate")) for word in words):
            words += ["parallel=single"]  # what they show has nothing to do with the layout
    done = _run([sys.executable, *words], folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_the_printed_grid_is_what_the_command_prints(folder):
    command = "python -m pipeline.schedule 1f1b stages=4 chunks=8"
    assert command in COMMANDS
    printed = _run([sys.executable, *command.split()[1:]], folder).stdout.splitlines()
    shown = next(text for kind, text in BLOCKS if text.startswith("rank 0:")).strip().splitlines()
    assert [line for line in shown if line not in printed] == []


def test_the_python_examples_run(folder):
    code = next(text for kind, text in BLOCKS if "from pipeline import Pipe" in text)
    done = _run([sys.executable, "-c", code], folder)
    assert done.returncode == 0 and re.fullmatch(r"loss \d\.\d{3}\n", done.stdout), done.stderr
    assert float(done.stdout.split()[1]) < 1.386  # ln 4: better than guessing


def test_every_file_and_option_that_is_named_exists():
    for name in re.findall(r"`((?:conf|pipeline|models|training|planning)/[\w/.]+\.(?:py|yaml))`", README):
        assert (ROOT / name).is_file(), name
    for group, options in re.findall(r"^\| `(\w+)` \| (.*?) \|$", README, re.M):
        if (ROOT / "conf" / group).is_dir():
            for option in re.findall(r"`(\w+)`", options):
                assert (ROOT / "conf" / group / f"{option}.yaml").is_file(), f"{group}={option}"
