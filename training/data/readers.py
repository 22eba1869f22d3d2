"""From files to documents: text files, jsonl, parquet and Hugging Face datasets, each in parts of bounded size.

A part is read by itself, by any process. A document comes as one or more pieces of UTF-8 bytes, at most about a block
each where the source lets it be cut (a text file), so that memory is bounded by the blocks and the longest line.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import training.data.files as files
from conf.schema import DataConfig

PART_BYTES = 1 << 25  # of the source in a part: what a kill may cost each process
ROWS = 10_000  # of a Hugging Face dataset in a part
BATCH_ROWS = 64  # rows that are in memory at once


class Span(NamedTuple):
    """A stretch of a source: bytes of a text or jsonl file, row groups of a parquet file, rows of a dataset."""

    path: str
    start: int
    stop: int
    size: int = 0  # bytes, for the progress bar
    digest: int = 0  # text: of the file


class Piece(NamedTuple):
    """Text of a document, or its next piece."""

    text: bytes
    digest: int  # first 64 bits of the SHA-256 of the document
    ends: bool  # whether the document ends with it


@dataclass
class Source:
    """Documents that can be tokenised, in parts, and how they are read."""

    kind: str  # one of READERS
    description: str
    content_hash: str
    parts: list[list[Span]]
    field: str = "text"
    skip_bad: bool = False  # else a bad document is an error
    subset: str | None = None  # datasets
    split: str = "train"  # datasets
    skipped: int = 0  # bad documents of the part that is being read

    def bad(self, where: object, wrong: str) -> None:
        """A document that is none: raises ValueError, or counts it. `where` is put into words only if it is raised."""
        if not self.skip_bad:
            raise ValueError(f"{where}: {wrong}; data.bad_documents=skip skips and counts such documents")
        self.skipped += 1

    def read(self, part: list[Span], utf8: bool) -> Iterator[Piece]:
        """The pieces of a part's documents. utf8: text must be UTF-8 (jsonl always must). ValueError for a bad one."""
        for span in part:
            yield from READERS[self.kind](self, span, utf8)


def open_source(data: DataConfig) -> Source:
    """Finds and hashes what `data` names. Raises ValueError for what is missing, empty or cannot be read."""
    if data.source == "datasets":
        return _open_dataset(data)
    common = dict(field=data.field, skip_bad=data.bad_documents == "skip")
    if data.source == "python_source":
        found = files.scan(files.library_files(), data.cache)
        name, kind = f"standard library of Python {platform.python_version()}", "text"
    else:
        suffix = {"jsonl": ".jsonl", "parquet": ".parquet"}.get(data.source)
        found = files.scan(files.find_files(data.source, data.path, suffix), data.cache)
        name, kind = f"{data.source} {data.path}", data.source
    spans = _row_groups(found, data.field) if kind == "parquet" else list(_byte_spans(found))
    number = "1 file" if len(found) == 1 else f"{len(found)} files"
    description = f"{name}: {number}, {sum(file.size for file in found):,} bytes"
    content = files.content_hash(found)
    if kind != "text":  # text keeps its folders in the cache
        content = _hash([content, kind, data.field, data.bad_documents])
    return Source(kind, description, content, _grouped(spans), **common)


def _hash(values: list) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _byte_spans(found: list[files.File]) -> Iterator[Span]:
    for file in found:
        digest = int.from_bytes(file.digest[:8], "big")
        for start in range(0, file.size, PART_BYTES):
            stop = min(start + PART_BYTES, file.size)
            yield Span(file.path, start, stop, stop - start, digest)


def _grouped(spans: list[Span]) -> list[list[Span]]:
    """Parts of about PART_BYTES: many small files make one."""
    parts: list[list[Span]] = []
    size = 0
    for span in spans:
        if not parts or size + span.size > PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(span)
        size += span.size
    return parts


# ---------------------------------------------------------------------------------------------- text


def _read_text(source: Source, span: Span, utf8: bool) -> Iterator[Piece]:
    """A file is a document. With `utf8` it is cut behind line ends, or spaces where a block has no line end."""
    size = os.path.getsize(span.path)
    start, stop = (_cut(span.path, at, size) if utf8 else at for at in (span.start, span.stop))
    carried = b""
    position = start  # of the file, where `carried` begins
    for block in files.blocks(span.path, start, stop):
        text = carried + block
        end = position + len(text) == stop
        whole = len(text) if end or not utf8 else _last_cut(text)
        if utf8:
            _check_utf8(text[:whole], span.path, position)
        if whole:
            yield Piece(text[:whole], span.digest, end and stop == size)
        carried, position = text[whole:], position + whole
    if position + len(carried) != stop:
        raise ValueError(f"{span.path} ({size} bytes) changed while it was being read: try again")


