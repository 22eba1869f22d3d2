"""Which documents are held out, and the two files of tokens that come of it."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np

from training.data.pieces import INDEX, part_path

COPY_BYTES = 1 << 22
CHOOSING = 1 << 16  # documents looked at together


def write_sides(
    folder: Path, parts: int, fraction: float, separator: int | None, dtype: np.dtype, train: BinaryIO, held: BinaryIO
) -> dict:
    """Joins the parts in `folder` to the tokens of training and validation; returns their counts, and the bytes of the
    held-out text (a separator counts as one).

    A separator stands between two documents, not behind the last. Memory: about 120 bytes a document.
    Raises ValueError when there is no document.
    """
    index = np.concatenate([np.fromfile(part_path(folder, number, "index"), INDEX) for number in range(parts)])
    if not len(index):
        raise ValueError("no data: there is no document: point data.path at other text")
    sides, held_bytes = _sides(index, fraction, separator is not None)
    counts = {}
    for name, runs, file in (("train", sides[0], train), ("validation", sides[1], held)):
        written = _copy(folder, parts, runs, dtype, file)
        last = runs[-1] if runs else (0, 0)
        ends = np.cumsum(index["tokens"])[index["ends"]]
        if separator is not None and last[1] and last[1] in ends:
            written -= 1  # the separator behind the last document
            file.truncate(written * dtype.itemsize)
            held_bytes -= name == "validation"
        counts[f"{name}_tokens"] = written
    return counts | {"dtype": dtype.name, "validation_bytes": held_bytes}


Runs = list[tuple[int, int]]  # tokens first..last of all parts, one after the other


def _sides(index: np.ndarray, fraction: float, separated: bool) -> tuple[tuple[Runs, Runs], int]:
    """((training, validation), bytes held out); about `fraction` of the bytes are held out, and never met in training.

    Whole documents are held out where that can come near the fraction: in the order of their digests (random, but the
    same on every machine and for every tokenizer, and copies of one document stay together), each that still fits.
    Where it cannot (one document, a few, or one that outweighs the others) it is the last `fraction` of the bytes,
    contiguous, and copies of a document are dropped, so that none of it comes back in training.
    """
    stops = np.cumsum(index["tokens"]).astype(np.int64)
    starts = stops - index["tokens"].astype(np.int64)
    document = np.cumsum(np.concatenate([[0], index["ends"][:-1]])).astype(np.int64)  # of each record
    bytes_of = np.bincount(document, index["bytes"]).astype(np.int64)
    digest_of = index["digest"][np.searchsorted(document, np.arange(len(bytes_of)))]
    held = _chosen(digest_of, bytes_of, fraction)
    if held is None:
        return _tail(index, fraction, separated, starts, document, digest_of, bytes_of)
    held = held[document]
    sizes = index["bytes"] + (index["ends"] if separated else 0)
    return (_runs(starts, stops, ~held), _runs(starts, stops, held)), int(sizes[held].sum())


def _chosen(digests: np.ndarray, sizes: np.ndarray, fraction: float) -> np.ndarray | None:
    """Which documents are held out, bool [documents]; None where they would be less than half of what is wanted."""
    _, group = np.unique(digests, return_inverse=True)  # in the order of the digests
    total = np.bincount(group, sizes).astype(np.int64)
    held, target = np.zeros(len(total), bool), fraction * int(sizes.sum())
    room, smallest = target, int(total.min())
    for start in range(0, len(total), CHOOSING):
        if room < smallest:
            break
        for place, size in enumerate(total[start : start + CHOOSING].tolist(), start):
            if size <= room:
                held[place] = True
                room -= size
    return held[group] if target - room >= target / 2 else None


def _tail(index, fraction, separated, starts, document, digest_of, bytes_of) -> tuple[tuple[Runs, Runs], int]:
    kept = np.zeros(len(bytes_of), bool)
    kept[np.unique(digest_of, return_index=True)[1]] = True  # the first of its copies
    chosen = np.flatnonzero(kept[document])
    sizes = index["bytes"][chosen].astype(np.int64)
    total = int(sizes.sum())
    cut = total - round(fraction * total)  # position in the bytes of all documents, one after the other
    runs: tuple[Runs, Runs] = ([], [])
    before = held_bytes = 0
    for record, size in zip(chosen.tolist(), sizes.tolist(), strict=True):
        start, tokens = int(starts[record]), int(index["tokens"][record])
        inside = min(max(cut - before, 0), size)
        text_tokens = tokens - (separated and bool(index["ends"][record]))
        middle = start + (tokens if inside == size else text_tokens * inside // size)
        runs[0].append((start, middle))
        runs[1].append((middle, start + tokens))
        held_bytes += size - inside + (tokens - text_tokens if inside < size else 0)
        before += size
    return tuple([run for run in side if run[0] < run[1]] for side in runs), held_bytes


def _runs(starts: np.ndarray, stops: np.ndarray, wanted: np.ndarray) -> Runs:
    """The wanted records, those that follow one another as one."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], wanted, [False]]).astype(np.int8)))
    return [(int(starts[a]), int(stops[b - 1])) for a, b in edges.reshape(-1, 2)]


def _copy(folder: Path, parts: int, runs: Runs, dtype: np.dtype, out: BinaryIO) -> int:
    """Writes the runs of tokens, and returns their number."""
    written = first = 0  # token of all parts that the part begins with
    place = 0
    for number in range(parts):
        path = part_path(folder, number, "bin")
        last = first + path.stat().st_size // dtype.itemsize
        with open(path, "rb") as file:
            while place < len(runs) and runs[place][0] < last:
                start, stop = max(runs[place][0], first), min(runs[place][1], last)
                file.seek((start - first) * dtype.itemsize)
                left = (stop - start) * dtype.itemsize
                while left:
                    left -= out.write(file.read(min(left, COPY_BYTES)))
                written += stop - start
                if runs[place][1] > last:
                    break  # it goes on in the next part
                place += 1
        first = last
    return written
