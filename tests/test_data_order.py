"""The state of the data is (seed, consumed samples): layouts, resumes, mixes; which document a token belongs to."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from corpora import documents, make, write_jsonl

from conf.schema import ParallelConfig
from pipeline.placement import place
from training.data import Batches, Corpus
from training.data.batches import SLOTS, slots
from training.held_out import HeldOut
from training.loop import Trainer

SEQUENCE = 8


def _corpus(folder, name: str, sequences: int, first: int = 0, **values) -> Corpus:
    """Sequences first, first + 1, ... each SEQUENCE times its own number."""
    tokens = np.append(np.repeat(np.arange(first, first + sequences), SEQUENCE), 0).astype(np.uint32)
    path = folder / f"{name}.bin"
    tokens.tofile(path)
    paths = {f"{side}_path": str(path) for side in ("train", "validation")}
    counts = {f"{side}_tokens": len(tokens) for side in ("train", "validation")}
    facts = dict(dtype="uint32", vocabulary=10**6, tokenizer="", bytes_per_token=None, content_hash="")
    return Corpus(**paths, **counts, **facts, description=name, entropy_floor=None, **values)


def _mix(folder, sizes: list[int], weights: list[float]) -> Corpus:
    parts = [_corpus(folder, f"part_{k}", size, 10_000 * k) for k, size in enumerate(sizes)]
    return _corpus(folder, "mix", 1, parts=tuple(parts), weights=tuple(weights))


# ---------------------------------------------------------------------------------------------- layouts and resumes


def _trainer(
    corpus: Corpus, seed: int, global_batch: int, data: int, rank: int, accumulate: int, chunks: int
) -> Trainer:
    """A trainer as far as its data go; the run's rank `rank` of `data`."""
    trainer = object.__new__(Trainer)
    parallel = ParallelConfig(name="", stages=1, data=data, chunks=chunks, interleave=1)
    train = SimpleNamespace(global_batch=global_batch, sequence=SEQUENCE, accumulate=accumulate, seed=seed)
    model, data = SimpleNamespace(dropout=0.0), SimpleNamespace(cross_documents=True)
    trainer.config = SimpleNamespace(parallel=parallel, train=train, model=model, data=data)
    trainer.ranks = SimpleNamespace(rank=rank, device=torch.device("cpu"))
    trainer.place = place(rank, parallel)
    trainer.engine = SimpleNamespace(needs_inputs=True, needs_targets=True)
    trainer.batches = Batches(corpus, SEQUENCE, seed)
    trainer.flush = global_batch // accumulate
    trainer._ahead = None  # on a processor nothing is read ahead
    return trainer


@pytest.mark.parametrize("seed", range(8))
def test_each_sample_of_an_epoch_is_met_once_over_any_layouts_and_resumes(tmp_path, seed):
    """Attempts in random layouts, each stopped at a random step and gone on with from the last checkpoint, which may be
    some steps back: what was done after it is done again, the same."""
    random = np.random.default_rng(seed)
    epoch, global_batch = int(random.integers(50, 200)), 24
    corpus = _corpus(tmp_path, "one", epoch)
    seen: dict[int, list[int]] = {}  # consumed samples -> the sequences of that step
    step, steps = 0, 3 * epoch // global_batch + 2
    while step < steps:
        data, accumulate = random.choice([(1, 1), (2, 1), (4, 2), (3, 2), (2, 3), (6, 4), (1, 8)])
        chunks = int(
            random.choice([c for c in (1, 2, 3, 4, 6, 8, 12, 24) if global_batch % (c * data * accumulate) == 0])
        )
        ranks = [_trainer(corpus, seed, global_batch, data, rank, accumulate, chunks) for rank in range(data)]
        last = min(steps, step + int(random.integers(1, 7)))
        for done in range(step, last):
            met = []
            for index in range(accumulate):
                flush = [rank.batch(done, done * global_batch + index * rank.flush) for rank in ranks]
                met += [int(n) for batch in flush for chunk in batch.inputs.chunk(chunks) for n in chunk[:, 0]]
            assert seen.setdefault(done, met) == met
        step = last if last == steps else int(random.integers(step, last + 1))  # the newest checkpoint
    order = [number for done in range(steps) for number in seen[done]]
    assert len(order) == steps * global_batch
    for start in range(0, len(order) - epoch + 1, epoch):
        assert sorted(order[start : start + epoch]) == list(range(epoch))


