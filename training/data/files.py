"""Which files a path means, reading them in blocks of fixed size, and their hashes."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

BLOCK_BYTES = 1 << 20  # files are read in blocks of this size: a document may be larger than the memory
REMEMBERED_BYTES = 1 << 24  # the hash of a file this large is remembered as long as it is not changed
# Third-party code and the interpreter's own tests are not the library's source.
LIBRARY_SKIPS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class File(NamedTuple):
    """One file that is not empty: its path, its size in bytes and the SHA-256 of its content."""

    path: str
    size: int
    digest: bytes


# ---------------------------------------------------------------------------------------------- which files


def library_files() -> list[str]:
    """Paths of the *.py files of the running Python's standard library, sorted by their path below its folder."""
    root = sysconfig.get_paths()["stdlib"]
    files = [path for path in _walk(root, LIBRARY_SKIPS) if path.endswith(".py")]
    if not files:
        raise ValueError(f"data.source=python_source: no .py file under {root}: use data=text data.path=YOUR_TEXT")
    return files


def find_files(source: str, path: str | None, suffix: str | None = None) -> list[str]:
    """Paths of the files that `path` means, sorted by their path below it.

    A file: itself. A folder: every file below it but hidden ones and, without a suffix, binary ones (a byte 0 in the
    first 8,000: the rule by which git tells them); with a suffix (".jsonl") those that end so. A glob (`**` crosses
    folders): every file that matches.

    Raises ValueError when there is no path or nothing that it matches.
    """
    if not path:
        raise ValueError(f"data.source={source} needs data.path: a file, a folder or a glob")
    path = os.path.expanduser(path)
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        files = _walk(path, set())
        files = [name for name in files if (name.endswith(suffix) if suffix else not _is_binary(name))]
        if not files:
            what = f"no *{suffix} file" if suffix else "no text file"
            raise ValueError(f"data.path={path}: the folder holds {what}: give a file, another folder or a glob")
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
    for folder, folders, names in os.walk(root, onerror=unreadable):
        folders[:] = [name for name in folders if name not in skips and not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    found = [path for path in found if path.is_file()]  # no sockets, no broken links
    return [str(path) for path in sorted(found, key=lambda path: path.relative_to(root).as_posix())]


def _is_binary(path: str) -> bool:
    return b"\0" in next(blocks(path, 0, 8000), b"")


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
        unreadable(error, path)


def unreadable(error: OSError, path: str | None = None) -> NoReturn:
    raise ValueError(f"cannot read {path or error.filename}: {error.strerror or error}") from error


# ---------------------------------------------------------------------------------------------- hashes


def scan(paths: list[str], cache: str) -> list[File]:
    """Hashes every file, in blocks; empty files are left out. ValueError when nothing is left or one is unreadable.

    cache: the folder in which hashes of large files are remembered.
    """
    files = [file for path in paths if (file := _hashed(path, cache)).size]
    if not files:
        what = f"{paths[0]} is" if len(paths) == 1 else f"all {len(paths)} files are"
        raise ValueError(f"no data: {what} empty (0 bytes): point data.path at other text")
    return files


def _hashed(path: str, cache: str) -> File:
    if known := recall(path, cache):
        return File(path, known["size"], bytes.fromhex(known["sha256"]))
    before = fingerprint(path)
    digest, size = hashlib.sha256(), 0
    for block in blocks(path):
        digest.update(block)
        size += len(block)
    remember(path, cache, before, {"sha256": digest.hexdigest()})
    return File(path, size, digest.digest())


def fingerprint(path: str) -> dict:
    """What changes when a file is written to."""
    try:
        found = os.stat(path)
    except OSError as error:
        unreadable(error, path)
    return {"size": found.st_size, "changed_ns": found.st_mtime_ns, "inode": found.st_ino}


def recall(path: str, cache: str) -> dict | None:
    """What `remember` was told of a file that has not changed since, with its size; None where nothing is known."""
    try:
        known = json.loads(_memory(path, cache).read_text())
    except (OSError, ValueError):
        return None
    return known if fingerprint(path).items() <= known.items() else None


def remember(path: str, cache: str, before: dict, facts: dict) -> None:
    """Keep the `facts` that reading a large file took; `before`: its fingerprint when the reading began."""
    if before["size"] < REMEMBERED_BYTES or fingerprint(path) != before:
        return
    place = _memory(path, cache)
    partial = place.with_suffix(f".{os.getpid()}.tmp")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(before | facts))
        partial.replace(place)
    except OSError:
        pass  # it is read again; a cache that cannot be written is refused later, with its name


def _memory(path: str, cache: str) -> Path:
    return Path(cache, "files", hashlib.sha256(os.path.abspath(path).encode()).hexdigest()[:16] + ".json")


def content_hash(files: list[File]) -> str:
    """Hash of the files' contents, in their order: the same for the same text wherever it lies."""
    return hashlib.sha256(b"".join(file.digest for file in files)).hexdigest()
