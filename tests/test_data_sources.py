"""jsonl, parquet, Hugging Face datasets and files of tokens: what is read, and the user's mistakes in one line."""

import json
import re
import sys
from collections import Counter

import numpy as np
import pytest
from commands import SMALL, TRAIN, run
from corpora import documents, make, sides, split_at, write_jsonl

TEXTS = documents(60)


def _texts(corpus) -> Counter:
    """The documents of both sides, which must be whole and separated by a byte 0."""
    return Counter(text.decode() for side in sides(corpus) for text in side.tobytes().split(b"\0"))


# ---------------------------------------------------------------------------------------------- documents


def test_jsonl_lines_are_documents(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS, "body")
    with open(path, "a") as file:
        file.write("\n   \n" + json.dumps({"body": "no line end"}))
    corpus = make(tmp_path, "jsonl", path=path, field="body")
    assert _texts(corpus) == Counter([*TEXTS, "no line end"])
    assert (corpus.vocabulary, corpus.dtype, corpus.separator, corpus.bytes_per_token) == (256, "uint8", 0, 1.0)


def test_a_folder_and_a_glob_of_jsonl(tmp_path):
    folder = tmp_path / "posts"
    folder.mkdir()
    write_jsonl(folder / "1.jsonl", TEXTS[:30])
    write_jsonl(folder / "2.jsonl", TEXTS[30:])
    (folder / "README.md").write_text("not data")
    for path in (folder, folder / "*.jsonl"):
        assert _texts(make(tmp_path, "jsonl", path=path)) == Counter(TEXTS)


def test_parquet_rows_are_documents(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"id": range(60), "body": TEXTS}), tmp_path / "a.parquet", row_group_size=7)
    assert _texts(make(tmp_path, "parquet", path=tmp_path / "a.parquet", field="body")) == Counter(TEXTS)
    parquet.write_table(arrow.table({"body": [*TEXTS, None]}), tmp_path / "b.parquet", row_group_size=7)
    for path, field, words in (
        ("a.parquet", "text", "no column 'text' (data.field); it has 'id', 'body'"),
        ("a.parquet", "id", "a.parquet, row 1: no text in 'id' but int"),
        ("b.parquet", "body", "b.parquet, row 61: no text in 'body' but NoneType"),
        ("c.parquet", "body", "c.parquet is no parquet file"),
    ):
        (tmp_path / "c.parquet").write_text("text")
        with pytest.raises(ValueError, match=re.escape(words)):
            make(tmp_path, "parquet", path=tmp_path / path, field=field)
    corpus = make(tmp_path, "parquet", path=tmp_path / "b.parquet", field="body", bad_documents="skip")
    assert _texts(corpus) == Counter(TEXTS) and "1 bad documents skipped" in corpus.description


def test_a_hugging_face_dataset_of_this_machine(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []
    monkeypatch.setattr("socket.getaddrinfo", lambda host, *rest, **more: asked.append(host))
    whole = datasets.Dataset.from_dict({"id": list(range(60)), "body": TEXTS})
    whole.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=whole, test=whole.select(range(20))).save_to_disk(str(tmp_path / "two"))
    assert _texts(make(tmp_path, "datasets", path=tmp_path / "one", field="body")) == Counter(TEXTS)
    part = make(tmp_path, "datasets", path=tmp_path / "two", field="body", split="test")
    assert _texts(part) == Counter(TEXTS[:20])
    for path, values, words in (
        (tmp_path / "one", {}, "no column 'text' (data.field); it has 'id', 'body'"),
        (tmp_path / "two", {"split": "dev"}, "no such part; it has train, test"),
        ("no_such_owner/no_such_dataset", {}, "data.allow_download=true fetches it"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)) as error:
            make(tmp_path, "datasets", path=path, **values)
        assert "\n" not in str(error.value)
    assert not asked  # no server, unless data.allow_download=true