def _cut(path: str, at: int, size: int) -> int:
    """Where the part that nominally begins at byte `at` really does: behind the next line end of a block."""
    if at in (0, size):
        return at
    block = next(files.blocks(path, at - 1, min(size, at - 1 + files.BLOCK_BYTES)), b"")
    line = block.find(b"\n")
    if line >= 0:
        return at + line
    return at + next((i for i, byte in enumerate(block[1:5]) if byte & 0xC0 != 0x80), 0)


def _last_cut(text: bytes) -> int:
    """Length of the part of a block that ends behind a line end, a space, or a whole character."""
    for end in (b"\n", b" "):
        if (found := text.rfind(end)) >= 0:
            return found + 1
    return next((i for i in range(len(text) - 1, max(0, len(text) - 5), -1) if text[i] & 0xC0 != 0x80), len(text))


def _check_utf8(text: bytes, path: str, position: int) -> None:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 at byte {position + error.start:,} ({text[error.start : error.start + 4]!r}): "
            "convert it, or use data.tokenizer=byte, which takes any bytes"
        ) from None


# ---------------------------------------------------------------------------------------------- jsonl


def _read_jsonl(source: Source, span: Span, utf8: bool) -> Iterator[Piece]:
    """The lines that begin in the span; each a JSON object with the document's text in a field. Blank ones are none."""
    try:
        with open(span.path, "rb") as file:
            if span.start:
                file.seek(span.start - 1)
                file.readline()  # the line before belongs to the span before
            position = file.tell()
            while position < span.stop and (line := file.readline()):
                if line.strip():
                    where = _Line(span.path, position)
                    yield from _document(source, where, *_text_of_line(line, source.field))
                position += len(line)
    except OSError as error:
        files.unreadable(error, span.path)


class _Line(NamedTuple):
    """Says where a line is; its number is counted only when it is asked for."""

    path: str
    position: int

    def __str__(self) -> str:
        number = 1 + sum(block.count(b"\n") for block in files.blocks(self.path, 0, self.position))
        return f"{self.path}, line {number:,}"


def _text_of_line(line: bytes, name: str) -> tuple[object, str | None]:
    """(the field's value, None) or (None, what is wrong with the line)."""
    try:
        values = json.loads(line.decode().rstrip("\r\n"))
    except UnicodeDecodeError as error:
        return None, f"not UTF-8 at its byte {error.start + 1:,}"
    except json.JSONDecodeError as error:
        return None, f"no JSON ({error.msg.removesuffix(' at')} at character {error.pos + 1:,})"
    except RecursionError:
        return None, "no JSON that can be read (nested too deeply)"
    if not isinstance(values, dict):
        return None, f"no JSON object but {type(values).__name__}"
    if name not in values:
        return None, f"no field {name!r} (data.field) among {', '.join(map(repr, list(values)[:8])) or 'none'}"
    return values[name], None


def _document(source: Source, where: object, value: object, wrong: str | None = None) -> Iterator[Piece]:
    """One piece, the whole document; nothing where a bad one is skipped."""
    text = b""
    if wrong is None and not isinstance(value, str):
        wrong = f"no text in {source.field!r} but {type(value).__name__}"
    if wrong is None:
        try:
            text = value.encode()
        except UnicodeEncodeError as error:
            wrong = f"text with half a surrogate pair at character {error.start + 1:,}"
    if wrong is None and not text:
        wrong = f"an empty document: {source.field!r} is ''"
    if wrong is not None:
        source.bad(where, wrong)
        return
    yield Piece(text, int.from_bytes(hashlib.sha256(text).digest()[:8], "big"), True)


# ---------------------------------------------------------------------------------------------- parquet


def _row_groups(found: list[files.File], name: str) -> list[Span]:
    parquet = library("pyarrow.parquet", "data=parquet")
    spans = []
    for file in found:
        try:
            opened = parquet.ParquetFile(file.path)
        except Exception as error:  # pyarrow's own kinds, and OSError
            raise ValueError(f"{file.path} is no parquet file: {str(error).splitlines()[0]}") from error
        with opened:
            _check_column(file.path, name, opened.schema_arrow.names)
            sizes = [opened.metadata.row_group(i).total_byte_size for i in range(opened.num_row_groups)]
        spans += [Span(file.path, i, i + 1, size) for i, size in enumerate(sizes)]
    return spans


