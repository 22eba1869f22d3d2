"""evaluate=: the loss over every held-out token, exactly once each, against plain forwards of the saved weights."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import resuming
import torch
from commands import SMALL, TRAIN, run, start, wait_for

import cases
import models
from conf.schema import RootConfig, from_dict, to_dict
from models.loss import IGNORED
from ranks import run_ranks
from training import shards
from training.command import EXIT_STOPPED
from training.data import Corpus
from training.evaluate import warnings
from training.held_out import HeldOut, evaluate
from training.loop import Trainer
from training.ranks import Ranks
from training.record import read_result
from training.resume import Found

TEXT = "".join(f"{number} plus {number} is {2 * number}.\n" for number in range(700))
OTHER = "".join(f"the square of {number} is {number * number}\n" for number in range(300))


def independent_loss(config: RootConfig, state: dict[str, torch.Tensor], tokens: np.ndarray) -> tuple[float, int]:
    """Sum of -log p over tokens[1:], float64, and their number: each sequence of T by itself through plain modules."""
    layers = models.build(config.model, seed=0, dtype=torch.float32)
    for name, module in layers:
        for own, parameter in module.named_parameters():
            full = f"{name}.{own}"
            source = "embedding.token.weight" if full == "head.weight" and config.model.tied else full
            parameter.data.copy_(state[source])
    total, count, T = 0.0, 0, config.train.sequence
    for first in range(0, len(tokens) - 1, T):
        piece = torch.from_numpy(tokens[first : first + T + 1].astype(np.int64))
        x = piece[None, :-1]
        with torch.no_grad():
            for _, module in layers:
                x = module(x)
        logarithms = torch.log_softmax(x[0].double(), -1)
        total -= float(logarithms[torch.arange(len(piece) - 1), piece[1:]].sum())
        count += len(piece) - 1
    return total, count


# --- the command ---


@pytest.fixture(scope="module")
def cwd(tmp_path_factory) -> Path:
    """With a run, "trained", of two steps and a checkpoint of each."""
    cwd = tmp_path_factory.mktemp("evaluate")
    (cwd / "text.txt").write_text(TEXT)
    (cwd / "other.txt").write_text(OTHER)
    small = [value for value in SMALL if not value.startswith("data")]
    data = ["data=text", "data.path=text.txt", "train.checkpoint_every=1", "optimizer.learning_rate=1e-2"]
    done = run(*TRAIN, *small, *data, "name=try", "hydra.run.dir=experiments/try/trained", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return cwd


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    """Of every file: its hash and when it was last written."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(p): (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns) for p in files}


