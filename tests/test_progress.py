"""What rank 0 shows: a bar on a terminal, plain lines elsewhere and on a terminal that does not know its size."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from ranks import ROOT

CODE = """
from training.progress import Progress
progress = Progress(3, 1)
for done in (1, 2, 3):
    progress.step(done, 2.5, 1e-3, 4096.0, 0.1)
progress.close()
"""


def _shown(rows: int, columns: int) -> str:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, stdout=theirs, stderr=subprocess.PIPE, timeout=60)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (0, b"")
    text = os.read(ours, 65536).decode()
    os.close(ours)
    return text


def test_a_bar_on_a_terminal():
    text = _shown(40, 130)
    assert "3/3" in text and "loss 2.5000  lr 1.00e-03  4,096 tokens/s" in text and "100%" in text


@pytest.mark.parametrize("rows, columns", [(0, 0), (0, 120)])
def test_lines_on_a_terminal_without_a_size(rows, columns):
    assert "step 3/3  loss 2.5000  lr 1.00e-03  4,096 tokens/s  0:00 left" in _shown(rows, columns)


def test_lines_without_a_terminal():
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[0] == "step 1/3  loss 2.5000  lr 1.00e-03  4,096 tokens/s  0:00 left"