def _check_column(where: str, name: str, columns: list[str]) -> None:
    if name not in columns:
        raise ValueError(
            f"{where} has no column {name!r} (data.field); it has {', '.join(map(repr, columns)) or 'none'}"
        )


def _read_parquet(source: Source, span: Span, utf8: bool) -> Iterator[Piece]:
    parquet = library("pyarrow.parquet", "data=parquet")
    with parquet.ParquetFile(span.path) as file:
        row = sum(file.metadata.row_group(i).num_rows for i in range(span.start))
        groups = range(span.start, span.stop)
        for batch in file.iter_batches(BATCH_ROWS, row_groups=list(groups), columns=[source.field]):
            for value in batch.column(0).to_pylist():
                row += 1
                yield from _document(source, f"{span.path}, row {row:,}", value)


# ---------------------------------------------------------------------------------------------- Hugging Face datasets


def _open_dataset(data: DataConfig) -> Source:
    if not data.path:
        raise ValueError("data.source=datasets needs data.path: a folder or a name on the Hugging Face hub")
    dataset = _dataset(data.path, data.subset, data.split, data.allow_download)
    name = f"dataset {data.path}" + "".join(f", {part}" for part in (data.subset, data.split) if part)
    _check_column(name, data.field, dataset.column_names)
    if not len(dataset):
        raise ValueError(f"no data: {name} is empty (0 rows): choose another data.split")
    found = files.scan([str(file["filename"]) for file in dataset.cache_files], data.cache)
    content = _hash([files.content_hash(found), len(dataset), data.split, data.field, data.bad_documents])
    row_bytes = sum(file.size for file in found) // len(dataset)
    spans = [(start, min(start + ROWS, len(dataset))) for start in range(0, len(dataset), ROWS)]
    parts = [[Span(data.path, start, stop, (stop - start) * row_bytes)] for start, stop in spans]
    return Source(
        kind="datasets",
        description=f"{name}: {len(dataset):,} rows, {sum(file.size for file in found):,} bytes",
        content_hash=content,
        parts=parts,
        field=data.field,
        skip_bad=data.bad_documents == "skip",
        subset=data.subset,
        split=data.split,
    )


def _dataset(path: str, subset: str | None, split: str, allow_download: bool):
    """A dataset of this machine, or of the hub where that is allowed. Raises ValueError with what is missing."""
    datasets = library("datasets", "data=datasets")
    datasets.disable_progress_bars()
    # the variable HF_HUB_OFFLINE is read once, at import: one process may read several sources, and run several jobs
    for settings in (datasets.config, library("huggingface_hub.constants", "data=datasets")):
        settings.HF_HUB_OFFLINE = not allow_download
    folder = Path(path).expanduser()
    try:
        if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
            found = datasets.load_from_disk(str(folder))
            if isinstance(found, datasets.DatasetDict):
                found = found[split] if split in found else _no_split(path, split, list(found))
            return found
        return datasets.load_dataset(str(folder) if folder.exists() else path, subset, split=split)
    except ValueError as error:
        raise ValueError(f"data.path={path}, data.split={split}: {' '.join(str(error).split())}") from error
    except Exception as error:  # huggingface_hub's and datasets' own kinds
        remedy = "is it on this machine? data.allow_download=true fetches it"
        remedy = "check the name and the network" if allow_download else remedy
        raise ValueError(f"data.path={path}: {' '.join(str(error).split())}: {remedy}") from error


def _no_split(path: str, split: str, known: list[str]) -> None:
    raise ValueError(f"there is no such part; it has {', '.join(known)}")


def _read_dataset(source: Source, span: Span, utf8: bool) -> Iterator[Piece]:
    dataset = _dataset(span.path, source.subset, source.split, False).select_columns([source.field])
    for start in range(span.start, span.stop, BATCH_ROWS):
        for row, value in enumerate(dataset[start : min(start + BATCH_ROWS, span.stop)][source.field], start + 1):
            yield from _document(source, f"{span.path}, row {row:,}", value)


READERS: dict[str, Callable[[Source, Span, bool], Iterator[Piece]]] = {
    "text": _read_text,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "datasets": _read_dataset,
}


def library(name: str, what: str):
    """An optional package's module. Raises ValueError that says how to install it."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"{what} needs the package {name.partition('.')[0]}: pip install -r requirements-data.txt ({error})"
        ) from error
