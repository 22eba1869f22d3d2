"""What can be told to be wrong with the data without reading them: names, ranges, what a source needs. No torch."""

from __future__ import annotations

import json
import os
from dataclasses import fields, replace
from pathlib import Path

from conf.schema import DataConfig

TEXT_SOURCES = ("python_source", "text", "jsonl", "parquet", "datasets")  # documents that a tokenizer reads
SOURCES = (*TEXT_SOURCES, "tokens", "synthetic", "mix")
NEEDED_PATHS = {
    "text": "a file, a folder or a glob in quotes",
    "jsonl": "a file, a folder of *.jsonl or a glob in quotes",
    "parquet": "a file, a folder of *.parquet or a glob in quotes",
    "datasets": "a folder that save_to_disk() wrote, or a name on the Hugging Face hub",
    "tokens": "a .bin file of token ids",
}
BYTE_VOCABULARY = 256  # a token is a byte
SMALLEST_BPE = 257  # the bytes and the end-of-document token
LARGEST = {"uint8": 2**8, "uint16": 2**16, "uint32": 2**32}  # vocabulary that a stored type can hold
ONE_FOR_ALL = ("tokenizer", "tokenizer_vocabulary", "cross_documents", "validation_fraction", "cache")  # of a mix


def check_data_values(data: DataConfig, trains: bool = True) -> None:
    """Each value by itself, and what a source needs. Raises ValueError with key, value and what is allowed.

    trains: False where only held-out text is read.
    """
    if data.source not in SOURCES:
        raise ValueError(f"data.source={data.source} is unknown; known are {', '.join(SOURCES)}")
    if data.tokenizer not in ("byte", "bpe") and not str(data.tokenizer).endswith(".json"):
        raise ValueError(
            f"data.tokenizer={data.tokenizer} is unknown; known are byte, bpe (trained here) and the path of a "
            "tokenizer.json"
        )
    if data.tokenizer_vocabulary < SMALLEST_BPE:
        raise ValueError(
            f"data.tokenizer_vocabulary={data.tokenizer_vocabulary} must be at least {SMALLEST_BPE}: the 256 bytes and "
            "the end-of-document token"
        )
    if data.bad_documents not in ("stop", "skip"):
        raise ValueError(f"data.bad_documents={data.bad_documents} is unknown; known are stop, skip")
    fraction = data.validation_fraction
    if not 0 < fraction <= 1:
        raise ValueError(f"data.validation_fraction={fraction} must be between 0 and 1: the part that is held out")
    if fraction == 1 and trains:
        raise ValueError(
            "data.validation_fraction=1 holds all text out and leaves none to train on: give less; 1 is for evaluate="
        )
    _check_stored(data)
    if data.source == "mix":
        for _, part in mixed(data):
            check_data_values(part, trains)
    elif data.sources:
        raise ValueError(f"data.sources is for data=mix, not for data.source={data.source}: leave it out")


def _check_stored(data: DataConfig) -> None:
    """The type and the vocabulary of a file of tokens."""
    if data.dtype is not None and data.dtype not in LARGEST:
        raise ValueError(f"data.dtype={data.dtype} is unknown; known are {', '.join(LARGEST)}")
    if data.vocabulary is not None and data.vocabulary < 2:
        raise ValueError(f"data.vocabulary={data.vocabulary} must be at least 2")
    if data.dtype and data.vocabulary and data.vocabulary > LARGEST[data.dtype]:
        raise ValueError(
            f"data.vocabulary={data.vocabulary} does not fit data.dtype={data.dtype}, which holds "
            f"{LARGEST[data.dtype]} ids: the larger ones are lost already; store the tokens as uint32"
        )


def check_data(data: DataConfig) -> None:
    """The data of a run that is about to start. Raises ValueError."""
    for part in [part for _, part in mixed(data)] if data.source == "mix" else [data]:
        if part.source in NEEDED_PATHS and not part.path:
            raise ValueError(f"data={part.source} needs data.path: {NEEDED_PATHS[part.source]}")


