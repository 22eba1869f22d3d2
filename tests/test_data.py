"""The corpus: which files, the held-out split, the cache, the order of samples, the user's mistakes."""

import dataclasses
import json
import math
import subprocess
import sys
import sysconfig
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from conf.schema import DataConfig
from training.data import Batches, Corpus, permute, prepare

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def text(tmp_path):
    """text(path, **overrides) -> Corpus of that text, in a cache of this test's own."""

    def make(path, *, sequence=16, **overrides) -> Corpus:
        config = DataConfig(name="text", source="text", path=str(path), cache=str(tmp_path / "cache"))
        return prepare(dataclasses.replace(config, **overrides), sequence=sequence)

    return make


def _documents(folder: Path, sizes: list[int], seed: int = 0) -> list[bytes]:
    """Random lowercase documents in `folder`, one file each; returns their contents."""
    random = np.random.default_rng(seed)
    folder.mkdir(exist_ok=True)
    contents = [random.integers(97, 123, size).astype(np.uint8).tobytes() for size in sizes]
    for number, content in enumerate(contents):
        (folder / f"{number:03}.txt").write_bytes(content)
    return contents


def _sides(corpus: Corpus) -> tuple[bytes, bytes]:
    return Path(corpus.train_path).read_bytes(), Path(corpus.validation_path).read_bytes()


# ---------------------------------------------------------------------------------------------- which files


def test_python_source_is_the_standard_library_without_tests_and_packages(tmp_path):
    config = DataConfig(name="python", source="python_source", cache=str(tmp_path))
    corpus = prepare(config, sequence=128)
    library = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [p for p in library.rglob("*.py") if not skipped & set(p.relative_to(library).parts[:-1])]
    wanted = Counter(content for path in files if (content := path.read_bytes()))
    assert len(wanted) > 500
    train, validation = (Counter(side.split(b"\0")) for side in _sides(corpus))
    assert train + validation == wanted
    assert not set(train) & set(validation)
    assert 0.04 < corpus.validation_tokens / corpus.train_tokens < 0.06
    assert (corpus.vocabulary, corpus.dtype, corpus.bytes_per_token, corpus.entropy_floor) == (256, "uint8", 1.0, None)
    assert prepare(config, sequence=128) == corpus


def test_a_folder_gives_its_text_files_in_order_and_no_hidden_or_binary_ones(text, tmp_path):
    folder = tmp_path / "book"
    (folder / "b").mkdir(parents=True)
    (folder / ".git").mkdir()
    for name, content in {
        "b/2.md": b"second ",
        "b.txt": b"third ",  # "b.txt" sorts before "b/2.md": '.' < '/'
        "a": "fünf ".encode("latin-1"),  # not UTF-8: bytes are bytes
        "empty.txt": b"",
        "picture.png": b"\x89PNG\0\0",
        ".hidden": b"hidden",
        ".git/config": b"hidden",
    }.items():
        (folder / name).write_bytes(content)
    train, validation = _sides(text(folder, sequence=2, validation_fraction=0.2))
    assert train + validation == b"f\xfcnf \0third \0second "


def test_a_file_and_a_glob(text, tmp_path):
    (one, two, other) = _documents(tmp_path / "texts", [2000, 3000, 4000])
    assert b"".join(_sides(text(tmp_path / "texts/001.txt"))) == two
    (tmp_path / "texts/deeper").mkdir()
    (tmp_path / "texts/002.txt").rename(tmp_path / "texts/deeper/002.txt")
    assert b"".join(_sides(text(tmp_path / "texts/*.txt"))) == one + b"\0" + two
    assert b"".join(_sides(text(tmp_path / "texts/**/*.txt"))) == b"\0".join([one, two, other])


# ---------------------------------------------------------------------------------------------- what is held out


