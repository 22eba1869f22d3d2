"""The corpus and its batches: tokenised once into memory maps; the batch is arithmetic in (seed, consumed samples)."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import logging
import math
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Optional

import numpy as np

from conf.schema import DataConfig
from training import tokenize

FORMAT = 1  # of the cache folder; another number makes older folders unused
SUCCESSORS = 8  # synthetic: at most this many symbols can follow a symbol

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Corpus:
    """A tokenised corpus: where its two memory maps are and what they hold. Plain JSON through to_dict / from_dict."""

    train_path: str
    validation_path: str
    dtype: str  # numpy's name of a stored token
    train_tokens: int
    validation_tokens: int
    vocabulary: int  # number of different tokens that the tokenizer can produce
    tokenizer: str
    bytes_per_token: Optional[float]  # for bits per byte; None where the data are no bytes
    content_hash: str
    description: str  # one line for people
    entropy_floor: Optional[float]  # nats a token that no model can beat; None where it is not known

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: dict) -> Corpus:
        return Corpus(**values)

    def open(self, side: str) -> np.ndarray:
        """The tokens of "train" or "validation", [tokens], read-only, mapped and not read."""
        path, tokens = getattr(self, f"{side}_path"), getattr(self, f"{side}_tokens")
        return np.asarray(np.memmap(path, dtype=self.dtype, mode="r", shape=(tokens,)))


# ---------------------------------------------------------------------------------------------- prepare


@dataclass(frozen=True)
class _Source:
    """What a data source knows before it is tokenised; write(train_file, validation_file) -> counts of the two maps."""

    description: str
    content_hash: str
    vocabulary: int
    tokenizer: str
    bytes_per_token: Optional[float]
    entropy_floor: Optional[float]
    write: Callable[[BinaryIO, BinaryIO], dict]


def prepare(data: DataConfig, *, sequence: int) -> Corpus:
    """Tokenises the data once into data.cache and returns where it is; safe when many processes start together.

    The folder is named by a hash of (content, tokenizer, split): changed data or another split gets another folder.

    Raises ValueError for data that are missing, empty, unreadable or shorter than a sequence (T + 1 tokens on either
    side), and for a cache that cannot be written. Names and ranges are conf.check's to refuse.
    """
    assert data.source in SOURCES and data.tokenizer == "byte", "conf.check comes first"
    assert 0 < data.validation_fraction < 1, "conf.check comes first"
    source = SOURCES[data.source](data)
    identity = [source.content_hash, source.tokenizer, data.validation_fraction, FORMAT]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    folder = Path(os.path.abspath(data.cache)) / key
    try:
        counts = _read_counts(folder) or _build(folder, source)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"cannot write the tokens to {folder}: {reason}: choose another data.cache") from error
    corpus = Corpus(
        train_path=str(folder / "train.bin"),
        validation_path=str(folder / "validation.bin"),
        vocabulary=source.vocabulary,
        tokenizer=source.tokenizer,
        bytes_per_token=source.bytes_per_token,
        content_hash=source.content_hash,
        description=source.description,
        entropy_floor=source.entropy_floor,
        **counts,
    )
    _check_length(corpus, sequence, data.validation_fraction)
    return corpus


def _read_counts(folder: Path) -> dict | None:
    """meta.json of a finished cache folder, or None when it is absent or its files are not as long as it says."""
    try:
        counts = json.loads((folder / "meta.json").read_text())
        size = np.dtype(counts["dtype"]).itemsize
        for side in ("train", "validation"):
            if (folder / f"{side}.bin").stat().st_size != counts[f"{side}_tokens"] * size:
                return None
        return {key: counts[key] for key in ("dtype", "train_tokens", "validation_tokens")}
    except (FileNotFoundError, json.JSONDecodeError, KeyError):
        return None


def _build(folder: Path, source: _Source) -> dict:
    """Writes train.bin, validation.bin and meta.json beside `folder`, then renames: a reader sees all or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock")):
        if counts := _read_counts(folder):  # another process made it while this one waited
            return counts
        log.info("tokenising %s into %s", source.description, folder)
        unfinished = folder.with_suffix(".tmp")  # only the holder of the lock touches it
        for leftover in (unfinished, folder):
            if leftover.exists():
                shutil.rmtree(leftover)
        unfinished.mkdir()
        try:
            with open(unfinished / "train.bin", "wb") as train, open(unfinished / "validation.bin", "wb") as validation:
                counts = source.write(train, validation)
            (unfinished / "meta.json").write_text(json.dumps(counts, indent=2) + "\n")
            unfinished.rename(folder)
        except BaseException:  # a full disk is not left full
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return counts


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits for the file's lock; the system lets go of it when its holder dies."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check_length(corpus: Corpus, sequence: int, fraction: float) -> None:
    for side, tokens, change in (
        ("training", corpus.train_tokens, "smaller"),
        ("held-out", corpus.validation_tokens, "larger"),
    ):
        if tokens < sequence + 1:
            raise ValueError(
                f"{corpus.description}: {tokens} {side} tokens are fewer than the {sequence + 1} that one sequence of"
                f" train.sequence={sequence} needs: use a smaller train.sequence, more text, or a {change}"
                f" data.validation_fraction (now {fraction})"
            )


