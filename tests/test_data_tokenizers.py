"""BPE trained here and any tokenizer.json, against the `tokenizers` library itself; bits per byte."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from composing import resolved
from corpora import documents, make, sides, split_at, write_jsonl

from conf.check_data import json_vocabulary, read_tokenizer
from conf.schema import to_dict
from models.describe import describe
from ranks import ROOT
from training import resume
from training.data import Batches

tokenizers = pytest.importorskip("tokenizers", reason="pip install -r requirements-data.txt")

TEXTS = documents(200)


@pytest.fixture
def jsonl(tmp_path):
    return write_jsonl(tmp_path / "a.jsonl", TEXTS)


def _trained(folder: Path) -> tuple[Path, "tokenizers.Tokenizer"]:
    (path,) = folder.glob("cache/tokenizers/*/tokenizer.json")
    return path, tokenizers.Tokenizer.from_file(str(path))


def test_a_trained_bpe_packs_documents_that_decode_to_the_text(tmp_path, jsonl):
    corpus = make(tmp_path, "jsonl", path=jsonl, tokenizer="bpe", tokenizer_vocabulary=400)
    _, tokenizer = _trained(tmp_path)
    assert tokenizer.get_vocab_size() <= 400
    assert (corpus.vocabulary, corpus.separator) == (tokenizer.get_vocab_size(), tokenizer.token_to_id("<|endoftext|>"))
    found = [tokenizer.decode(ids) for side in sides(corpus) for ids in split_at(side, corpus.separator)]
    assert sorted(found) == sorted(TEXTS)
    assert sum(map(len, sides(corpus))) < 0.5 * sum(len(text.encode()) for text in TEXTS)  # it compresses


def test_the_same_documents_are_held_out_whatever_the_tokenizer(tmp_path, jsonl):
    held = [text for text in sides(make(tmp_path, "jsonl", path=jsonl))[1].tobytes().decode().split("\0")]
    corpus = make(tmp_path, "jsonl", path=jsonl, tokenizer="bpe", tokenizer_vocabulary=400)
    _, tokenizer = _trained(tmp_path)
    assert [tokenizer.decode(ids) for ids in split_at(sides(corpus)[1], corpus.separator)] == held


def test_bits_per_byte_divides_by_the_bytes_of_the_text(tmp_path, jsonl):
    held = sides(make(tmp_path, "jsonl", path=jsonl))[1].tobytes()  # separators are a byte each
    for vocabulary in (260, 400):
        corpus = make(tmp_path, "jsonl", path=jsonl, tokenizer="bpe", tokenizer_vocabulary=vocabulary)
        assert corpus.bytes_per_token * corpus.validation_tokens == pytest.approx(len(held))
        _, targets = Batches(corpus, 16, seed=0).validation(0, 5)
        text = _decoded(tmp_path, corpus, targets)
        assert Batches(corpus, 16, seed=3).bytes_per_token(5) == pytest.approx(len(text) / targets.size, abs=1e-12)


def _decoded(folder, corpus, targets) -> bytes:
    """The bytes of ids: GPT-2's table of characters for bytes, taken from the library by encoding each byte's token."""
    path = next(p for p in folder.glob("cache/tokenizers/*/tokenizer.json") if _identity(p) == corpus.tokenizer)
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    # each id alone decodes to its bytes where these are whole characters; ASCII-only ids and pairs are checked so
    whole = b""
    for row in targets.tolist():
        for number in row:
            token = tokenizer.id_to_token(number)
            whole += b"\0" if number == corpus.separator else bytes(len(token))
            if (text := tokenizer.decode([number])) and "\ufffd" not in text:
                assert len(text.encode()) == len(token)
    return whole


def _identity(path: Path) -> str:
    import hashlib

    return f"tokenizer.json {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def test_a_tokenizer_json_by_path_gives_the_library_s_ids(tmp_path, jsonl):
    """WordPiece, with BERT's separator: nothing of it is byte level."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=150, special_tokens=["[UNK]", "[SEP]", "<doc>"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for separator in ("[SEP]", "<doc>"):
        values = {} if separator == "[SEP]" else {"separator": separator}
        corpus = make(tmp_path, "jsonl", path=jsonl, tokenizer=str(tmp_path / "tokenizer.json"), **values)
        assert corpus.separator == tokenizer.token_to_id(separator)
        found = [ids for side in sides(corpus) for ids in split_at(side, corpus.separator)]
        assert sorted(found) == sorted(tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS)
    held = sides(make(tmp_path, "jsonl", path=jsonl))[1]
    assert Batches(corpus, 16, seed=0).bytes_per_token(3) == pytest.approx(len(held) / corpus.validation_tokens)
    assert (
        corpus.vocabulary == tokenizer.get_vocab_size() == json_vocabulary(read_tokenizer(tmp_path / "tokenizer.json"))
    )