# ---------------------------------------------------------------------------------------------- bad documents


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "cut', "line 4: no JSON (Unterminated string starting at character 10)"),
        (b'["a"]', "line 4: no JSON object but list"),
        (b'{"body": "a", "id": 1}', "line 4: no field 'text' (data.field) among 'body', 'id'"),
        (b'{"text": 5}', "line 4: no text in 'text' but int"),
        (b'{"text": ""}', "line 4: an empty document: 'text' is ''"),
        (b'{"text": "f\xfcnf"}', "line 4: not UTF-8 at its byte 12"),
        (b'{"text": "\\ud800"}', "line 4: text with half a surrogate pair at character 1"),
    ],
)
def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path, line, words):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"\n", line + b"\n", *lines[2:]]))
    with pytest.raises(ValueError, match=re.escape(f"a.jsonl, {words}; data.bad_documents=skip skips")) as error:
        make(tmp_path, "jsonl", path=path)
    assert "\n" not in str(error.value)
    for _ in range(2):  # made, and from the cache
        corpus = make(tmp_path, "jsonl", path=path, bad_documents="skip")
        assert _texts(corpus) == Counter(TEXTS)
        assert corpus.description.endswith(", 1 bad documents skipped")


def test_nothing_but_bad_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("no\njson\n")
    for field, reason in (
        ("text", "line 1: no JSON"),
        ("nothere", "line 1: no field 'nothere' (data.field) among 'a'"),
    ):
        with pytest.raises(ValueError, match="all 2 documents .* are bad and skipped") as error:
            make(tmp_path, "jsonl", path=path, field=field, bad_documents="skip")
        assert reason in str(error.value) and "\n" not in str(error.value)
        path.write_text('{"a": "x"}\n{"a": "y"}\n')


# ---------------------------------------------------------------------------------------------- stored tokens


@pytest.mark.parametrize(("dtype", "vocabulary"), [("uint16", 65_536), ("uint32", 70_000)])
def test_another_tool_s_file_of_tokens_is_mapped_where_it_lies(tmp_path, dtype, vocabulary):
    ids = (
        np.random.default_rng(0)
        .integers(0, vocabulary, 10_000)
        .astype(f"<{dtype[0]}{dtype[4:]}".replace("16", "2").replace("32", "4"))
    )
    ids.tofile(tmp_path / "a.bin")
    corpus = make(
        tmp_path, "tokens", path=tmp_path / "a.bin", dtype=dtype, vocabulary=vocabulary, validation_fraction=0.1
    )
    train, validation = sides(corpus)
    assert np.array_equal(train, ids[:9000]) and np.array_equal(validation, ids[9000:])
    assert corpus.train_path == corpus.validation_path == str(tmp_path / "a.bin")
    assert (corpus.vocabulary, corpus.dtype, corpus.separator, corpus.bytes_per_token) == (
        vocabulary,
        dtype,
        None,
        None,
    )


def test_the_cache_s_own_files_can_be_used_as_tokens(tmp_path):
    made = make(tmp_path, "jsonl", path=write_jsonl(tmp_path / "a.jsonl", TEXTS))
    again = make(tmp_path, "tokens", path=made.train_path, validation_fraction=0.25)
    assert np.array_equal(np.concatenate(sides(again)), sides(made)[0])
    for key in ("vocabulary", "dtype", "separator", "tokenizer"):
        assert getattr(again, key) == getattr(made, key), key
    held = make(tmp_path, "tokens", path=made.validation_path, validation_fraction=0.5)
    assert held.bytes_per_token == 1.0