# ---------------------------------------------------------------------------------------------- sources


def _files_source(paths: list[str], description: str, fraction: float) -> _Source:
    documents = tokenize.scan(paths)

    def write(train: BinaryIO, validation: BinaryIO) -> dict:
        train_pieces, validation_pieces = tokenize.split(documents, fraction)
        return dict(
            dtype="uint8",
            train_tokens=tokenize.write_tokens(train_pieces, train),
            validation_tokens=tokenize.write_tokens(validation_pieces, validation),
        )

    files = "1 file" if len(documents) == 1 else f"{len(documents)} files"
    size = sum(document.size for document in documents)
    return _Source(
        description=f"{description}: {files}, {size:,} bytes",
        content_hash=tokenize.content_hash(documents),
        vocabulary=tokenize.BYTE_VOCABULARY,
        tokenizer="byte",
        bytes_per_token=1.0,
        entropy_floor=None,
        write=write,
    )


def _python_source(data: DataConfig) -> _Source:
    description = f"standard library of Python {platform.python_version()}"
    return _files_source(tokenize.library_files(), description, data.validation_fraction)


def _text(data: DataConfig) -> _Source:
    return _files_source(tokenize.text_files(data.path), f"text {data.path}", data.validation_fraction)


def synthetic_chain(vocabulary: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The synthetic Markov chain as (symbols [V], shifts [K], probabilities [K]), K = min(8, V).

    The symbols stand on a circle in a random order, symbols[0], symbols[1], ...; from its place the chain moves on by
    shifts[k] with probabilities[k] (1/2, 1/4, 1/8, ...; the last two are equal); the symbol there is the next token. So
    P(next = symbols[(i + shifts[k]) % V] | symbols[i]) = probabilities[k]: first order, every symbol equally frequent,
    and the entropy of the next token is the same after each symbol.
    """
    # Raw bits of the generator: numpy promises their stream for ever, but not that of its distributions.
    bits = np.random.PCG64([seed, vocabulary])
    symbols = np.argsort(bits.random_raw(vocabulary), kind="stable")
    successors = min(SUCCESSORS, vocabulary)
    shifts = np.argsort(bits.random_raw(vocabulary), kind="stable")[:successors]
    if 1 not in shifts:
        shifts[0] = 1  # every symbol can be reached
    probabilities = 0.5 ** np.minimum(np.arange(1, successors + 1), successors - 1)
    return symbols, shifts, probabilities


def _synthetic(data: DataConfig) -> _Source:
    total, vocabulary, seed = data.synthetic_tokens, data.synthetic_vocabulary, data.synthetic_seed
    symbols, shifts, probabilities = synthetic_chain(vocabulary, seed)
    dtype = np.min_scalar_type(vocabulary - 1)

    def write(train: BinaryIO, validation: BinaryIO) -> dict:
        held_out = round(data.validation_fraction * total)
        # A byte of the generator chooses one of 256 equally likely slots, of which a shift has its share.
        slots = np.repeat(shifts, (probabilities * 256).astype(int))
        bits, place = np.random.PCG64([seed, vocabulary, 1]), 0
        for file, tokens in ((train, total - held_out), (validation, held_out)):
            for start in range(0, tokens, 1 << 20):
                count = min(1 << 20, tokens - start)
                raw = bits.random_raw(-(-count // 8)).astype("<u8").view(np.uint8)[:count]
                places = (place + np.cumsum(slots[raw])) % vocabulary
                place = int(places[-1])
                file.write(symbols[places].astype(dtype))
        return dict(dtype=dtype.name, train_tokens=total - held_out, validation_tokens=held_out)

    entropy = -float(np.sum(probabilities * np.log(probabilities)))
    description = f"synthetic Markov chain: {total} tokens, {vocabulary} symbols, seed {seed}"
    return _Source(
        description=f"{description}, entropy rate {entropy:.4f} nats a token",
        content_hash=hashlib.sha256(description.encode()).hexdigest(),  # its parameters determine every token
        vocabulary=vocabulary,
        tokenizer="synthetic",
        bytes_per_token=None,
        entropy_floor=entropy,
        write=write,
    )


SOURCES = {"python_source": _python_source, "text": _text, "synthetic": _synthetic}


# ---------------------------------------------------------------------------------------------- batches


def permute(index: np.ndarray, size: int, seed: int, epoch: np.ndarray) -> np.ndarray:
    """Where a pseudo-random permutation of 0..size-1, one for each (seed, epoch), sends each index; all [N], int64.

    A Feistel network on pairs of numbers below ceil(sqrt(size)), added modulo that side, with cycle walking: what falls
    outside 0..size-1 goes through again (J. Black and P. Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002,
    methods 2 and 3). The round function is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    Nothing is stored: a layout, a restart or a rank needs only the numbers to know the order.
    """
    side = np.uint64(math.isqrt(size - 1) + 1)
    golden = np.uint64(0x9E3779B97F4A7C15)
    key = _mix(_mix(np.array([seed % 2**64], np.uint64)) + golden * (epoch.astype(np.uint64) + np.uint64(1)))
    result = index.astype(np.uint64)
    pending = np.arange(len(result))
    while len(pending):
        left, right = result[pending] // side, result[pending] % side
        for constant in golden * np.arange(1, 9, dtype=np.uint64):  # eight rounds
            step = _mix((key[pending] + constant) ^ _mix(right)) % side
            left, right = right, (left + step) % side
        result[pending] = left * side + right
        pending = pending[result[pending] >= size]
    return result.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: a bijection of 64-bit numbers without visible structure."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Batches:
    """Sequences of a corpus by number. Sequence k is tokens k*T .. k*T+T; its targets are one token further.

    Samples are numbered through the whole run; each epoch takes every training sequence once, in an order of its own.
    What sample i is depends on (corpus, sequence, seed, i) alone, however the batches are cut.
    """

    def __init__(self, corpus: Corpus, sequence: int, seed: int):
        self.seed = seed
        self._train = _windows(corpus.open("train"), sequence)
        self._validation = _windows(corpus.open("validation"), sequence)
        self.samples_per_epoch = len(self._train[0])
        self.num_validation = len(self._validation[0])

    def samples(self, start: int, count: int) -> np.ndarray:
        """Numbers of `count` samples of the run from `start`, int64 [count]."""
        return np.arange(start, start + count, dtype=np.int64)

    def train(
        self, start: int, count: int, want: tuple[str, ...] = ("inputs", "targets")
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """(inputs, targets), int64 [count, T] each, of samples start..start+count; None for what is not in `want`."""
        epoch, index = np.divmod(self.samples(start, count), self.samples_per_epoch)
        rows = permute(index, self.samples_per_epoch, self.seed, epoch)
        return _gather(self._train, rows, want)

    def validation(
        self, index: int, count: int, want: tuple[str, ...] = ("inputs", "targets")
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """As train, of held-out sequences, in an order that is the same for every run: any seed, any layout.

        The order is mixed, so that the first few are a sample of all held-out text and not the start of one document.
        """
        assert index + count <= self.num_validation, (index, count, self.num_validation)
        rows = permute(self.samples(index, count), self.num_validation, 0, np.zeros(count, np.int64))
        return _gather(self._validation, rows, want)


def _windows(tokens: np.ndarray, sequence: int) -> tuple[np.ndarray, np.ndarray]:
    """Views (inputs, targets), [N, T] each, of the N sequences that are whole: the last has its T + 1 tokens."""
    count = (len(tokens) - 1) // sequence
    used = count * sequence
    return tokens[:used].reshape(count, sequence), tokens[1 : used + 1].reshape(count, sequence)


def _gather(
    views: tuple[np.ndarray, np.ndarray], rows: np.ndarray, want: tuple[str, ...]
) -> tuple[np.ndarray | None, np.ndarray | None]:
    inputs, targets = views
    return (
        inputs[rows].astype(np.int64) if "inputs" in want else None,
        targets[rows].astype(np.int64) if "targets" in want else None,
    )
