"""Which tokens sample i of the run is: arithmetic in (corpus, sequence, seed, i), for any layout, cut or restart.

Shape letters: N sequences asked for, T tokens a sequence.
"""

from __future__ import annotations

import math

import numpy as np

from training.data.corpus import Corpus

SLOTS = 10_000  # a mix: samples in which each source has its exact number; weights are kept to 1 in so many
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: the increment of SplitMix64


def permute(index: np.ndarray, size: int, seed: int, epoch: np.ndarray) -> np.ndarray:
    """Where a pseudo-random permutation of 0..size-1, one for each (seed, epoch), sends each index; all [N], int64.

    A Feistel network on pairs of numbers below ceil(sqrt(size)), added modulo that side, with cycle walking: what falls
    outside 0..size-1 goes through again (J. Black and P. Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002,
    methods 2 and 3). The round function is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    Nothing is stored: a layout, a restart or a rank needs only the numbers to know the order.
    """
    side = np.uint64(math.isqrt(size - 1) + 1)
    key = _mix(_mix(np.array([seed % 2**64], np.uint64)) + GOLDEN * (epoch.astype(np.uint64) + np.uint64(1)))
    result = index.astype(np.uint64)
    pending = np.arange(len(result))
    while len(pending):
        left, right = result[pending] // side, result[pending] % side
        for constant in GOLDEN * np.arange(1, 9, dtype=np.uint64):  # eight rounds
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

    A mix deals out SLOTS samples at a time: each source gets its weight's part of them, in a shuffled order. A source
    takes its own sequences in epochs of its own, every one once before any comes again (but for one deal: in the deal
    in which its epoch ends, some of the next may come before the last of this); a small one with a large weight is
    simply met more often. Held-out sequences of a mix are those of all its sources, by size and not by weight.
    """

    def __init__(self, corpus: Corpus, sequence: int, seed: int):
        self.seed, self.separator = seed, corpus.separator
        self._bytes_per_token = corpus.bytes_per_token
        self._token_bytes = np.load(corpus.token_bytes) if corpus.token_bytes else None
        self._train = [_windows(part.open("train"), sequence) for part in corpus.plain()]
        self._validation = [_windows(part.open("validation"), sequence) for part in corpus.plain()]
        self._slots = slots(corpus.weights or (1.0,))
        self.samples_per_epoch = sum(len(inputs) for inputs, _ in self._train)
        self.num_validation = sum(len(inputs) for inputs, _ in self._validation)

    def samples(self, start: int, count: int) -> np.ndarray:
        """Numbers of `count` samples of the run from `start`, int64 [count]."""
        return np.arange(start, start + count, dtype=np.int64)

    def train(
        self, start: int, count: int, want: tuple[str, ...] = ("inputs", "targets")
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """(inputs, targets), int64 [count, T] each, of samples start..start+count; None for what is not in `want`."""
        return _gather(self._train, *self._place(start, count), want)

    def validation(
        self, index: int, count: int, want: tuple[str, ...] = ("inputs", "targets")
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """As train, of held-out sequences, in an order that is the same for every run: any seed, any layout.

        The order is mixed, so that the first few are a sample of all held-out text and not the start of one document.
        """
        return _gather(self._validation, *self._place_held_out(index, count), want)

    def bytes_per_token(self, count: int) -> float | None:
        """Bytes of text that a target token of the first `count` held-out sequences (or all there are) stands for, on
        average: what makes nats a token bits per byte. A separator counts as one byte, whatever the tokenizer.

        Exact where each id has its bytes (byte, byte-level BPE); else the average of all held-out text; None where the
        text is not known.
        """
        if self._token_bytes is None:
            return self._bytes_per_token
        _, targets = self.validation(0, min(count, self.num_validation), ("targets",))
        return float(self._token_bytes[targets].mean())

    def train_documents(self, start: int, count: int) -> np.ndarray:
        """The number of the document that each input token belongs to, int64 [count, T], from 0 in each sequence; of
        the same samples as `train`. A separator belongs to the document that it ends.

        Raises ValueError where no token stands between documents.
        """
        return self._documents(_gather(self._train, *self._place(start, count), ("inputs",))[0])

    def validation_documents(self, index: int, count: int) -> np.ndarray:
        """As train_documents, of held-out sequences."""
        return self._documents(_gather(self._validation, *self._place_held_out(index, count), ("inputs",))[0])

    def _place(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(source [N], row in it [N]) of samples of the run."""
        deal, slot = np.divmod(self.samples(start, count), int(self._slots[-1]))
        if len(self._train) > 1:
            slot = permute(slot, int(self._slots[-1]), self.seed, deal)
        source = np.searchsorted(self._slots, slot, side="right") - 1
        index = deal * np.diff(self._slots)[source] + slot - self._slots[source]
        rows = np.empty_like(index)
        for number, (inputs, _) in enumerate(self._train):
            own = source == number
            epoch, place = np.divmod(index[own], len(inputs))
            rows[own] = permute(place, len(inputs), self.seed + number * int(GOLDEN), epoch)
        return source, rows

    def _place_held_out(self, index: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        assert index + count <= self.num_validation, (index, count, self.num_validation)
        rows = permute(self.samples(index, count), self.num_validation, 0, np.zeros(count, np.int64))
        starts = np.cumsum([0, *(len(inputs) for inputs, _ in self._validation)])
        source = np.searchsorted(starts, rows, side="right") - 1
        return source, rows - starts[source]

    def _documents(self, inputs: np.ndarray) -> np.ndarray:
        check_separator(self.separator)
        ends = inputs == self.separator
        return np.cumsum(ends, axis=1) - ends


def check_separator(separator: int | None) -> None:
    """Raises ValueError where documents cannot be told from each other."""
    if separator is None:
        raise ValueError(
            "data.cross_documents=false needs a token between documents, and these data have none: name it with "
            "data.separator, or set data.cross_documents=true"
        )


def slots(weights: tuple[float, ...]) -> np.ndarray:
    """Bounds [sources + 1] of each source's slots in a deal: its weight's part of SLOTS, rounded (largest remainders
    first, so that the sum holds), at least one. One source: a deal is one sample."""
    if len(weights) == 1:
        return np.array([0, 1])
    share = np.array(weights) / sum(weights) * SLOTS
    counts = np.maximum(1, np.floor(share)).astype(np.int64)
    for source in np.argsort(counts - share, kind="stable")[: max(0, SLOTS - int(counts.sum()))]:
        counts[source] += 1
    return np.cumsum([0, *counts])


def _windows(tokens: np.ndarray, sequence: int) -> tuple[np.ndarray, np.ndarray]:
    """Views (inputs, targets), [N, T] each, of the N sequences that are whole: the last has its T + 1 tokens."""
    count = (len(tokens) - 1) // sequence
    used = count * sequence
    return tokens[:used].reshape(count, sequence), tokens[1 : used + 1].reshape(count, sequence)


def _gather(
    sides: list[tuple[np.ndarray, np.ndarray]], source: np.ndarray, rows: np.ndarray, want: tuple[str, ...]
) -> tuple[np.ndarray | None, np.ndarray | None]:
    result = []
    for which, name in enumerate(("inputs", "targets")):
        if name not in want:
            result.append(None)
            continue
        if len(sides) == 1:
            result.append(sides[0][which][rows].astype(np.int64))
            continue
        result.append(np.empty((len(rows), sides[0][0].shape[1]), np.int64))
        for number, views in enumerate(sides):
            own = source == number
            result[-1][own] = views[which][rows[own]]
    return result[0], result[1]
