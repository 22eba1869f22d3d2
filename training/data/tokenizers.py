"""From text to token ids: bytes, a BPE that is trained here, any tokenizer.json (the `tokenizers` library)."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from conf.check_data import BYTE_VOCABULARY, json_vocabulary, read_tokenizer
from conf.schema import DataConfig
from training.data.locks import locked
from training.data.readers import Source, library

BPE_FORMAT = 1  # of the training below; another number makes older tokenizers unused
TRAINING_BYTES = 1 << 26  # of text that merges are counted over, taken evenly from all of it
END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")  # GPT-2, Llama 3, Llama 2, Gemma, BERT

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tokenizer:
    """Which ids text becomes. Plain values: a process that tokenises is handed one and calls `encoder`."""

    identity: str  # "byte", or "tokenizer.json " and the first 16 digits of its SHA-256
    vocabulary: int  # number of ids, from 0
    separator: int | None  # the id that ends a document; None where there is none: documents follow one another
    path: str | None = None  # of the tokenizer.json

    @property
    def dtype(self) -> np.dtype:
        """The smallest type that holds every id: a vocabulary over 65,536 is never stored in 16 bits."""
        return np.min_scalar_type(self.vocabulary - 1)

    @property
    def is_bytes(self) -> bool:
        return self.path is None

    def token_bytes(self) -> np.ndarray | None:
        """Bytes of text that each id stands for, uint16 [vocabulary]; a separator counts as one. None where that hangs
        on an id's neighbours, or the text is changed before it is cut, or each byte is a token anyway."""
        if self.is_bytes:
            return None
        values = read_tokenizer(self.path)
        before, after = values.get("pre_tokenizer") or {}, values.get("decoder") or {}
        levels = [step for step in before.get("pretokenizers", [before]) if step.get("type") == "ByteLevel"]
        exact = after.get("type") == "ByteLevel" and levels and not levels[-1].get("add_prefix_space")
        if not exact or values.get("normalizer") or not isinstance(values["model"]["vocab"], dict):
            return None
        sizes = np.zeros(self.vocabulary, np.uint16)
        for token, number in values["model"]["vocab"].items():
            sizes[number] = len(token)  # byte level: a character for each byte
        for token in values.get("added_tokens") or []:
            sizes[token["id"]] = len(token["content"].encode())
        if self.separator is not None:
            sizes[self.separator] = 1
        return sizes

    def encoder(self) -> Callable[[list[bytes]], list[np.ndarray]]:
        """texts (UTF-8; any bytes for `byte`) -> the ids of each, [tokens] of `dtype`.

        The text of a special token is text: only the packing puts separators between documents.
        """
        if self.is_bytes:
            return lambda texts: [np.frombuffer(text, np.uint8) for text in texts]
        tokenizer = library("tokenizers", f"data.tokenizer={self.path}").Tokenizer.from_file(self.path)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True

        def encode(texts: list[bytes]) -> list[np.ndarray]:
            encodings = tokenizer.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
            return [np.array(encoding.ids, self.dtype) for encoding in encodings]

        return encode


# a byte 0 stands between two documents: text has none
BYTES = Tokenizer("byte", BYTE_VOCABULARY, 0)


def get_tokenizer(data: DataConfig, sources: list[Source]) -> Tokenizer:
    """The tokenizer that `data` names; bpe is trained on `sources` once, and kept in data.cache by their content.

    Raises ValueError for a file that is no tokenizer, a separator that it does not have, a missing package.
    """
    if data.tokenizer == "byte":
        return BYTES
    if data.tokenizer == "bpe":
        return _from_file(_trained(data, sources), None)
    return _from_file(os.path.abspath(os.path.expanduser(data.tokenizer)), data.separator)


def _from_file(path: str, separator: object) -> Tokenizer:
    values = read_tokenizer(path)
    identity = f"tokenizer.json {hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]}"
    added = {token["content"]: token["id"] for token in values.get("added_tokens") or []}
    vocabulary = values["model"]["vocab"]
    known = added | (vocabulary if isinstance(vocabulary, dict) else {})
    if separator is not None and separator not in known:
        special = ", ".join(list(added)[:8]) or "none"
        raise ValueError(f"data.separator={separator} is no token of {path}; its special tokens are {special}")
    names = END_OF_DOCUMENT if separator is None else (separator,)
    found = next((known[name] for name in names if name in known), None)
    tokenizers = library("tokenizers", f"data.tokenizer={path}")
    try:
        tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises nothing more exact
        raise ValueError(f"data.tokenizer={path} is no tokenizer.json that tokenizers can read: {error}") from error
    return Tokenizer(identity, json_vocabulary(values), found, path)


# ---------------------------------------------------------------------------------------------- byte-pair encoding


def _trained(data: DataConfig, sources: list[Source]) -> str:
    """The path of the BPE of these texts: byte level, so that any text is a sequence of its tokens.

    Made once where many processes start together. ValueError when the file is not the one that was made.
    """
    key = hashlib.sha256(
        json.dumps([[source.content_hash for source in sources], data.tokenizer_vocabulary, BPE_FORMAT]).encode()
    ).hexdigest()[:16]
    folder = Path(os.path.abspath(data.cache)) / "tokenizers" / key
    path, stamp = folder / "tokenizer.json", folder / "sha256"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "lock"):
            if not stamp.exists():
                made = _train(sources, data.tokenizer_vocabulary)
                path.write_text(made)
                stamp.write_text(hashlib.sha256(made.encode()).hexdigest() + "\n")
            found = hashlib.sha256(path.read_bytes()).hexdigest()
            if found != stamp.read_text().strip():
                raise ValueError(
                    f"{path} is not the tokenizer that was trained there: delete {folder}, or name the file itself "
                    "with data.tokenizer=PATH"
                )
    except OSError as error:
        raise ValueError(
            f"cannot write the tokenizer to {folder}: {error.strerror}: choose another data.cache"
        ) from error
    return str(path)


def _train(sources: list[Source], vocabulary: int) -> str:
    """A tokenizer.json: byte-level BPE (Sennrich, Haddow and Birch 2016; GPT-2's way of splitting text into words)."""
    tokenizers = library("tokenizers", "data.tokenizer=bpe")
    log.info("training a BPE of %d tokens on %s", vocabulary, ", ".join(source.description for source in sources))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_DOCUMENT[0]],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(sources), trainer)
    return tokenizer.to_str()


def _sample(sources: list[Source]) -> Iterator[str]:
    """Text of every part, TRAINING_BYTES in all: the beginning of each, in proportion to its size."""
    total = sum(span.size for source in sources for part in source.parts for span in part)
    for source in sources:
        for part in source.parts:
            left = sum(span.size for span in part) * min(1, TRAINING_BYTES / total)
            for piece in source.read(part, utf8=True):
                yield piece.text.decode()
                left -= len(piece.text)
                if left <= 0:
                    break