def test_wrong_files_of_tokens_are_refused_in_one_line(tmp_path):
    path = tmp_path / "a.bin"
    ids = np.arange(3001, dtype="<u2") % 1000
    ids[2000] = 1234
    ids.tofile(path)
    good = {"dtype": "uint16", "vocabulary": 2000}
    sidecar = tmp_path / "a.json"
    for values, said, words in (
        (good | {"vocabulary": 1000}, None, "a.bin: id 1,234 at position 2,000 is beyond the vocabulary of 1,000"),
        (
            good | {"dtype": "uint32"},
            None,
            "6,002 bytes, which are no whole number of uint32 ids: is data.dtype right?",
        ),
        ({"vocabulary": 2000}, None, "no a.json beside"),
        ({"dtype": "uint16"}, None, "give data.vocabulary"),
        (good, {"count": 5000}, "a.json says 5,000: the file was cut short, or the type is wrong"),
        (good, {"count": 1000}, "a.json says 1,000: the file was added to since that was written, or the type is"),
        (good, {"dtype": "uint32"}, "data.dtype=uint16, and"),
        (good, {"vocabulary": 70_000}, "data.vocabulary=2000, and"),
        ({}, {"dtype": "uint16", "vocabulary": 70_000}, "a vocabulary of 70,000 does not fit uint16"),
        ({}, {"dtype": "float16", "vocabulary": 10}, "says dtype float16: give data.dtype"),
        ({}, {"vocabulary": "many"}, "vocabulary=many must be a whole number"),
        (good | {"separator": 2000}, None, "data.separator=2000 is no id of a vocabulary of 2,000"),
        (good | {"path": tmp_path / "b.bin"}, None, "b.bin: no such file"),
        (good | {"sequence": 4000}, None, "2851 training tokens are fewer than the 4001"),
    ):
        sidecar.unlink(missing_ok=True)
        if said is not None:
            sidecar.write_text(json.dumps(said))
        with pytest.raises(ValueError, match=re.escape(words)) as error:
            make(tmp_path, "tokens", **{"path": path} | values)
        assert "\n" not in str(error.value)
    sidecar.unlink(missing_ok=True)
    assert make(tmp_path, "tokens", path=path, **good).train_tokens == 2851
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="0 bytes"):
        make(tmp_path, "tokens", path=path, **good)


def test_a_large_file_of_tokens_is_read_through_once(tmp_path, monkeypatch):
    monkeypatch.setattr("training.data.files.REMEMBERED_BYTES", 1000)
    path = tmp_path / "a.bin"
    values = dict(path=path, dtype="uint16", vocabulary=1000)
    (np.arange(3000, dtype="<u2") % 1000).tofile(path)
    first = make(tmp_path, "tokens", **values)
    with monkeypatch.context() as patched:
        patched.setattr("training.data.files.blocks", None)  # cannot be read again
        assert make(tmp_path, "tokens", **values) == first
    (np.arange(3000, dtype="<u2") % 1001).tofile(path)
    with pytest.raises(ValueError, match="id 1,000 at position 1,000"):
        make(tmp_path, "tokens", **values)


# ---------------------------------------------------------------------------------------------- on the command line


def test_bad_input_ends_train_py_before_any_rank_starts(tmp_path):
    (tmp_path / "tiny.txt").write_text("ten bytes.")
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"text": 1}\n')
    small = [word for word in SMALL if "data" not in word]
    for words, message in (
        (["data=text", "data.path=tiny.txt"], "10 training tokens are fewer than the 17"),
        (["data=jsonl", "data.path=bad.jsonl"], "bad.jsonl, line 2: no text in 'text' but int"),
    ):
        done = run(*TRAIN, *small, *words, cwd=tmp_path)
        assert done.returncode == 2 and message in done.stderr, done.stderr
        assert len(done.stderr.strip().splitlines()) == 1 and not list(tmp_path.glob("experiments/*/*/logs"))


def test_a_missing_package_is_named_with_the_command_that_brings_it(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match="needs the package tokenizers: pip install -r requirements-data.txt"):
        make(tmp_path, "jsonl", path=path, tokenizer="bpe")
    with pytest.raises(ValueError, match="needs the package pyarrow: pip install -r requirements-data.txt"):
        make(tmp_path, "parquet", path=path)


def test_documents_are_packed_with_a_separator_between_them(tmp_path):
    corpus = make(tmp_path, "jsonl", path=write_jsonl(tmp_path / "a.jsonl", TEXTS))
    for side in sides(corpus):
        assert side[0] != 0 and side[-1] != 0
        assert all(split_at(side, 0))  # no two in a row
