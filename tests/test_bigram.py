"""The synthetic chain against its entropy rate, and the bigram loss against a hand count and a plain loop."""

import math
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from conf.schema import DataConfig
from training.bigram import bigram_loss
from training.data import Batches, Corpus, prepare, synthetic_chain


@pytest.fixture
def synthetic(tmp_path):
    """synthetic(**overrides) -> Corpus, in a cache of this test's own."""

    def make(**overrides) -> Corpus:
        cache = str(tmp_path / "cache")
        return prepare(DataConfig(name="synthetic", source="synthetic", cache=cache, **overrides), sequence=16)

    return make


@pytest.fixture
def text(tmp_path):
    """text(path, **overrides) -> Corpus of that text, in a cache of this test's own."""

    def make(path, *, sequence=16, **overrides) -> Corpus:
        cache = str(tmp_path / "cache")
        return prepare(
            DataConfig(name="text", source="text", path=str(path), cache=cache, **overrides), sequence=sequence
        )

    return make


# ---------------------------------------------------------------------------------------------- synthetic


@pytest.mark.parametrize("vocabulary", [2, 3, 7, 8, 64, 300])
def test_the_synthetic_floor_is_the_chain_s_entropy_rate(synthetic, vocabulary):
    symbols, shifts, probabilities = synthetic_chain(vocabulary, seed=5)
    chain = np.zeros((vocabulary, vocabulary))
    for place, symbol in enumerate(symbols):
        for shift, probability in zip(shifts, probabilities, strict=True):
            chain[symbol, symbols[(place + shift) % vocabulary]] += probability
    assert np.allclose(chain.sum(1), 1)
    # Entropy rate = sum over states of stationary probability x entropy of the row (Cover and Thomas, theorem 4.2.4).
    values, vectors = np.linalg.eig(chain.T)
    stationary = np.real(vectors[:, np.argmax(np.real(values))])
    stationary /= stationary.sum()
    rate = -np.sum(stationary[:, None] * chain * np.log(np.where(chain > 0, chain, 1)))
    corpus = synthetic(synthetic_vocabulary=vocabulary, synthetic_seed=5, synthetic_tokens=400_000)
    assert corpus.entropy_floor == pytest.approx(rate, abs=1e-12)
    # and the tokens come from that chain
    tokens = corpus.open("train").astype(np.int64)
    assert len(tokens) == corpus.train_tokens == 380_000 and corpus.validation_tokens == 20_000
    assert tokens.max() == vocabulary - 1
    counts = np.zeros_like(chain)
    np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    rows = counts.sum(1, keepdims=True)
    deviation = (counts - rows * chain) / np.sqrt(np.maximum(rows * chain * (1 - chain), 1))
    assert np.abs(deviation).max() < 6
    assert (corpus.vocabulary, corpus.bytes_per_token) == (vocabulary, None)


def test_a_bigram_model_reaches_the_synthetic_floor(synthetic):
    corpus = synthetic()
    loss = bigram_loss(corpus, 16, 10**9)
    assert corpus.entropy_floor - 0.01 < loss < corpus.entropy_floor + 0.01


def test_the_synthetic_stream_is_seeded_long_and_fast(synthetic):
    started = time.perf_counter()
    corpus = synthetic(synthetic_tokens=2_000_000)
    assert time.perf_counter() - started < 2
    other = synthetic(synthetic_tokens=2_000_000, synthetic_seed=1)
    assert not np.array_equal(other.open("train")[:1000], corpus.open("train")[:1000])
    # Pinned: the stream must not change with numpy's version.
    assert corpus.open("train")[:12].tolist() == [45, 21, 57, 30, 38, 25, 39, 9, 16, 54, 13, 10]
    with pytest.raises(ValueError, match="fewer than the 17"):
        synthetic(synthetic_tokens=1)


# ---------------------------------------------------------------------------------------------- bigram


def test_bigram_loss_by_hand(text, tmp_path):
    (tmp_path / "ab.txt").write_bytes(b"aababb" + b"aab")
    corpus = text(tmp_path / "ab.txt", sequence=2, validation_fraction=1 / 3)
    # Training pairs: aa 1, ab 2, ba 1, bb 1; so after a: 3 in all, after b: 2. Held out: a -> a, a -> b.
    expected = -(math.log((1 + 1) / (3 + 256)) + math.log((2 + 1) / (3 + 256))) / 2
    assert bigram_loss(corpus, 2, 1) == pytest.approx(expected, abs=1e-12)


def test_bigram_loss_against_a_plain_loop(text, tmp_path, monkeypatch):
    monkeypatch.setattr("training.bigram.BLOCK_TOKENS", 1000)  # many blocks
    random = np.random.default_rng(0)
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / f"texts/{number}.txt").write_bytes(
            random.integers(97, 123, 1000 + number).astype(np.uint8).tobytes()
        )
    corpus = text(tmp_path / "texts")
    train = Path(corpus.train_path).read_bytes()
    pairs, firsts = Counter(zip(train, train[1:], strict=False)), Counter(train[:-1])
    inputs, targets = Batches(corpus, 16, seed=0).validation(0, 5)
    nats = [
        -math.log((pairs[a, b] + 1) / (firsts[a] + 256))
        for row in zip(inputs.tolist(), targets.tolist(), strict=True)
        for a, b in zip(*row, strict=True)
    ]
    assert bigram_loss(corpus, 16, 5) == pytest.approx(sum(nats) / len(nats), abs=1e-12)


def test_bigram_loss_leaves_large_vocabularies_out(synthetic):
    assert bigram_loss(synthetic(synthetic_vocabulary=5000), 16, 5) is None