def test_the_vocabulary_of_a_unigram_model_counts_its_added_tokens(tmp_path):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0)], 0))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert json_vocabulary(read_tokenizer(tmp_path / "tokenizer.json")) == tokenizer.get_vocab_size() == 4


def test_text_cannot_forge_a_separator(tmp_path):
    texts = [f"{text} <|endoftext|> more" for text in TEXTS]
    corpus = make(
        tmp_path, "jsonl", path=write_jsonl(tmp_path / "b.jsonl", texts), tokenizer="bpe", tokenizer_vocabulary=300
    )
    assert sum(int((side == corpus.separator).sum()) + 1 for side in sides(corpus)) == len(texts)


def test_a_vocabulary_over_65536_is_stored_in_32_bits(tmp_path, jsonl):
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *(f"w{i}" for i in range(65_535))])}
    for extra, dtype in (({}, "uint16"), ({"the": 65_536}, "uint32")):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary | extra, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        corpus = make(tmp_path, "jsonl", path=jsonl, tokenizer=str(tmp_path / "tokenizer.json"))
        assert corpus.dtype == dtype and corpus.vocabulary == len(vocabulary) + len(extra)
    assert max(side.max() for side in sides(corpus)) == 65_536
    assert corpus.separator is None  # it has no token for that


def test_a_text_file_is_cut_behind_line_ends_and_keeps_every_byte(tmp_path, monkeypatch):
    monkeypatch.setattr("training.data.files.BLOCK_BYTES", 1000)
    monkeypatch.setattr("training.data.readers.PART_BYTES", 5000)
    monkeypatch.setattr("training.data.pieces.num_cores", lambda: 1)
    for name, text in (("lines", "\n".join(TEXTS)), ("line", " ".join(TEXTS)), ("letters", "é€x" * 4000)):
        path = tmp_path / f"{name}.txt"
        path.write_text(text)
        corpus = make(
            tmp_path, "text", path=path, tokenizer="bpe", tokenizer_vocabulary=300, cache=str(tmp_path / name)
        )
        tokenizer = tokenizers.Tokenizer.from_file(str(next(tmp_path.glob(f"{name}/tokenizers/*/tokenizer.json"))))
        assert tokenizer.decode(np.concatenate(sides(corpus)).tolist()) == text
        assert corpus.validation_tokens / sum(map(len, sides(corpus))) == pytest.approx(0.05, abs=0.02)


def test_text_that_is_not_utf8_is_named_with_its_position(tmp_path, monkeypatch):
    monkeypatch.setattr("training.data.files.BLOCK_BYTES", 1000)
    (tmp_path / "a.txt").write_bytes(b"word " * 1000 + b"f\xfcnf" + b" word" * 1000)
    with pytest.raises(ValueError, match=re.escape("a.txt is not UTF-8 at byte 5,001 (b'\\xfcnf ')")):
        make(tmp_path, "text", path=tmp_path / "a.txt", tokenizer="bpe")
    assert make(tmp_path, "text", path=tmp_path / "a.txt").train_tokens > 0  # bytes are bytes