@pytest.mark.parametrize("seed", range(5))
def test_no_training_sequence_holds_any_of_a_held_out_document(text, tmp_path, seed):
    sizes = np.random.default_rng(seed).integers(100, 2000, 100).tolist()
    contents = _documents(tmp_path / "texts", sizes, seed)
    for number in (3, 30, 60):  # copies, under other names
        (tmp_path / f"texts/copy_{number}.txt").write_bytes(contents[number])
    corpus = text(tmp_path / "texts", sequence=32)
    batches = Batches(corpus, 32, seed=seed)
    inputs, targets = batches.train(0, batches.samples_per_epoch)
    sequences = np.concatenate([inputs, targets[:, -1:]], axis=1).astype(np.uint8)
    held_out = Path(corpus.validation_path).read_bytes().split(b"\0")
    assert set(held_out) <= set(contents)
    # A window of 12 random letters occurs by chance with probability 1e5 * 1e5 / 26^12 = 1e-7.
    known = {document[i : i + 12] for document in held_out for i in range(len(document) - 11)}
    assert not any(row[i : i + 12].tobytes() in known for row in sequences for i in range(len(row) - 11))
    total = corpus.train_tokens + corpus.validation_tokens
    assert 0.025 < corpus.validation_tokens / total < 0.055


def test_copies_of_a_document_fall_on_the_same_side(text, tmp_path):
    contents = _documents(tmp_path / "texts", [300] * 40)
    for number, content in enumerate(contents):
        for copy in range(number % 3):
            (tmp_path / f"texts/copy_{copy}_{number:03}.txt").write_bytes(content)
    corpus = text(tmp_path / "texts", validation_fraction=0.2)
    train, validation = (Counter(side.split(b"\0")) for side in _sides(corpus))
    assert not set(train) & set(validation)
    assert train + validation == Counter({content: 1 + number % 3 for number, content in enumerate(contents)})


@pytest.mark.parametrize("sizes", [[1000], [400, 600], [50_000, 10, 10]], ids=["one", "two", "lopsided"])
def test_few_or_lopsided_documents_hold_out_the_last_part(text, tmp_path, sizes):
    stream = b"\0".join(_documents(tmp_path / "texts", sizes))
    train, validation = _sides(text(tmp_path / "texts", sequence=8, validation_fraction=0.1))
    assert stream.startswith(train) and stream.endswith(validation)
    assert abs(len(validation) - 0.1 * sum(sizes)) <= len(sizes)
    assert len(train) + len(validation) in (len(stream), len(stream) - 1)  # a cut between documents: no separator


def test_a_folder_of_copies_does_not_train_on_what_it_holds_out(text, tmp_path):
    (content,) = _documents(tmp_path / "texts", [1000])
    for number in range(5):
        (tmp_path / f"texts/copy_{number}.txt").write_bytes(content)
    train, validation = _sides(text(tmp_path / "texts", validation_fraction=0.1))
    assert (train, validation) == (content[:900], content[900:])


# ---------------------------------------------------------------------------------------------- tokenised once


def test_a_large_file_is_read_in_blocks(text, tmp_path):
    content = np.random.default_rng(0).integers(0, 256, 40_000_001).astype(np.uint8)
    content.tofile(tmp_path / "large.txt")
    tracemalloc.start()
    try:
        corpus = text(tmp_path / "large.txt", sequence=128)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8e6
    assert np.array_equal(np.concatenate([corpus.open("train"), corpus.open("validation")]), content)


def test_the_cache_is_keyed_by_content_and_split(text, tmp_path):
    (content,) = _documents(tmp_path / "texts", [1000])
    first = text(tmp_path / "texts/000.txt")
    made = Path(first.train_path).stat()
    (tmp_path / "moved.txt").write_bytes(content)
    moved = text(tmp_path / "moved.txt", sequence=32)
    assert moved.train_path == first.train_path
    assert Path(first.train_path).stat() == made
    assert text(tmp_path / "moved.txt", validation_fraction=0.1).train_path != first.train_path
    (tmp_path / "moved.txt").write_bytes(content[:-1] + b"!")
    changed = text(tmp_path / "moved.txt")
    assert changed.content_hash != first.content_hash and changed.train_path != first.train_path
    assert Path(changed.validation_path).read_bytes().endswith(b"!")


def test_a_damaged_cache_and_a_killed_builder_are_made_good(text, tmp_path):
    _documents(tmp_path / "texts", [1000])
    corpus = text(tmp_path / "texts")
    before = _sides(corpus)
    folder = Path(corpus.train_path).parent
    Path(corpus.validation_path).write_bytes(b"short")
    unfinished = folder.with_suffix(".tmp")
    unfinished.mkdir()
    (unfinished / "train.bin").write_bytes(b"half")
    assert text(tmp_path / "texts") == corpus
    assert _sides(corpus) == before
    assert not unfinished.exists()