def evaluated(cwd: Path, *typed: str, run_dir: str = "experiments/try/trained") -> tuple[Path, dict, str]:
    """The evaluation's own folder, its `evaluation`, and what the console showed; the run is untouched."""
    before, folders = contents(cwd / run_dir), set((cwd / "experiments" / "try").iterdir())
    done = run(*TRAIN, f"evaluate={run_dir}", *typed, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    assert contents(cwd / run_dir) == before
    (folder,) = set((cwd / "experiments" / "try").iterdir()) - folders
    result = read_result(folder)
    assert result["status"] == "completed"
    return folder, result["evaluation"], done.stdout + done.stderr


def expected_of(folder: Path, checkpoint: Path) -> tuple[float, int]:
    """By plain forwards of that checkpoint's weights over the held-out file that the evaluation names."""
    config = from_dict(json.loads((folder / "resolved.json").read_text()))
    corpus = Corpus.from_dict(json.loads((folder / "corpus.json").read_text()))
    tokens = corpus.open("validation")
    assert (len(tokens) - 1) % config.train.sequence != 0  # there is a shorter last sequence
    total, count = independent_loss(config, shards.read_state(checkpoint), tokens)
    assert count == len(tokens) - 1
    return total / count, count


def test_the_loss_of_every_held_out_token_in_the_saved_layout(cwd):
    folder, figures, told = evaluated(cwd)
    loss, count = expected_of(folder, cwd / "experiments/try/trained/checkpoints/step_000002")
    assert folder.name.endswith("_evaluate_trained") and folder.parent.name == "try"
    assert figures["checkpoint"] == "step_000002" and figures["tokens"] == count
    assert figures["loss"] == pytest.approx(loss, rel=2e-6)
    assert figures["perplexity"] == pytest.approx(math.exp(figures["loss"]))
    assert figures["bits_per_byte"] == pytest.approx(figures["loss"] / math.log(2))  # a byte is a token
    assert f"{figures['loss']:.4f} nats a token" in told and f"{count:,} tokens" in told


def test_a_whole_other_file_another_layout_longer_sequences_and_a_damaged_checkpoint(cwd):
    """The newest is not whole: the one before is taken, and the damaged one stays where it is."""
    shutil.copytree(cwd / "experiments/try/trained", cwd / "experiments/try/damaged", symlinks=True)
    newest = cwd / "experiments/try/damaged/checkpoints/step_000002"
    shard = next(newest.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    typed = ["data=text", "data.path=other.txt", "data.validation_fraction=1", "parallel=single", "train.sequence=25"]
    folder, figures, told = evaluated(cwd, *typed, run_dir="experiments/try/damaged")
    loss, count = expected_of(folder, newest.with_name("step_000001"))
    assert figures["checkpoint"] == "step_000001" and "step_000002 is not whole" in told
    assert (figures["loss"], figures["tokens"]) == (pytest.approx(loss, rel=2e-6), count)
    assert figures["tokens"] == len(OTHER) - 1 and "other.txt" in figures["data"]
    (warning,) = [line for line in told.splitlines() if line.startswith("warning: ")]
    assert "train.sequence=25 is longer than the 16 tokens" in warning  # positions 17 to 25 were never trained


@pytest.mark.parametrize(
    "family, sequence, fraction, content, words",
    [
        ("gpt", 8, 0.05, "", []),
        ("gpt", 9, 0.05, "", ["train.sequence=9 is longer than the 8 tokens"]),
        ("llama", 9, 1.0, "other text", ["train.sequence=9 is longer than the 8 tokens"]),
        ("mlp", 9, 0.05, "", []),  # knows no positions
        ("gpt", 7, 1.0, "", ["data.validation_fraction=1 of the run's own data, of which it held out 0.05"]),
        ("gpt", 7, 1.0, "other text", []),
    ],
)
def test_what_makes_the_loss_another_one_is_said(family, sequence, fraction, content, words, corpus):
    saved = cases.config(family="gpt" if family == "mlp" else family)
    saved.model.family = family
    here = replace(saved, train=replace(saved.train, sequence=sequence))
    here.data = replace(saved.data, validation_fraction=fraction)
    found = Found(Path("run"), {"config": to_dict(saved), "corpus": corpus.to_dict()})
    said = warnings(here, replace(corpus, content_hash=content), found)
    assert len(said) == len(words) and all(word in line for word, line in zip(words, said, strict=True))


@pytest.mark.parametrize(
    "typed, told",
    [
        (["evaluate=experiments/nowhere"], "evaluate=experiments/nowhere is no run folder"),
        (["evaluate=experiments/try/empty"], "evaluate=experiments/try/empty: the run has no complete checkpoint"),
        (["evaluate=experiments/try/trained", "data=synthetic"], "the data have another tokenizer than the run was"),
    ],
    ids=["no run", "no checkpoint", "another vocabulary"],
)
def test_refused_in_one_line_before_any_rank_starts(typed, told, cwd):
    (cwd / "experiments/try/empty/.hydra").mkdir(parents=True, exist_ok=True)
    shutil.copy(cwd / "experiments/try/trained/.hydra/config.yaml", cwd / "experiments/try/empty/.hydra")
    before = contents(cwd)
    done = run(*TRAIN, *typed, cwd=cwd)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"train.py: {told}")
    left = {path: facts for path, facts in contents(cwd).items() if "/.cache/" not in path}  # synthetic tokens
    assert left == {path: facts for path, facts in before.items() if "/.cache/" not in path}


def test_ids_of_another_tokenizer_are_refused_with_what_can_be_done(cwd):
    (np.arange(500, dtype=np.uint16) % 256).tofile(cwd / "ids.bin")
    typed = ["data=tokens", "data.path=ids.bin", "data.dtype=uint16", "data.vocabulary=256"]
    done = run(*TRAIN, "evaluate=experiments/try/trained", *typed, cwd=cwd)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "another tokenizer" in done.stderr and "set data.tokenizer" not in done.stderr
    assert "give text, or ids made with byte" in done.stderr and '"tokenizer" in ids.json' in done.stderr
    (cwd / "ids.json").write_text('{"tokenizer": "byte"}')  # as the message says
    assert evaluated(cwd, *typed)[1]["tokens"] > 0


def test_a_stopped_evaluation_points_at_no_curves(cwd):
    typed = ["evaluate=experiments/try/trained", "hydra.run.dir=experiments/stopped"]
    process = start(*TRAIN, *typed, cwd=cwd)
    wait_for((cwd / "experiments/stopped/logs/rank_0.log").exists)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == EXIT_STOPPED, errors
    assert "stopped: experiments/stopped" in output and "tensorboard" not in output


# --- in every layout ---


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    return resuming.corpus(tmp_path_factory.mktemp("corpus"))


def _evaluate(rank: int, world: int, corpus: Corpus, listed: list) -> list[dict]:
    found = []
    for config in listed:
        trainer = Trainer(config, Ranks(rank, world, rank, torch.device("cpu")), corpus, lambda: False)
        try:
            trainer.step(0)  # evaluating comes after steps, and between them
            found.append(evaluate(trainer, HeldOut(corpus, config.train.sequence)))
            found[-1]["weights"] = {n: p.detach() for n, p in trainer.engine.parameters.items()}
        finally:
            trainer.engine.close()
    return found


def _layout(data: int = 1, **layout):
    case = cases.config(**{"tied": True, "precision": "float32", "chunks": 4} | layout)
    case.parallel.data, case.optimizer.warmup_steps = data, 0
    return replace(case, train=replace(case.train, max_minutes=0))


def test_every_layout_gives_the_same_loss_and_nothing_twice(corpus):
    """400 tokens: 49 sequences of 8 and one of 7, which no flush and no number of data ranks divides."""
    reference = _layout(engine="single", microbatch=4)
    (one,) = _evaluate(0, 1, corpus, [reference])
    total, count = independent_loss(reference, one["weights"], corpus.open("validation"))
    assert (one["tokens"], count) == (399, 399)
    assert one["loss"] == pytest.approx(total / count, rel=1e-6)
    layouts = [
        _layout(stages=2, microbatch=4),
        _layout(stages=2, microbatch=4, schedule="interleaved_1f1b", interleave=2),
        _layout(stages=2, microbatch=4, schedule="zb_v", interleave=2),
        _layout(data=2, chunks=2, microbatch=8),
    ]
    for answer in run_ranks(_evaluate, 2, corpus, layouts):
        for figures in answer:
            assert figures["tokens"] == 399
            assert figures["loss"] == pytest.approx(total / count, rel=1e-6)
    assert one["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-6)


def test_a_signal_ends_it_without_figures(corpus):
    config = _layout(engine="single", microbatch=4)
    trainer = Trainer(config, Ranks(0, 1, 0, torch.device("cpu")), corpus, lambda: True)
    assert evaluate(trainer, HeldOut(corpus, config.train.sequence)) is None


@pytest.mark.parametrize("sequence", [1, 7, 8, 399, 400])
def test_each_target_once_also_in_a_mix(sequence, corpus, tmp_path):
    parts = []
    for number, count in enumerate((400, 57)):
        tokens = (np.arange(count) + 1000 * number).astype(np.uint16)
        tokens.tofile(tmp_path / f"{number}.bin")
        path = str(tmp_path / f"{number}.bin")
        parts.append(replace(corpus, train_path=path, validation_path=path, dtype="uint16", validation_tokens=count))
    mix = replace(corpus, parts=tuple(parts), weights=(0.5, 0.5), validation_tokens=457)
    held_out = HeldOut(mix, sequence)
    inputs, targets = held_out.rows(0, held_out.num_sequences + 3)  # some past the end
    counted = targets != IGNORED
    assert sorted(targets[counted]) == [*range(1, 400), *range(1001, 1057)]
    assert np.array_equal(inputs[counted] + 1, targets[counted])
    assert held_out.num_targets == counted.sum() and held_out.target_bytes() == counted.sum()
