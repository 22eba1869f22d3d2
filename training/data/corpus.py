"""Where a tokenised corpus is and what it holds: plain JSON, handed to the ranks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Optional

import numpy as np


@dataclass(frozen=True)
class Corpus:
    """A tokenised corpus: where its two memory maps are and what they hold. Plain JSON through to_dict / from_dict.

    A mix has `parts`, and no paths of its own; its counts are theirs together.
    """

    train_path: str
    validation_path: str
    dtype: str  # numpy's name of a stored token
    train_tokens: int
    validation_tokens: int
    vocabulary: int  # number of different tokens that the tokenizer can produce
    tokenizer: str
    bytes_per_token: Optional[float]  # of the held-out text, for bits per byte; None where the data are no bytes
    content_hash: str
    description: str  # one line for people
    entropy_floor: Optional[float]  # nats a token that no model can beat; None where it is not known
    train_start: int = 0  # the side's first token in its file
    validation_start: int = 0
    separator: Optional[int] = None  # the token between two documents; None where there is none
    token_bytes: Optional[str] = None  # file of the bytes that each id stands for, where that is known
    parts: tuple[Corpus, ...] = ()
    weights: tuple[float, ...] = ()  # of the parts

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: dict) -> Corpus:
        parts = tuple(Corpus.from_dict(part) for part in values.get("parts", ()))
        return Corpus(**values | {"parts": parts, "weights": tuple(values.get("weights", ()))})

    def open(self, side: str) -> np.ndarray:
        """The tokens of "train" or "validation", [tokens], read-only, mapped and not read. Not of a mix: its parts
        have them."""
        assert not self.parts
        path, tokens, start = (getattr(self, f"{side}_{what}") for what in ("path", "tokens", "start"))
        if not tokens:  # all is held out; nothing cannot be mapped
            return np.empty(0, self.dtype)
        offset = start * np.dtype(self.dtype).itemsize
        return np.asarray(np.memmap(path, dtype=self.dtype, mode="r", offset=offset, shape=(tokens,)))

    def plain(self) -> tuple[Corpus, ...]:
        """The corpora that have tokens of their own: this one, or the parts of a mix."""
        return self.parts or (self,)
