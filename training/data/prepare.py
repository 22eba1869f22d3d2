"""Data once, into the cache: found, hashed, tokenised, split; safe when many processes start together.

CACHE/KEY/             train.bin, validation.bin, what is in them (meta.json, train.json, validation.json)
CACHE/KEY.tmp/         being made: the parts that are finished; a start after a kill goes on with them
CACHE/tokenizers/KEY/  a BPE that was trained here
CACHE/files/           hashes of large files, as long as these do not change
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from conf.check_data import TEXT_SOURCES, mixed
from conf.schema import DataConfig
from training.data.batches import check_separator
from training.data.corpus import Corpus
from training.data.locks import locked
from training.data.pieces import tokenise
from training.data.readers import Source, open_source
from training.data.split import write_sides
from training.data.stored import stored
from training.data.synthetic import synthetic
from training.data.tokenizers import Tokenizer, get_tokenizer

TOKEN_BYTES = "token_bytes.npy"
FORMAT = 2  # of the cache folder; another number makes older folders unused

log = logging.getLogger(__name__)

Write = Callable[[Path, BinaryIO, BinaryIO], dict]  # (folder for parts, train file, validation file) -> the counts


def prepare(data: DataConfig, *, sequence: int, trains: bool = True) -> Corpus:
    """Tokenises the data once into data.cache and returns where it is; safe when many processes start together.

    The folder is named by a hash of (content, tokenizer, split): changed data or another split gets another folder.

    trains: False where only what is held out is read; it may then be all.

    Raises ValueError for data that are missing, empty, unreadable or shorter than a sequence (T + 1 tokens on each side
    that is read), without a token between documents where attention must not cross them, and for a cache that cannot be
    written. Names and ranges are conf.check's to refuse.
    """
    assert 0 < data.validation_fraction < 1 or not trains, "conf.check comes first"
    corpus = _mix(data) if data.source == "mix" else _single(data)
    for part in corpus.plain():
        _check_length(part, sequence, data.validation_fraction, trains)
    if not data.cross_documents:
        check_separator(corpus.separator)
    return corpus


def _single(data: DataConfig) -> Corpus:
    if data.source == "tokens":
        return stored(data)
    if data.source == "synthetic":
        facts, write = synthetic(data)
        return _cached(data, facts, lambda folder, train, held: write(train, held))
    source = open_source(data)
    return _of_text(data, source, get_tokenizer(data, [source]))


def _of_text(data: DataConfig, source: Source, tokenizer: Tokenizer) -> Corpus:
    facts = dict(
        description=source.description,
        content_hash=source.content_hash,
        vocabulary=tokenizer.vocabulary,
        tokenizer=tokenizer.identity,
        entropy_floor=None,
        separator=tokenizer.separator,
    )

    def write(folder: Path, train: BinaryIO, held: BinaryIO) -> dict:
        skipped = tokenise(source, tokenizer, folder)
        parts, fraction = len(source.parts), data.validation_fraction
        counts = write_sides(folder, parts, fraction, tokenizer.separator, tokenizer.dtype, train, held)
        sizes = tokenizer.token_bytes()
        if sizes is not None:
            np.save(folder / TOKEN_BYTES, sizes)
        return counts | {"skipped": skipped, "token_bytes": sizes is not None}

    return _cached(data, facts, write)


# ---------------------------------------------------------------------------------------------- the cache


def _cached(data: DataConfig, facts: dict, write: Write) -> Corpus:
    """The corpus of which `facts` are known, written where it is not in the cache yet."""
    identity = [facts["content_hash"], facts["tokenizer"], facts.get("separator"), data.validation_fraction, FORMAT]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    folder = Path(os.path.abspath(data.cache)) / key
    try:
        meta = _read_meta(folder, facts) or _build(folder, facts, write)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"cannot write the tokens to {folder}: {reason}: choose another data.cache") from error
    held_bytes = meta.get("validation_bytes")
    if meta.get("skipped"):
        facts = facts | {"description": f"{facts['description']}, {meta['skipped']:,} bad documents skipped"}
    return Corpus(
        train_path=str(folder / "train.bin"),
        validation_path=str(folder / "validation.bin"),
        bytes_per_token=held_bytes / meta["validation_tokens"] if held_bytes else None,
        token_bytes=str(folder / TOKEN_BYTES) if meta.get("token_bytes") else None,
        **{key: meta[key] for key in ("dtype", "train_tokens", "validation_tokens")},
        **facts,
    )


def _read_meta(folder: Path, facts: dict) -> dict | None:
    """meta.json of a finished cache folder, or None when it is absent or its files are not as long as it says."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        size = np.dtype(meta["dtype"]).itemsize
        for side in ("train", "validation"):
            if (folder / f"{side}.bin").stat().st_size != meta[f"{side}_tokens"] * size:
                return None
    except (FileNotFoundError, json.JSONDecodeError, KeyError):
        return None
    if meta["tokenizer"] != facts["tokenizer"]:
        raise ValueError(
            f"{folder} was made with the tokenizer {meta['tokenizer']}, and the data are asked for with "
            f"{facts['tokenizer']}: delete that folder"
        )
    return meta


