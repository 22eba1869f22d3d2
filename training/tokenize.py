"""From files on disk to two streams of byte tokens: which files, what is held out, written in blocks of fixed size."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn

BYTE_VOCABULARY = 256  # a token is a byte
SEPARATOR = b"\0"  # stands between two documents; text has no byte 0
BLOCK_BYTES = 1 << 20  # files are read in blocks of this size: a document may be larger than the memory
# Third-party code and the interpreter's own tests are not the library's source.
LIBRARY_SKIPS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Document(NamedTuple):
    """One file that is not empty: its path, its size in bytes and the SHA-256 of its content."""

    path: str
    size: int
    digest: bytes


class Piece(NamedTuple):
    """Bytes start..stop of a document."""

    document: Document
    start: int
    stop: int


# ---------------------------------------------------------------------------------------------- which files


def library_files() -> list[str]:
    """Paths of the *.py files of the running Python's standard library, sorted by their path below its folder."""
    root = sysconfig.get_paths()["stdlib"]
    files = [path for path in _walk(root, LIBRARY_SKIPS) if path.endswith(".py")]
    if not files:
        raise ValueError(f"data.source=python_source: no .py file under {root}: use data=text data.path=YOUR_TEXT")
    return files


def text_files(path: str | None) -> list[str]:
    """Paths of the files that `path` means, sorted by their path below it.

    A file: itself. A folder: every file below it but hidden ones and binary ones (a byte 0 in the first 8,000: the rule
    by which git tells them). A glob (`**` crosses folders): every file that matches.

    Raises ValueError when there is no path or nothing that it matches.
    """
    if not path:
        raise ValueError("data.source=text needs data.path: a file, a folder or a glob")
    path = os.path.expanduser(path)
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        files = [name for name in _walk(path, set()) if not _is_binary(name)]
        if not files:
            raise ValueError(f"data.path={path}: the folder holds no text file: give a file, another folder or a glob")
        return files
    if os.path.exists(path):
        raise ValueError(f"data.path={path} is neither a file nor a folder")
    files = sorted(name for name in glob.glob(path, recursive=True) if os.path.isfile(name))
    if not files:
        found = "no file matches" if glob.has_magic(path) else "no such file or folder"
        raise ValueError(f"data.path={path}: {found} (relative paths start from {os.getcwd()})")
    return files


def _walk(root: str, skips: set[str]) -> list[str]:
    """Regular files below `root`, without hidden ones and folders named in `skips`, sorted by relative path."""
    found = []
    for folder, folders, names in os.walk(root, onerror=_unreadable):
        folders[:] = [name for name in folders if name not in skips and not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    found = [path for path in found if path.is_file()]  # no sockets, no broken links
    return [str(path) for path in sorted(found, key=lambda path: path.relative_to(root).as_posix())]


def _is_binary(path: str) -> bool:
    return SEPARATOR in next(blocks(path, 0, 8000), b"")


# ---------------------------------------------------------------------------------------------- reading


def blocks(path: str, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    """Bytes start..stop of a file (to its end when stop is None), in blocks. ValueError when it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(start)
            while stop is None or start < stop:
                block = file.read(BLOCK_BYTES if stop is None else min(BLOCK_BYTES, stop - start))
                if not block:
                    return
                start += len(block)
                yield block
    except OSError as error:
        _unreadable(error, path)


def _unreadable(error: OSError, path: str | None = None) -> NoReturn:
    raise ValueError(f"cannot read {path or error.filename}: {error.strerror or error}") from error


def scan(paths: list[str]) -> list[Document]:
    """Hashes every file, in blocks; empty files are left out. ValueError when nothing is left or one is unreadable."""
    documents = []
    for path in paths:
        digest, size = hashlib.sha256(), 0
        for block in blocks(path):
            digest.update(block)
            size += len(block)
        if size:
            documents.append(Document(path, size, digest.digest()))
    if not documents:
        what = f"{paths[0]} is" if len(paths) == 1 else f"all {len(paths)} files are"
        raise ValueError(f"no data: {what} empty (0 bytes): point data.path at other text")
    return documents


def content_hash(documents: list[Document]) -> str:
    """Hash of the documents' contents, in their order: the same for the same text wherever it lies."""
    return hashlib.sha256(b"".join(document.digest for document in documents)).hexdigest()


# ---------------------------------------------------------------------------------------------- what is held out


def split(documents: list[Document], fraction: float) -> tuple[list[Piece], list[Piece]]:
    """(training, validation) pieces; about `fraction` of the bytes are held out, and never met in training.

    Whole documents are held out where that can come near the fraction: in the order of their digests (random, but the
    same on every machine, and copies of one document stay together), each that still fits. Where it cannot (one
    document, a few, or one that outweighs the others) it is the last `fraction` of the bytes, contiguous, and copies of
    a document are dropped, so that none of it comes back in training.
    """
    target = fraction * sum(document.size for document in documents)
    bytes_of: dict[bytes, int] = {}
    for document in documents:
        bytes_of[document.digest] = bytes_of.get(document.digest, 0) + document.size
    held_out, held_bytes = set(), 0
    for digest in sorted(bytes_of):
        if held_bytes + bytes_of[digest] <= target:
            held_out.add(digest)
            held_bytes += bytes_of[digest]
    if held_bytes < target / 2:
        return _split_tail(documents, fraction)
    pieces = [Piece(document, 0, document.size) for document in documents]
    return (
        [piece for piece in pieces if piece.document.digest not in held_out],
        [piece for piece in pieces if piece.document.digest in held_out],
    )


def _split_tail(documents: list[Document], fraction: float) -> tuple[list[Piece], list[Piece]]:
    distinct = list({document.digest: document for document in documents}.values())
    total = sum(document.size for document in distinct)
    cut = total - round(fraction * total)  # position in the bytes of all documents, one after the other
    training, validation, start = [], [], 0
    for document in distinct:
        inside = min(max(cut - start, 0), document.size)
        if inside > 0:
            training.append(Piece(document, 0, inside))
        if inside < document.size:
            validation.append(Piece(document, inside, document.size))
        start += document.size
    return training, validation


def write_tokens(pieces: list[Piece], out: BinaryIO) -> int:
    """Writes the pieces' byte tokens (uint8), a separator between two; returns their number."""
    tokens = 0
    for number, (document, start, stop) in enumerate(pieces):
        if number:
            tokens += out.write(SEPARATOR)
        before = tokens
        for block in blocks(document.path, start, stop):
            tokens += out.write(block)
        if tokens - before != stop - start:
            raise ValueError(f"{document.path} ({document.size} bytes) changed while it was being read: try again")
    return tokens
