"""Starts planning/probe.py in children on this machine, and asks them. No torch here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
MOST_CHILDREN = 8
TIMEOUT_S = 120
LARGE_BYTES = 4 * 2**20  # of the large message between two ranks


def ask(shapes: list[dict], cores: int, *, threaded: int, pipelined: int, chunks: int) -> list[dict] | None:
    """What each of as many children as there are cores answers, all at once; with several cores the first one's answer
    has, measured after that, what threads do (`threaded`: on which of the shapes), and, under `pair`, what two ranks
    cost each other (`pipelined`: the shape of their pipeline's blocks; `chunks` micro-batches). None: one failed.
    """
    children: list[subprocess.Popen] = []
    end = threading.Timer(TIMEOUT_S, lambda: [child.kill() for child in children])
    end.start()
    try:
        for _ in range(min(cores, MOST_CHILDREN)):
            children.append(_start())
        for child in children:
            child.stdout.readline()  # it has imported torch
        answers = _ask(children, [{"shapes": shapes, "threaded": threaded}] * len(children))
        if cores > 1:
            answers[0] |= _ask(children[:1], [{"threads": cores}])[0]
            with tempfile.TemporaryDirectory() as folder:
                asked = {"store": str(Path(folder, "store")), "chunks": chunks, "small": shapes[0]}
                asked["shape"] = shapes[pipelined]
                answers[0]["pair"] = _ask(children[:2], [asked | {"rank": rank} for rank in (0, 1)])[0]
        return answers
    except (OSError, ValueError):
        return None
    finally:
        end.cancel()
        for child in children:
            child.kill()
            child.communicate()


def _start() -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-m", "planning.probe"], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True,
        cwd=REPOSITORY, env=environment,
    )  # fmt: skip


def _ask(children: list[subprocess.Popen], questions: list[dict]) -> list[dict]:
    """All at once. ValueError: a child has died."""
    for child, question in zip(children, questions, strict=True):
        print(json.dumps(question), file=child.stdin, flush=True)
    return [json.loads(child.stdout.readline()) for child in children]
