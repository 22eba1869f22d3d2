"""Small corpora for tests of the data: documents in each format, and their preparation in a cache of the test's own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from conf.schema import DataConfig
from training.data import Corpus, prepare

WORDS = "the quick brown fox jumps over lazy dogs while seven wizards brew potent élixirs at 3 € each".split()


def documents(count: int, seed: int = 0) -> list[str]:
    """Texts of 5 to 60 words, some not ASCII."""
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, random.integers(5, 60))) for _ in range(count)]


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)))
    return path


def make(folder: Path, source: str, *, sequence: int = 16, trains: bool = True, **values) -> Corpus:
    """The corpus of a DataConfig with these values, in folder/cache."""
    values = {"cache": str(folder / "cache")} | {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}
    return prepare(DataConfig(name=source, source=source, **values), sequence=sequence, trains=trains)


def sides(corpus: Corpus) -> tuple[np.ndarray, np.ndarray]:
    return corpus.open("train"), corpus.open("validation")


def split_at(tokens: np.ndarray, separator: int) -> list[list[int]]:
    """The documents between the separators."""
    return [part[part != separator].tolist() for part in np.split(tokens, np.flatnonzero(tokens == separator))]
