"""Documents to tokens: part after part, by as many processes as there are cores, kept when a kill comes between.

FOLDER/part_00000.bin      the tokens of the part's documents, a separator behind each
FOLDER/part_00000.index    a record for each document, or part of one: INDEX
FOLDER/part_00000.json     written last: the part is finished
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from itertools import islice
from multiprocessing import active_children, get_context
from pathlib import Path

import numpy as np
from tqdm import tqdm

from conf.device import num_cores
from training.data.readers import Piece, Source, Span
from training.data.tokenizers import Tokenizer

INDEX = np.dtype([("digest", "<u8"), ("bytes", "<u8"), ("tokens", "<u8"), ("ends", "?")])  # tokens with the separator
BATCH_BYTES = 1 << 20  # of text that is tokenised at once
PROGRESS_AFTER_S = 2.0  # shorter work shows no bar
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def part_path(folder: Path, number: int, suffix: str) -> Path:
    return folder / f"part_{number:05d}.{suffix}"


def tokenise(source: Source, tokenizer: Tokenizer, folder: Path) -> int:
    """Writes the parts that are not in `folder` yet; returns the number of bad documents that were skipped in all.

    The parts do not depend on the number of processes. Memory: some blocks and rows a process, and the longest line.
    Raises ValueError for a bad document, or where all were skipped; the other parts that were finished stay.
    """
    numbers = range(len(source.parts))
    todo = [number for number in numbers if not part_path(folder, number, "json").exists()]
    sizes = {number: sum(span.size for span in source.parts[number]) for number in numbers}
    workers = min(num_cores(), len(todo))
    with tqdm(
        total=sum(sizes.values()),
        initial=sum(sizes.values()) - sum(sizes[number] for number in todo),
        desc="tokenising",
        unit="B",
        unit_scale=True,
        delay=PROGRESS_AFTER_S,
        disable=None,  # where the output is no terminal
    ) as bar:
        if workers <= 1:
            for number in todo:
                _write_part(source, source.parts[number], tokenizer, folder, number)
                bar.update(sizes[number])
        else:
            _in_processes(source, tokenizer, folder, todo, workers, lambda number: bar.update(sizes[number]))
    skipped = sum(json.loads(part_path(folder, number, "json").read_text())["skipped"] for number in numbers)
    if skipped and not any(part_path(folder, number, "index").stat().st_size for number in numbers):
        reason = _first_bad(source, utf8=not tokenizer.is_bytes)
        raise ValueError(
            f"no data: all {skipped:,} documents of {source.description} are bad and skipped; first {reason}"
        )
    return skipped


def _first_bad(source: Source, utf8: bool) -> str:
    """Where the first bad document is, and what is wrong with it."""
    strict = replace(source, skip_bad=False)
    try:
        for part in source.parts:
            for _ in strict.read(part, utf8):
                pass
    except ValueError as error:
        return str(error).partition("; data.bad_documents=")[0]
    raise AssertionError("a bad document was skipped and cannot be found again")


def _in_processes(source, tokenizer, folder, todo: list[int], workers: int, done) -> None:
    light = Source(**{**vars(source), "parts": []})  # the parts are sent one by one
    others = active_children()
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (os.getpid(),))
    try:
        futures = {
            pool.submit(_write_part, light, source.parts[number], tokenizer, folder, number): number for number in todo
        }
        for future in as_completed(futures):
            future.result()
            done(futures[future])
    except BrokenProcessPool as error:
        raise ValueError(
            f"a process that was tokenising {source.description} was killed (no memory left?): the same command goes "
            "on with what is finished"
        ) from error
    finally:
        for child in active_children():  # after an error or Ctrl-C; else they have nothing left to do
            if child not in others:
                child.terminate()
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(parent: int) -> None:
    """Ends with the process that started it, also when that is killed, and leaves Ctrl-C to it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process is a core


def _write_part(source: Source, part: list[Span], tokenizer: Tokenizer, folder: Path, number: int) -> None:
    source.skipped = 0
    encode = tokenizer.encoder()
    tail = [] if tokenizer.separator is None else [tokenizer.separator]
    separator = np.array(tail, tokenizer.dtype).tobytes()
    pieces = source.read(part, utf8=not tokenizer.is_bytes)
    with (
        open(part_path(folder, number, "bin"), "wb") as tokens,
        open(part_path(folder, number, "index"), "wb") as index,
    ):
        for batch in _batches(pieces):
            records = []
            for piece, ids in zip(batch, encode([piece.text for piece in batch]), strict=True):
                tokens.write(ids)
                if piece.ends:
                    tokens.write(separator)
                records.append((piece.digest, len(piece.text), len(ids) + len(tail) * piece.ends, piece.ends))
            np.array(records, INDEX).tofile(index)
    unfinished = part_path(folder, number, "json.tmp")
    unfinished.write_text(json.dumps({"skipped": source.skipped}))
    unfinished.rename(part_path(folder, number, "json"))


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Pieces of BATCH_BYTES together, or one that is larger."""
    while batch := list(islice(pieces, 1)):
        size = len(batch[0].text)
        while size < BATCH_BYTES and (more := next(pieces, None)) is not None:
            batch.append(more)
            size += len(more.text)
        yield batch