def test_many_processes_at_once_tokenise_once(tmp_path):
    contents = _documents(tmp_path / "texts", [500_000] * 20)
    program = (
        "import logging, sys; logging.basicConfig(level='INFO', stream=sys.stdout, format='%(message)s');"
        "from conf.schema import DataConfig; from training.data import prepare;"
        "sys.stdin.readline();"
        "corpus = prepare(DataConfig(name='t', source='text', path=sys.argv[1], cache=sys.argv[2]), sequence=128);"
        "print(corpus.train_tokens, corpus.open('train')[-1] > 0)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "texts"), str(tmp_path / "cache")]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    time.sleep(1)  # all have imported and wait for the start
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert sum("tokenising" in output for output in outputs) == 1
    tokens = sum(map(len, contents[1:])) + 18  # one document of twenty is held out; 18 separators between nineteen
    assert {output.splitlines()[-1] for output in outputs} == {f"{tokens} True"}


def test_a_corpus_is_plain_json(text, tmp_path):
    _documents(tmp_path / "texts", [1000])
    corpus = text(tmp_path / "texts")
    assert Corpus.from_dict(json.loads(json.dumps(corpus.to_dict()))) == corpus


def test_the_data_modules_do_not_import_torch():
    program = "import sys, training.data, training.bigram; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


# ---------------------------------------------------------------------------------------------- the order of samples


@pytest.mark.parametrize("size", [*range(1, 40), 63, 64, 65, 99, 100, 101, 1023, 1024, 1025, 89_948])
def test_an_epoch_takes_every_sequence_once(size):
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (2**63, 10**9)):
        order = permute(np.arange(size), size, seed, np.full(size, epoch))
        assert np.array_equal(np.sort(order), np.arange(size))


def test_seeds_and_epochs_have_orders_of_their_own():
    orders = [permute(np.arange(1000), 1000, seed, np.full(1000, epoch)) for seed in range(20) for epoch in range(20)]
    assert len({order.tobytes() for order in orders}) == 400
    # Two random permutations of 1,000 agree in 1 place on average (Poisson), and ours with the identity likewise.
    agreements = [np.sum(a == b) for a, b in zip(orders, orders[1:] + [np.arange(1000)], strict=True)]
    assert 0.8 < np.mean(agreements) < 1.2
    assert max(agreements) < 10


@pytest.mark.parametrize("size", [7, 100])
def test_every_place_is_equally_likely(size):
    epochs = 200 * size
    for item in (0, 1, size - 1):
        places = permute(np.full(epochs, item), size, 3, np.arange(epochs))
        squares = np.sum((np.bincount(places, minlength=size) - 200.0) ** 2) / 200
        assert squares < size - 1 + 5 * math.sqrt(2 * (size - 1))  # chi-squared: mean n - 1, variance 2 (n - 1)


@pytest.fixture
def letters(text, tmp_path):
    """A corpus of 1,000 training tokens of which each window is unique, and its bytes."""
    _documents(tmp_path / "texts", [1250])
    corpus = text(tmp_path / "texts", validation_fraction=0.2)
    return corpus, np.frombuffer(Path(corpus.train_path).read_bytes(), np.uint8).astype(np.int64)


@pytest.mark.parametrize("sequence, sequences", [(16, 62), (999, 1), (500, 1), (499, 2), (7, 142), (1, 999)])
def test_sequences_are_the_text_cut_evenly_and_targets_are_one_further(letters, sequence, sequences):
    corpus, tokens = letters
    batches = Batches(corpus, sequence, seed=4)
    assert batches.samples_per_epoch == sequences
    for epoch in range(3):
        inputs, targets = batches.train(epoch * sequences, sequences)
        assert inputs.dtype == targets.dtype == np.int64
        expected = [tokens[k * sequence : (k + 1) * sequence + 1] for k in range(sequences)]
        got = np.concatenate([inputs, targets[:, -1:]], axis=1)
        assert sorted(map(tuple, got)) == sorted(map(tuple, expected))
        assert np.array_equal(targets[:, :-1], inputs[:, 1:])


