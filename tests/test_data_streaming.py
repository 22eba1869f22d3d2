"""Data larger than the memory: parts, several processes, a kill in between, a full progress bar."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from corpora import documents, make, sides, write_jsonl

from ranks import ROOT

TEXTS = documents(400)
PROGRAM = """
import json, re, sys
import training.data.pieces as pieces
import training.data.readers as readers
from conf.schema import DataConfig
from training.data import prepare
values, part_bytes, cores = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])


def kilobytes(what):
    return int(re.search(what + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])


if __name__ == "__main__":
    readers.PART_BYTES = part_bytes
    pieces.num_cores = lambda: cores
    open("/proc/self/clear_refs", "w").write("5")  # the peak is counted from here
    before = kilobytes("VmRSS")
    corpus = prepare(DataConfig(name="t", **values), sequence=16)
    print(json.dumps([corpus.to_dict(), kilobytes("VmHWM") - before]))
"""


@pytest.fixture
def start(tmp_path):
    """start(source, **values) -> a process that prepares the data."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def start(source: str, part_bytes: int, cores: int, **values) -> subprocess.Popen:
        values = {"source": source, "cache": str(tmp_path / "cache")} | values
        command = [sys.executable, str(tmp_path / "program.py"), json.dumps(values), str(part_bytes), str(cores)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    return start


@pytest.mark.parametrize(("source", "tokenizer"), [("jsonl", "byte"), ("text", "byte"), ("jsonl", "bpe")])
def test_parts_and_processes_make_no_difference(tmp_path, monkeypatch, source, tokenizer):
    if tokenizer == "bpe":
        pytest.importorskip("tokenizers")
    if source == "jsonl":
        path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    else:
        path = tmp_path / "texts"
        path.mkdir()
        for number in range(20):
            (path / f"{number}.txt").write_text("\n".join(TEXTS[20 * number : 20 * number + 20]))
    values = dict(path=path, tokenizer=tokenizer, tokenizer_vocabulary=300)
    whole = make(tmp_path, source, cache=str(tmp_path / "one"), **values)
    monkeypatch.setattr("training.data.readers.PART_BYTES", 20_000)
    monkeypatch.setattr("training.data.pieces.num_cores", lambda: 2)
    parts = make(tmp_path, source, cache=str(tmp_path / "many"), **values)
    for one, many in zip(sides(whole), sides(parts), strict=True):
        assert np.array_equal(one, many)
    assert whole.content_hash == parts.content_hash


def test_a_bad_line_in_a_part_far_on_has_its_number_and_stops_all_processes(tmp_path, monkeypatch):
    monkeypatch.setattr("training.data.readers.PART_BYTES", 10_000)
    monkeypatch.setattr("training.data.pieces.num_cores", lambda: 2)
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:311], "oops\n", *lines[311:]]))
    with pytest.raises(ValueError, match="a.jsonl, line 312: no JSON"):
        make(tmp_path, "jsonl", path=path)
    assert not list(tmp_path.glob("cache/*.tmp"))  # with the line mended it is other text


def test_memory_does_not_grow_with_the_text(tmp_path, start):
    """A text of 30 MB in blocks of 1 MB: kilobytes over what the imports take, of a process that does all of it."""
    line = "x" * 5000 + "\n"
    with open(tmp_path / "a.txt", "w") as file:
        for number in range(6_000):
            file.write(f"{number} {line}")
    with open(tmp_path / "a.jsonl", "w") as file:
        for number in range(6_000):
            file.write(json.dumps({"text": f"{number} {line}"}) + "\n")
    for source in ("text", "jsonl"):
        path = tmp_path / {"text": "a.txt", "jsonl": "a.jsonl"}[source]
        output, _ = start(source, 1 << 22, 1, path=str(path)).communicate(timeout=60)
        corpus, grown = json.loads(output)
        assert corpus["train_tokens"] + corpus["validation_tokens"] > 29_000_000
        assert 0 < grown < 15_000


def test_finished_parts_outlive_a_kill_and_no_process_does(tmp_path, start, monkeypatch):
    """Killed with three parts or more finished: only the others are made by the next start."""
    path = write_jsonl(tmp_path / "a.jsonl", documents(20_000))
    process = start("jsonl", 1 << 18, 2, path=str(path))
    deadline = time.monotonic() + 60
    while len(finished := list(tmp_path.glob("cache/*.tmp/part_*.json"))) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    children = _children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    _wait_until_gone(children)
    assert not list(tmp_path.glob("cache/*/meta.json"))
    written = []
    from training.data import pieces

    original = pieces._write_part
    monkeypatch.setattr(pieces, "_write_part", lambda *args: (written.append(args[-1]), original(*args)))
    monkeypatch.setattr(pieces, "num_cores", lambda: 1)
    monkeypatch.setattr("training.data.readers.PART_BYTES", 1 << 18)
    corpus = make(tmp_path, "jsonl", path=path)
    assert written and not {int(part.stem[5:]) for part in finished} & set(written)
    fresh = make(tmp_path, "jsonl", path=path, cache=str(tmp_path / "other"))
    for one, other in zip(sides(corpus), sides(fresh), strict=True):
        assert np.array_equal(one, other)
    assert not list(tmp_path.glob("cache/*.tmp"))


def _children(pid: int) -> list[int]:
    return [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]


def _wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "left behind"
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_process_of_the_pool_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setattr("training.data.readers.PART_BYTES", 10_000)
    monkeypatch.setattr("training.data.pieces.num_cores", lambda: 2)
    monkeypatch.setattr("training.data.pieces._start_worker", _die)
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(ValueError, match=r"a process that was tokenising .* was killed \(no memory left\?\)"):
        make(tmp_path, "jsonl", path=path)


def _die(parent: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
