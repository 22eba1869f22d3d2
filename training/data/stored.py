"""Tokens that are stored already: a file of ids, this project's or another tool's, mapped where it lies.

Beside tokens.bin may stand tokens.json, which this project's cache has too:
    {"dtype": "uint16", "vocabulary": 50257, "count": 1000000, "tokenizer": "tokenizer.json 0123456789abcdef",
     "separator": 50256, "bytes": 4400000}
`tokenizer`, `separator` and `bytes` (of the text) may be left out. Without it data.dtype and data.vocabulary say it.
"""

from __future__ import annotations

import hashlib
import os

import numpy as np
from tqdm import tqdm

import training.data.files as files
from conf.check_data import LARGEST, read_sidecar, sidecar_path
from conf.schema import DataConfig
from training.data.corpus import Corpus

PROGRESS_AFTER_S = 2.0  # shorter work shows no bar


def stored(data: DataConfig) -> Corpus:
    """The corpus of a file of tokens; its last `validation_fraction` is held out. Nothing is copied; the whole file is
    read once, to find ids that are none and its hash, and not again as long as it does not change.

    Raises ValueError for a file that is missing or empty, for a type, size or vocabulary that cannot be, and for an id
    beyond the vocabulary, with its position.
    """
    if not data.path:
        raise ValueError("data.source=tokens needs data.path: a .bin file of token ids")
    path = os.path.abspath(os.path.expanduser(data.path))
    if not os.path.isfile(path):
        raise ValueError(f"data.path={data.path}: no such file (relative paths start from {os.getcwd()})")
    known = read_sidecar(path)
    dtype, vocabulary, separator = _facts(data, known)
    size, item = os.path.getsize(path), np.dtype(dtype).itemsize
    count = size // item
    if size % item or not count:
        raise ValueError(
            f"{data.path} has {size:,} bytes, which are no whole number of {dtype} ids: is data.dtype right?"
        )
    if known.get("count", count) != count:
        wrong = "was cut short" if count < known["count"] else "was added to since that was written"
        raise ValueError(
            f"{data.path} holds {count:,} {dtype} ids and {sidecar_path(path)} says {known['count']:,}: the file "
            f"{wrong}, or the type is wrong"
        )
    digest = _checked(path, dtype, vocabulary, data)
    held_out = round(data.validation_fraction * count)
    return Corpus(
        train_path=path,
        validation_path=path,
        dtype=dtype,
        train_tokens=count - held_out,
        validation_tokens=held_out,
        vocabulary=vocabulary,
        tokenizer=known.get("tokenizer", "unknown"),
        bytes_per_token=known["bytes"] / count if known.get("bytes") else None,
        content_hash=digest,
        description=f"tokens {data.path}: {count:,} {dtype} ids of {vocabulary:,}",
        entropy_floor=None,
        validation_start=count - held_out,
        separator=separator,
    )


def _facts(data: DataConfig, known: dict) -> tuple[str, int, int | None]:
    """(type, vocabulary, separator) from what was typed and what the sidecar says; both must agree where both speak."""
    place = sidecar_path(data.path)
    for key in ("dtype", "vocabulary", "separator"):
        typed = getattr(data, key)
        if typed is not None and known.get(key, typed) != typed:
            raise ValueError(
                f"data.{key}={typed}, and {place} says {known[key]}: leave data.{key} out, or mend the file"
            )
    dtype = data.dtype or known.get("dtype")
    if dtype not in LARGEST:
        what = f"{place} says dtype {dtype}" if dtype else f"no {place.name} beside {data.path} says how ids are stored"
        raise ValueError(f"{what}: give data.dtype, one of {', '.join(LARGEST)}")
    vocabulary = data.vocabulary or known.get("vocabulary")
    if vocabulary is None:
        raise ValueError(f"no {place.name} beside {data.path} says its vocabulary: give data.vocabulary")
    if vocabulary > LARGEST[dtype]:
        raise ValueError(
            f"{place}: a vocabulary of {vocabulary:,} does not fit {dtype}, which holds {LARGEST[dtype]:,} ids: the "
            "larger ones are lost already; store the tokens as uint32"
        )
    separator = data.separator if data.separator is not None else known.get("separator")
    if separator is not None and (type(separator) is not int or not 0 <= separator < vocabulary):
        raise ValueError(
            f"data.separator={separator} is no id of a vocabulary of {vocabulary:,}: 0 to {vocabulary - 1}"
        )
    return dtype, vocabulary, separator


def _checked(path: str, dtype: str, vocabulary: int, data: DataConfig) -> str:
    """The SHA-256 of the file, of which every id has been looked at. ValueError for one beyond the vocabulary."""
    facts = files.recall(path, data.cache)
    if facts is None or dtype not in facts.get("largest_id", {}):
        before = files.fingerprint(path)
        facts = _read_all(path, dtype)
        files.remember(path, data.cache, before, facts)
    largest, position = facts["largest_id"][dtype]
    if largest >= vocabulary:
        raise ValueError(
            f"{data.path}: id {largest:,} at position {position:,} is beyond the vocabulary of {vocabulary:,}: is "
            f"data.dtype={dtype} right, and data.vocabulary?"
        )
    return facts["sha256"]


def _read_all(path: str, dtype: str) -> dict:
    """The hash of a file of ids, and its largest id with the position where that is first met."""
    digest, largest, position, start = hashlib.sha256(), -1, 0, 0
    size, item = os.path.getsize(path), np.dtype(dtype).itemsize
    with tqdm(total=size, desc="checking ids", unit="B", unit_scale=True, delay=PROGRESS_AFTER_S, disable=None) as bar:
        for block in files.blocks(path):  # of a whole number of ids
            digest.update(block)
            ids = np.frombuffer(block, dtype)
            if (found := int(ids.max())) > largest:
                largest, position = found, start + int(ids.argmax())
            start += len(block) // item
            bar.update(len(block))
    return {"sha256": digest.hexdigest(), "largest_id": {dtype: [largest, position]}}
