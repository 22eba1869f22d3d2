"""What conf/check_data.py refuses without reading the data, in one line; vocabularies that a configuration implies."""

import json

import pytest
from composing import resolved

from conf.check import check

ONE = "{source: text, path: a.txt, weight: 1}"

REFUSED = [
    (["data.tokenizer=words"], ["data.tokenizer=words", "byte, bpe", "tokenizer.json"]),
    (["data.tokenizer=bpe", "data.tokenizer_vocabulary=256"], ["256", "at least 257"]),
    (["data.tokenizer=missing.json"], ["missing.json: No such file"]),
    (["data=jsonl"], ["data=jsonl needs data.path", "*.jsonl"]),
    (["data=parquet"], ["data=parquet needs data.path"]),
    (["data=datasets"], ["data=datasets needs data.path", "save_to_disk"]),
    (["data=tokens"], ["data=tokens needs data.path"]),
    (["data=tokens", "data.path=a.bin"], ["a.json", "data.vocabulary"]),
    (["data=tokens", "data.vocabulary=10"], ["data=tokens needs data.path"]),
    (["data=tokens", "data.path=a.bin", "data.vocabulary=70000", "data.dtype=uint16"], ["70000", "65536", "uint32"]),
    (["data=tokens", "data.path=a.bin", "data.vocabulary=10", "data.dtype=int8"], ["int8", "uint8, uint16, uint32"]),
    (["data=tokens", "data.path=a.bin", "data.vocabulary=1"], ["data.vocabulary=1", "at least 2"]),
    (["data=jsonl", "data.path=a.jsonl", "data.bad_documents=ignore"], ["ignore", "stop, skip"]),
    (["data=mix"], ["data=mix needs data.sources"]),
    (["data=mix", "data.sources=[a.txt]"], ["data.sources[0]=a.txt", "weight: 1"]),
    (["data=mix", "data.sources=[{source: text, path: a.txt}]"], ["data.sources[0].weight=None", "more than 0"]),
    (["data=mix", f"data.sources=[{ONE}, {{source: text, path: b.txt, weight: 0}}]"], ["data.sources[1].weight=0"]),
    (["data=mix", "data.sources=[{source: synthetic, weight: 1}]"], ["data.sources[0].source=synthetic", "jsonl"]),
    (
        ["data=mix", "data.sources=[{source: text, file: a.txt, weight: 1}]"],
        ["data.sources[0].file is unknown"],
    ),
    (["data=mix", "data.sources=[{source: text, tokenizer: bpe, weight: 1}]"], ["tokenizer is one for the whole mix"]),
    (["data=mix", "data.sources=[{source: text, weight: 1}]"], ["data=text needs data.path"]),
    (["data=text", "data.path=a.txt", f"data.sources=[{ONE}]"], ["data.sources is for data=mix", "text"]),
]


@pytest.mark.parametrize(("overrides", "fragments"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_refused_in_one_line(overrides, fragments):
    with pytest.raises(ValueError) as error:
        check(resolved(*overrides))
    message = str(error.value)
    assert "\n" not in message
    assert all(fragment in message for fragment in fragments), message


def test_the_model_s_vocabulary_follows_the_data(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"vocabulary": 50_257}))
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 9}}, "added_tokens": [{"id": 11, "content": "</s>"}]}))
    for overrides, vocabulary in (
        (["data=jsonl"], 256),
        (["data.tokenizer=bpe"], 4096),
        ([f"data.tokenizer={path}"], 12),
        (["data=tokens", f"data.path={tmp_path}/a.bin"], 50_257),
        (["data=tokens", "data.path=elsewhere.bin", "data.vocabulary=60000"], 60_000),
        (["data=mix", f"data.sources=[{ONE}, {{source: tokens, path: {tmp_path}/a.bin, weight: 2}}]"], 50_257),
        (["data=mix", f"data.sources=[{ONE}]", "data.tokenizer=bpe", "data.tokenizer_vocabulary=999"], 999),
    ):
        assert resolved(*overrides).model.vocabulary == vocabulary, overrides
