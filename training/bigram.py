"""The loss of a bigram count model: what a trained model has to beat to have learned more than letter pairs."""

from __future__ import annotations

import numpy as np

from training.data import Batches, Corpus

LARGEST_VOCABULARY = 4096  # its table of counts has vocabulary^2 entries of 8 bytes: 134 MB
BLOCK_TOKENS = 1 << 22


def bigram_loss(corpus: Corpus, sequence: int, num_sequences: int) -> float | None:
    """Cross-entropy of a bigram model, nats a token, on the first num_sequences held-out sequences (or all there are).
    Of a mix all training tokens are counted, whatever the weights.

    The counts c(a, b) are those of all neighbouring pairs of the training tokens, and
    P(b | a) = (c(a, b) + 1) / (sum of c(a, .) + V): add-one smoothing (Laplace). It is evaluated on exactly the
    (input, target) pairs that a model is validated on. None where the vocabulary V is over 4,096.
    """
    size = corpus.vocabulary
    if size > LARGEST_VOCABULARY:
        return None
    counts = np.zeros(size * size, np.int64)
    for tokens in (part.open("train") for part in corpus.plain()):
        for start in range(0, len(tokens) - 1, BLOCK_TOKENS):
            block = tokens[start : start + BLOCK_TOKENS + 1].astype(np.int64)
            np.add.at(counts, block[:-1] * size + block[1:], 1)
    counts = counts.reshape(size, size)
    batches = Batches(corpus, sequence, seed=0)
    inputs, targets = batches.validation(0, min(num_sequences, batches.num_validation))
    probability = (counts[inputs, targets] + 1) / (counts.sum(1)[inputs] + size)
    return -float(np.log(probability).mean())