def mixed(data: DataConfig) -> list[tuple[float, DataConfig]]:
    """The weight and the configuration of each source of data=mix; what an entry leaves out is the mix's.

    Raises ValueError for an entry that is none.
    """
    known = sorted({field.name for field in fields(DataConfig)} - {"sources", "name", *ONE_FOR_ALL} | {"weight"})
    found = []
    for number, entry in enumerate(data.sources):
        where = f"data.sources[{number}]"
        if not isinstance(entry, dict):
            raise ValueError(
                f"{where}={entry} must be a source with its weight, such as {{source: text, path: a.txt, weight: 1}}"
            )
        if unknown := sorted(set(entry) - set(known)):
            what = "is one for the whole mix" if unknown[0] in ONE_FOR_ALL else "is unknown"
            raise ValueError(f"{where}.{unknown[0]} {what}; a source of a mix has {', '.join(known)}")
        if entry.get("source") not in (*TEXT_SOURCES, "tokens"):
            raise ValueError(
                f"{where}.source={entry.get('source')} cannot be mixed; known are {', '.join(TEXT_SOURCES)}, tokens"
            )
        weight = entry.get("weight")
        if not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise ValueError(f"{where}.weight={weight} must be more than 0: the source's part of the samples")
        values = {key: value for key, value in entry.items() if key != "weight"}
        found.append((float(weight), replace(data, name=str(entry["source"]), sources=[], **values)))
    if not found:
        raise ValueError("data=mix needs data.sources: a list such as [{source: text, path: a.txt, weight: 1}, …]")
    return found


# ---------------------------------------------------------------------------------------------- vocabulary


def tokenizer_vocabulary(data: DataConfig) -> int:
    """The number of different tokens that this data can hold. Raises ValueError where a file that says it cannot be
    read."""
    if data.source == "mix":
        return max(tokenizer_vocabulary(part) for _, part in mixed(data))
    if data.source == "synthetic":
        return data.synthetic_vocabulary
    if data.source == "tokens":
        if not (data.vocabulary or data.path):
            raise ValueError(f"data=tokens needs data.path: {NEEDED_PATHS['tokens']}")
        vocabulary = data.vocabulary or read_sidecar(data.path).get("vocabulary")
        if vocabulary is None:
            raise ValueError(
                f"data.path={data.path} has no {sidecar_path(data.path).name} beside it that says its vocabulary: give "
                "data.vocabulary, the number of different ids"
            )
        return vocabulary
    if data.tokenizer == "bpe":
        return data.tokenizer_vocabulary
    return BYTE_VOCABULARY if data.tokenizer == "byte" else json_vocabulary(read_tokenizer(data.tokenizer))


def read_tokenizer(path: str) -> dict:
    """The content of a tokenizer.json. Raises ValueError when it is none."""
    try:
        values = json.loads(Path(os.path.expanduser(path)).read_bytes())
        if not isinstance(values, dict) or "vocab" not in values["model"]:
            raise KeyError
    except OSError as error:
        raise ValueError(f"data.tokenizer={path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"data.tokenizer={path} is no tokenizer.json: it has no model with a vocabulary") from None
    return values


def json_vocabulary(tokenizer: dict) -> int:
    """One more than the largest id of a tokenizer.json: of its model (a dict token -> id, or unigram's list of [token,
    score]) and of the tokens added to it."""
    vocabulary = tokenizer["model"]["vocab"]
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return 1 + max([*ids, *(token["id"] for token in tokenizer.get("added_tokens") or [])])


def sidecar_path(path: str) -> Path:
    """Where what is known of a file of tokens stands: tokens.bin -> tokens.json."""
    return Path(os.path.expanduser(path)).with_suffix(".json")


def read_sidecar(path: str) -> dict:
    """dtype, vocabulary, count, tokenizer, separator and bytes of a file of tokens; {} where nothing is said."""
    place = sidecar_path(path)
    try:
        values = json.loads(place.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {place}: {getattr(error, 'strerror', None) or 'it is no JSON'}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{place} must be a JSON object with dtype, vocabulary and count")
    for key in ("vocabulary", "count"):
        if key in values and type(values[key]) is not int:
            raise ValueError(f"{place}: {key}={values[key]} must be a whole number")
    return values