# ---------------------------------------------------------------------------------------------- mixes


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (0.7, 0.2, 0.1), (1e-6, 1), (1, 1, 1)])
def test_a_deal_gives_each_source_its_part_and_each_of_its_sequences_in_turn(tmp_path, weights):
    sizes = [4000, 300, 50][: len(weights)]
    batches = Batches(_mix(tmp_path, sizes, weights), SEQUENCE, seed=5)
    deal = int(slots(weights)[-1])
    assert deal in (SLOTS, SLOTS + 1)
    numbers = np.concatenate([batches.train(start, deal // 2)[0][:, 0] for start in range(0, 2 * deal, deal // 2)])
    for which in range(2):
        inside = numbers[which * deal : (which + 1) * deal]
        for source, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
            own = inside[inside // 10_000 == source] - 10_000 * source
            assert abs(len(own) - deal * weight / sum(weights)) <= 1
            counts = np.bincount(own, minlength=size)
            assert counts.max() - counts.min() <= 1 + which  # epochs of its own: none comes twice before all came once
    assert not np.array_equal(numbers[:deal], numbers[deal:])


def test_a_mix_is_well_mixed_and_the_same_however_it_is_cut(tmp_path):
    corpus = _mix(tmp_path, [500, 500], (3, 1))
    order = Batches(corpus, SEQUENCE, seed=1).train(0, 4000)[0][:, 0]
    again = Batches(corpus, SEQUENCE, seed=1)
    parts = [again.train(int(a), int(b - a))[0][:, 0] for a, b in zip([0, 7, 999], [7, 999, 4000], strict=True)]
    assert np.array_equal(np.concatenate(parts), order)
    shares = (order.reshape(40, 100) < 10_000).mean(1)  # of 100 samples: mean 0.75, standard deviation 0.043
    assert abs(shares.mean() - 0.75) < 0.03 and 0.55 < shares.min() and shares.max() < 0.93
    assert not np.array_equal(Batches(corpus, SEQUENCE, seed=2).train(0, 4000)[0][:, 0], order)


def test_the_held_out_sequences_of_a_mix_are_those_of_all_its_sources_once(tmp_path):
    batches = Batches(_mix(tmp_path, [40, 20, 5], (1, 5, 1)), SEQUENCE, seed=1)
    assert batches.num_validation == batches.samples_per_epoch == 65
    numbers = np.concatenate([batches.validation(0, 30)[0][:, 0], batches.validation(30, 35)[0][:, 0]])
    expected = [10_000 * k + i for k, size in enumerate((40, 20, 5)) for i in range(size)]
    assert sorted(numbers.tolist()) == expected


def test_all_of_every_source_can_be_held_out_and_each_token_is_predicted_once(tmp_path):
    """Copies of a document too, in their places; a file of 30 bytes is less than two sequences."""
    texts = [*documents(60), *documents(3)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    (tmp_path / "b.txt").write_text("thirty bytes are a whole file\n")
    np.arange(500, dtype=np.uint8).tofile(tmp_path / "c.bin")
    whole = {"validation_fraction": 1.0, "trains": False}
    expected = {
        "jsonl": ("a.jsonl", "\0".join(texts).encode(), {}),
        "text": ("b.txt", b"thirty bytes are a whole file\n", {}),
        "tokens": ("c.bin", (tmp_path / "c.bin").read_bytes(), {"dtype": "uint8", "vocabulary": 256}),
    }
    for source, (name, content, values) in expected.items():
        corpus = make(tmp_path, source, path=tmp_path / name, **values, **whole)
        assert corpus.open("validation").tobytes() == content, source
        assert (corpus.train_tokens, len(corpus.open("train"))) == (0, 0)
    entries = [{"source": s, "path": str(tmp_path / n), "weight": 1} | v for s, (n, _, v) in expected.items()]
    mix = make(tmp_path, "mix", sources=entries, **whole)
    assert Batches(mix, 16, seed=0).samples_per_epoch == 0
    assert HeldOut(mix, 16).num_targets == sum(len(content) - 1 for _, content, _ in expected.values())
    assert make(tmp_path, "synthetic", synthetic_tokens=100, **whole).validation_tokens == 100
    with pytest.raises(ValueError, match="30 held-out tokens .* than the 31 .* smaller train.sequence, or more"):
        make(tmp_path, "text", path=tmp_path / "b.txt", sequence=30, **whole)
    little = {"validation_fraction": 0.9, "path": tmp_path / "c.bin", "dtype": "uint8", "vocabulary": 256}
    assert make(tmp_path, "tokens", sequence=64, trains=False, **little).train_tokens == 50  # and needs no more


def test_a_mix_of_files_is_prepared_with_one_tokenizer(tmp_path):
    texts = documents(120)
    write_jsonl(tmp_path / "a.jsonl", texts[:80])
    (tmp_path / "b.txt").write_text("\n".join(texts[80:]))
    sources = [
        {"source": "jsonl", "path": str(tmp_path / "a.jsonl"), "weight": 3},
        {"source": "text", "path": str(tmp_path / "b.txt"), "weight": 1},
    ]
    corpus = make(tmp_path, "mix", sources=sources)
    assert [part.description.split()[0] for part in corpus.parts] == ["jsonl", "text"] and corpus.weights == (3, 1)
    assert corpus.train_tokens == sum(part.train_tokens for part in corpus.parts)
    assert (corpus.tokenizer, corpus.separator, corpus.bytes_per_token) == ("byte", 0, 1.0)
    assert Corpus.from_dict(corpus.to_dict()) == corpus
    other = make(tmp_path, "mix", sources=[sources[0] | {"weight": 2}, sources[1]])
    assert other.content_hash != corpus.content_hash  # another order of samples
    stored = {"source": "tokens", "path": corpus.parts[0].train_path, "weight": 1}
    assert make(tmp_path, "mix", sources=[sources[1], stored]).bytes_per_token is None
    pytest.importorskip("tokenizers")
    values = dict(tokenizer="bpe", tokenizer_vocabulary=300)
    learned = make(tmp_path, "mix", sources=sources, **values)
    assert len({part.tokenizer for part in learned.parts}) == 1 and len(list(tmp_path.glob("cache/tokenizers/*"))) == 1
    with pytest.raises(ValueError, match="do not have one tokenizer"):
        make(tmp_path, "mix", sources=[*sources, stored], **values)


# ---------------------------------------------------------------------------------------------- documents


def test_every_token_knows_its_document(tmp_path):
    corpus = make(tmp_path, "jsonl", path=write_jsonl(tmp_path / "a.jsonl", documents(50)), sequence=64)
    batches = Batches(corpus, 64, seed=2)
    inputs, _ = batches.train(3, 40)
    numbers = batches.train_documents(3, 40)
    assert numbers.dtype == np.int64 and numbers.max() > 0
    for row, found in zip(inputs.tolist(), numbers.tolist(), strict=True):
        assert found == [row[:place].count(0) for place in range(64)]
    held, _ = batches.validation(1, 5)
    assert np.array_equal(np.diff(batches.validation_documents(1, 5), axis=1), held[:, :-1] == 0)


def test_every_rank_gets_the_documents_of_its_own_sequences_when_attention_does_not_cross_them(tmp_path):
    corpus = make(tmp_path, "jsonl", path=write_jsonl(tmp_path / "a.jsonl", documents(50)))
    for rank in range(2):
        trainer = _trainer(corpus, 3, 8, 2, rank, 1, 2)
        assert trainer.batch(0, 0).documents is None
        trainer.config.data.cross_documents = False
        trainer.engine = SimpleNamespace(needs_inputs=False, needs_targets=False)  # a stage in the middle
        batch = trainer.batch(0, 8)
        expected = Batches(corpus, SEQUENCE, 3).train_documents(8 + 4 * rank, 4)
        assert batch.inputs is None and batch.documents.tolist() == expected.tolist()


def test_documents_without_a_separator_are_refused(tmp_path):
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    values = dict(path=tmp_path / "a.bin", dtype="uint16", vocabulary=1000)
    with pytest.raises(ValueError, match="needs a token between documents"):
        make(tmp_path, "tokens", cross_documents=False, **values)
    corpus = make(tmp_path, "tokens", separator=5, cross_documents=False, **values)
    numbers = Batches(corpus, 16, seed=0).validation_documents(0, 2)
    assert not numbers.any()  # the only one is in the training part


def test_counts_of_slots():
    assert Counter(np.diff(slots((1, 1, 1))).tolist()) == {3333: 2, 3334: 1}
    assert np.diff(slots((2, 1, 1))).tolist() == [5000, 2500, 2500]
    assert slots((7.0,)).tolist() == [0, 1]