def test_a_sample_is_the_same_however_the_batches_are_cut(letters):
    corpus, _ = letters
    inputs, targets = Batches(corpus, 16, seed=9).train(0, 300)  # nearly five epochs
    random = np.random.default_rng(0)
    for _ in range(20):
        cuts = [0, *np.sort(random.choice(np.arange(1, 300), 12, replace=False)), 300]
        again = Batches(corpus, 16, seed=9)
        parts = [again.train(int(a), int(b - a)) for a, b in zip(cuts, cuts[1:], strict=False)]
        assert np.array_equal(np.concatenate([part[0] for part in parts]), inputs)
        assert np.array_equal(np.concatenate([part[1] for part in parts]), targets)
    assert not np.array_equal(Batches(corpus, 16, seed=10).train(0, 300)[0], inputs)
    assert not np.array_equal(inputs[:62], inputs[62:124])
    assert np.array_equal(again.samples(5, 3), [5, 6, 7])


def test_a_stage_reads_only_what_it_wants(letters):
    batches = Batches(letters[0], 16, seed=0)
    for read in (batches.train, batches.validation):
        inputs, targets = read(0, 4)
        only, nothing = read(0, 4, want=("inputs",))
        assert np.array_equal(only, inputs) and nothing is None
        nothing, only = read(0, 4, want=("targets",))
        assert np.array_equal(only, targets) and nothing is None


def test_validation_is_the_same_for_every_seed_and_covers_the_held_out_text(letters):
    corpus, _ = letters
    batches = Batches(corpus, 16, seed=0)
    tokens = corpus.open("validation")
    count = (len(tokens) - 1) // 16
    assert batches.num_validation == count
    inputs, targets = batches.validation(0, count)
    rows = np.concatenate([inputs, targets[:, -1:]], axis=1)
    assert sorted(map(tuple, rows)) == sorted(tuple(tokens[k * 16 : k * 16 + 17].tolist()) for k in range(count))
    again = Batches(corpus, 16, seed=1)
    parts = [again.validation(0, 3)[0], again.validation(3, count - 3)[0]]
    assert np.array_equal(np.concatenate(parts), inputs)


# ---------------------------------------------------------------------------------------------- the user's mistakes


def test_mistakes_are_one_line_with_numbers_and_remedy(text, tmp_path):
    _documents(tmp_path / "texts", [100, 50])
    (tmp_path / "empty.txt").touch()
    (tmp_path / "nothing").mkdir()
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/a.png").write_bytes(b"\0\0")
    (tmp_path / "empties").mkdir()
    (tmp_path / "empties/a").touch()
    (tmp_path / "empties/b").touch()
    (tmp_path / "a_file").touch()
    for path, overrides, words in (
        ("", {}, "data.path"),
        (tmp_path / "missing.txt", {}, "missing.txt: no such file or folder"),
        (tmp_path / "*.none", {}, "no file matches"),
        (tmp_path / "nothing", {}, "no text file"),
        (tmp_path / "pictures", {}, "no text file"),
        (tmp_path / "empty.txt", {}, "empty.txt is empty (0 bytes)"),
        (tmp_path / "empties", {}, "all 2 files are empty"),
        ("/dev/null", {}, "neither a file nor a folder"),
        ("/proc/self/mem", {}, "cannot read /proc/self/mem: Input/output error"),
        (tmp_path / "texts/000.txt", {"sequence": 128}, "95 training tokens are fewer than the 129"),
        (tmp_path / "texts/000.txt", {"sequence": 16}, "5 held-out tokens are fewer than the 17"),
        (tmp_path / "texts/000.txt", {"validation_fraction": 0.9}, "10 training tokens are fewer than the 17"),
        (tmp_path / "texts/000.txt", {"cache": str(tmp_path / "a_file")}, "choose another data.cache"),
    ):
        with pytest.raises(ValueError) as error:
            text(path, **overrides)
        assert words in str(error.value) and "\n" not in str(error.value), str(error.value)
    assert text(tmp_path / "texts", sequence=16, validation_fraction=0.2).validation_tokens >= 17