def test_other_text_trains_another_bpe_and_a_changed_one_is_refused(tmp_path, jsonl):
    values = dict(tokenizer="bpe", tokenizer_vocabulary=300)
    first = make(tmp_path, "jsonl", path=jsonl, **values)
    path, _ = _trained(tmp_path)
    made = path.stat().st_mtime_ns
    assert make(tmp_path, "jsonl", path=jsonl, **values) == first and path.stat().st_mtime_ns == made
    other = make(tmp_path, "jsonl", path=write_jsonl(tmp_path / "b.jsonl", documents(200, seed=1)), **values)
    assert other.tokenizer != first.tokenizer and len(list(tmp_path.glob("cache/tokenizers/*"))) == 2
    by_path = make(tmp_path, "jsonl", path=jsonl, tokenizer=str(path))
    assert by_path == first  # the same tokens, whoever names the file
    changed = json.loads(path.read_text())
    changed["model"]["merges"].pop()
    path.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="is not the tokenizer that was trained there"):
        make(tmp_path, "jsonl", path=jsonl, **values)


def test_wrong_tokenizers_are_refused_in_one_line(tmp_path, jsonl):
    (tmp_path / "no.json").write_text("{}")
    (tmp_path / "odd.json").write_text('{"model": {"type": "Odd", "vocab": {"a": 0}}}')
    good = make(tmp_path, "jsonl", path=jsonl, tokenizer="bpe", tokenizer_vocabulary=300)
    path, _ = _trained(tmp_path)
    for values, words in (
        ({"tokenizer": str(tmp_path / "missing.json")}, "missing.json: No such file"),
        ({"tokenizer": str(tmp_path / "no.json")}, "no.json is no tokenizer.json"),
        ({"tokenizer": str(tmp_path / "odd.json")}, "odd.json is no tokenizer.json that tokenizers can read"),
        ({"tokenizer": str(path), "separator": "<eod>"}, "data.separator=<eod> is no token of"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)) as error:
            make(tmp_path, "jsonl", path=jsonl, **values)
        assert "\n" not in str(error.value)
    meta = Path(good.train_path).parent / "meta.json"
    meta.write_text(meta.read_text().replace(good.tokenizer, "tokenizer.json 0000"))
    with pytest.raises(ValueError, match="was made with the tokenizer tokenizer.json 0000, and the data are asked for"):
        make(tmp_path, "jsonl", path=jsonl, tokenizer="bpe", tokenizer_vocabulary=300)


def test_many_processes_at_once_train_one_tokenizer(tmp_path, jsonl):
    program = (
        "import logging, sys; logging.basicConfig(level='INFO', stream=sys.stdout, format='%(message)s');"
        "from conf.schema import DataConfig; from training.data import prepare; import tokenizers;"
        "sys.stdin.readline();"
        "values = dict(tokenizer='bpe', tokenizer_vocabulary=400, path=sys.argv[1], cache=sys.argv[2]);"
        "print(prepare(DataConfig(name='t', source='jsonl', **values), sequence=16).tokenizer)"
    )
    command = [sys.executable, "-c", program, str(jsonl), str(tmp_path / "cache")]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    time.sleep(1)  # all have imported and wait for the start
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 3
    assert sum("training a BPE" in output for output in outputs) == 1
    assert len({output.splitlines()[-1] for output in outputs}) == 1


def test_a_run_is_not_resumed_with_another_tokenizer_or_another_attention(tmp_path, jsonl):
    config = resolved("data=jsonl", f"data.path={jsonl}", "data.tokenizer=bpe", "data.tokenizer_vocabulary=300")
    corpus = make(tmp_path, "jsonl", path=jsonl, tokenizer="bpe", tokenizer_vocabulary=300)
    parameters = {name: list(shape) for layer in describe(config.model) for name, shape in layer.parameters.items()}
    tied = {copy: owner for layer in describe(config.model) for copy, owner in layer.tied.items()}
    saved = {"config": to_dict(config), "corpus": corpus.to_dict(), "parameters": parameters, "tied": tied, "step": 1}
    found = resume.Found(tmp_path, json.loads(json.dumps(saved)))
    resume.check_compatible(config, corpus, found)
    for tokenizer in ("byte", "bpe"):
        other = make(tmp_path, "jsonl", path=jsonl, tokenizer=tokenizer, tokenizer_vocabulary=290)
        with pytest.raises(ValueError, match="the data have another tokenizer than the run that is resumed"):
            resume.check_compatible(config, other, found)
    config.data.cross_documents = False
    with pytest.raises(ValueError, match="data.cross_documents=False cannot be changed on resume from True"):
        resume.check_compatible(config, corpus, found)
