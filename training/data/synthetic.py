"""A seeded random stream whose entropy is known: the loss that no model can beat."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import BinaryIO

import numpy as np

from conf.schema import DataConfig

SUCCESSORS = 8  # at most this many symbols can follow a symbol


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


def synthetic(data: DataConfig) -> tuple[dict, Callable[[BinaryIO, BinaryIO], dict]]:
    """What the Corpus of the chain says of it, and write(train_file, validation_file) -> the counts."""
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
    facts = dict(
        description=f"{description}, entropy rate {entropy:.4f} nats a token",
        content_hash=hashlib.sha256(description.encode()).hexdigest(),  # its parameters determine every token
        vocabulary=vocabulary,
        tokenizer="synthetic",
        entropy_floor=entropy,
    )
    return facts, write
