"""The loss over every token of the held-out text, each predicted exactly once, in any layout.

Shape letters: N sequences, T tokens a sequence.
"""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

import numpy as np
import torch

from conf.schema import RootConfig
from models.loss import IGNORED
from pipeline.engines.base import Batch
from training import manifest
from training.checkpoint import Checkpoints
from training.data import Corpus
from training.loop import Trainer
from training.ranks import Ranks
from training.record import write_result

log = logging.getLogger("training")

LINES = 10  # of progress, at most


class HeldOut:
    """The held-out text as sequences 0 .. num_sequences - 1, in reading order.

    A stream of n tokens (each source of a mix has its own) gives n - 1 targets: its first token has nothing before it.
    Sequence k reads tokens kT .. kT+T-1 and predicts kT+1 .. kT+T, so each target comes once, from what stands before
    it in its own sequence. The last sequence is as long as what is left; it is filled up to T with targets that do not
    count (IGNORED), which no earlier position sees.
    """

    def __init__(self, corpus: Corpus, sequence: int):
        self.sequence, self.separator = sequence, corpus.separator
        self._streams = [part.open("validation") for part in corpus.plain()]
        counts = [-(-(len(tokens) - 1) // sequence) for tokens in self._streams]
        self._starts = np.cumsum([0, *counts])
        self.num_sequences = int(self._starts[-1])
        self.num_targets = sum(len(tokens) - 1 for tokens in self._streams)
        self._bytes_per_token = corpus.bytes_per_token
        self._token_bytes = np.load(corpus.token_bytes) if corpus.token_bytes else None

    def rows(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets), int64 [count, T], of sequences first .. first + count - 1; past the last there are only
        targets that do not count."""
        inputs = np.zeros((count, self.sequence), np.int64)
        targets = np.full((count, self.sequence), IGNORED, np.int64)
        for row, number in enumerate(range(first, min(first + count, self.num_sequences))):
            stream = int(np.searchsorted(self._starts, number, side="right")) - 1
            start = (number - int(self._starts[stream])) * self.sequence
            tokens = self._streams[stream][start : start + self.sequence + 1]
            inputs[row, : len(tokens) - 1] = tokens[:-1]
            targets[row, : len(tokens) - 1] = tokens[1:]
        return inputs, targets

    def documents(self, inputs: np.ndarray) -> np.ndarray:
        """As Batches.validation_documents, of inputs [N, T]."""
        ends = inputs == self.separator
        return np.cumsum(ends, axis=1) - ends

    def target_bytes(self) -> float | None:
        """Bytes of text that all targets stand for, as in Batches.bytes_per_token; None where the text is not known."""
        if self._token_bytes is not None:
            return sum(float(self._token_bytes[tokens[1:]].sum()) for tokens in self._streams)
        return None if self._bytes_per_token is None else self._bytes_per_token * self.num_targets


def run(config: RootConfig, corpus: Corpus, run_dir: Path, ranks: Ranks, stop_requested) -> None:
    """What each rank does for `evaluate=`: load the weights, sum the loss; rank 0 prints and writes result.json.

    Raises CheckpointError where no checkpoint of the run is whole.
    """
    begin = time.time()
    trainer = Trainer(config, ranks, corpus, stop_requested)
    try:
        position = Checkpoints(trainer, run_dir, config.evaluate).restore(weights_only=True)
        figures = evaluate(trainer, HeldOut(corpus, config.train.sequence))
    finally:
        trainer.engine.close()
    if ranks.rank != 0:
        return
    result = {"status": "stopped", "reason": "signal"} if figures is None else {"status": "completed"}
    if figures is not None:
        checkpoint = manifest.checkpoint_name(position.step)
        result["evaluation"] = {"run": config.evaluate, "checkpoint": checkpoint, "data": corpus.description} | figures
        print(sentence(figures), flush=True)
    write_result(run_dir, result | {"seconds": time.time() - begin})


@torch.no_grad()
def evaluate(trainer: Trainer, held_out: HeldOut) -> dict | None:
    """On every rank: `loss` (mean, nats a token), `perplexity`, `bits_per_byte`, `tokens` predicted; None when a signal
    asked for an end. Token losses are added in float64."""
    engine, place, data = trainer.engine, trainer.place, trainer.config.parallel.data
    done, total, said = 0, 0.0, 0
    while done < held_out.num_sequences:
        # of each data rank: all take part in each forward
        count = min(trainer.flush // data, -(-(held_out.num_sequences - done) // data))
        loss = float(engine.evaluate(_batch(trainer, held_out, done + place.data * count, count), count))
        loss = loss if place.tensor == 0 else 0.0  # tensor ranks all have the loss of their data rank's sequences
        loss, stop = trainer.ranks.sum([loss, float(trainer.stop_requested())])
        if stop:
            return None
        done, total = min(done + data * count, held_out.num_sequences), total + loss
        if trainer.ranks.rank == 0 and done * LINES // held_out.num_sequences > said:
            said = done * LINES // held_out.num_sequences
            print(f"evaluated {done:,} of {held_out.num_sequences:,} sequences", flush=True)
    mean, size = total / held_out.num_targets, held_out.target_bytes()
    figures = {"loss": mean, "perplexity": math.exp(mean) if mean < 700 else math.inf, "tokens": held_out.num_targets}
    return figures | ({} if size is None else {"bits_per_byte": total / math.log(2) / size})


def _batch(trainer: Trainer, held_out: HeldOut, first: int, count: int) -> Batch:
    inputs, targets = held_out.rows(first, count)
    documents = None if trainer.config.data.cross_documents else held_out.documents(inputs)
    arrays = (
        inputs if trainer.engine.needs_inputs else None,
        targets if trainer.engine.needs_targets else None,
        documents,
    )
    device = trainer.ranks.device
    inputs, targets, documents = (None if array is None else torch.from_numpy(array).to(device) for array in arrays)
    return Batch(inputs, targets, documents=documents)


def sentence(figures: dict) -> str:
    """What the console shows in the end."""
    text = f"held out, {figures['tokens']:,} tokens: {figures['loss']:.4f} nats a token, perplexity "
    text += f"{figures['perplexity']:.4f}"
    return text + (f", {figures['bits_per_byte']:.4f} bits per byte" if "bits_per_byte" in figures else "")