def _build(folder: Path, facts: dict, write: Write) -> dict:
    """Writes train.bin, validation.bin and meta.json beside `folder`, then renames: a reader sees all or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock")):
        if meta := _read_meta(folder, facts):  # another process made it while this one waited
            return meta
        log.info("tokenising %s into %s", facts["description"], folder)
        shutil.rmtree(folder, ignore_errors=True)  # damaged
        unfinished = folder.with_suffix(".tmp")  # only the holder of the lock touches it
        unfinished.mkdir(exist_ok=True)
        try:
            with open(unfinished / "train.bin", "wb") as train, open(unfinished / "validation.bin", "wb") as validation:
                meta = write(unfinished, train, validation) | {"tokenizer": facts["tokenizer"]}
            (unfinished / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
            _write_sidecars(unfinished, meta, facts)
            for part in unfinished.glob("part_*"):
                part.unlink()
            unfinished.rename(folder)
        except Exception:  # a full disk is not left full; after Ctrl-C or a kill the finished parts are of use
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return meta


def _write_sidecars(folder: Path, meta: dict, facts: dict) -> None:
    """So that either file can be used elsewhere, as data=tokens."""
    for side in ("train", "validation"):
        values = {"dtype": meta["dtype"], "count": meta[f"{side}_tokens"], "bytes": meta.get(f"{side}_bytes")}
        values |= {key: facts.get(key) for key in ("vocabulary", "tokenizer", "separator")}
        text = json.dumps({key: value for key, value in values.items() if value is not None}, indent=2)
        (folder / f"{side}.json").write_text(text + "\n")


def _check_length(corpus: Corpus, sequence: int, fraction: float, trains: bool) -> None:
    sides = [("training", corpus.train_tokens, "smaller")] if trains else []
    for side, tokens, change in (*sides, ("held-out", corpus.validation_tokens, "larger")):
        if tokens < sequence + 1:
            remedy = f"more text, or a {change} data.validation_fraction (now {fraction})"
            remedy = f"a smaller train.sequence, {remedy}" if fraction < 1 else "a smaller train.sequence, or more text"
            raise ValueError(
                f"{corpus.description}: {tokens} {side} tokens are fewer than the {sequence + 1} that one sequence of"
                f" train.sequence={sequence} needs: use {remedy}"
            )


# ---------------------------------------------------------------------------------------------- a mix


def _mix(data: DataConfig) -> Corpus:
    """The corpora of the sources, with one tokenizer for all; a BPE is trained on all their text."""
    entries = mixed(data)
    sources = {number: open_source(part) for number, (_, part) in enumerate(entries) if part.source in TEXT_SOURCES}
    tokenizer = get_tokenizer(data, list(sources.values())) if sources else None
    parts = []
    for number, (_, part) in enumerate(entries):
        if number in sources:
            parts.append(_of_text(part, sources[number], tokenizer))
        else:
            parts.append(stored(part))
    _check_same_tokenizer(parts)
    weights = tuple(weight for weight, _ in entries)
    share = ", ".join(
        f"{weight / sum(weights):.1%} {part.description}" for weight, part in zip(weights, parts, strict=True)
    )
    known = all(part.bytes_per_token is not None for part in parts)
    held_out = sum(part.validation_tokens for part in parts)
    text_bytes = sum(part.bytes_per_token * part.validation_tokens for part in parts) if known else None
    separators = {part.separator for part in parts}
    largest = max(parts, key=lambda part: part.vocabulary)
    return replace(
        largest,
        train_path="",
        validation_path="",
        train_tokens=sum(part.train_tokens for part in parts),
        validation_tokens=held_out,
        tokenizer=min(part.tokenizer for part in parts if part.tokenizer != "unknown" or part is largest),
        bytes_per_token=text_bytes / held_out if known else None,
        content_hash=hashlib.sha256(json.dumps([[p.content_hash for p in parts], weights]).encode()).hexdigest(),
        description=f"mix: {share}",
        train_start=0,
        validation_start=0,
        token_bytes=parts[0].token_bytes if len({part.tokenizer for part in parts}) == 1 else None,
        separator=separators.pop() if len(separators) == 1 else None,
        parts=tuple(parts),
        weights=weights,
    )


def _check_same_tokenizer(parts: list[Corpus]) -> None:
    """An id must mean the same in every source. A file of tokens that names no tokenizer is taken as it is."""
    known = [part for part in parts if part.tokenizer != "unknown"]
    for part in known[1:]:
        if part.tokenizer != known[0].tokenizer:
            raise ValueError(
                f"data.sources do not have one tokenizer: {known[0].description} has {known[0].tokenizer}, "
                f"{part.description} has {part.tokenizer}"
            )
