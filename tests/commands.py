"""Running this project's commands as a user does, in a folder of the test's own, and looking for what they left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
FAKE_WORKER = str(Path(__file__).parent / "fake_worker.py")
TRAIN = (sys.executable, str(REPOSITORY / "train.py"))
FAKE_TRAIN = (sys.executable, str(Path(__file__).parent / "fake_train.py"))
# the least work that is a run: synthetic data, one small model, no validation but the last
SMALL = (
    "data=synthetic data.synthetic_tokens=20000 model.blocks=4 model.hidden=16 model.heads=2 model.positions=32 "
    "train.sequence=16 train.global_batch=8 train.steps=2 train.validate_sequences=8 parallel.chunks=4"
).split()


def start(*command: str, cwd: Path, **environment: str) -> subprocess.Popen:
    """The command in a session of its own, as in a terminal; end it with communicate(), which reads its pipes."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), **environment}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def run(*command: str, cwd: Path, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess:
    """Waits for the command; its exit code and output."""
    process = start(*command, cwd=cwd, **environment)
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def processes_in(folder: Path) -> list[str]:
    """Command lines of live processes that work in this folder or were given it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                cwd = os.readlink(entry / "cwd")
            except OSError:
                continue
            if command and (str(folder) in command or cwd == str(folder)):
                found.append(command)
    return found


def wait_for(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
