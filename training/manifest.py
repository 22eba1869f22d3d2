"""A run's checkpoints on disk: what makes one complete, finding the newest, committing, pruning. Imports no torch.

RUN/checkpoints/
  step_000200/          complete: it got this name when everything below was on disk
    manifest.json       size and sha256 of each other file, step, position in the data, configuration, versions
    .metadata           where each tensor is (torch.distributed.checkpoint)
    __0_0.distcp …      the tensors, a file a rank
  step_000400.tmp/      being saved or deleted, or left by a kill: never read; the next start removes it
  step_000300.corrupt/  had the name of a complete one, but its files are not those of its manifest
  latest                a link to the newest, for people; nothing here reads it
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

FORMAT = 1  # of the manifest; another number is refused
MANIFEST = "manifest.json"
_HASHES = "hashes_{rank}.json"  # what each rank wrote, until the manifest holds it


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or read; the message is for the user."""


def checkpoints_dir(run_dir: str | os.PathLike) -> Path:
    return Path(run_dir) / "checkpoints"


def checkpoint_name(step: int) -> str:
    return f"step_{step:06d}"


def step_of(folder: Path) -> int:
    """The step in the name of a complete checkpoint's folder."""
    return int(folder.name.removeprefix("step_"))


def complete(run_dir: str | os.PathLike) -> list[Path]:
    """The folders that have the name of a complete checkpoint, newest first."""
    folder = checkpoints_dir(run_dir)
    found = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d+", path.name)] if folder.is_dir() else []
    return sorted(found, key=step_of, reverse=True)


# --- reading ---


def read_manifest(folder: Path) -> dict:
    """The manifest of a complete checkpoint. Raises CheckpointError, with the reason alone, where it cannot be trusted:
    missing, cut short, changed since it was written, another format or another step."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"it has no {MANIFEST}") from None
    except ValueError:
        raise CheckpointError(f"{MANIFEST} is not readable") from None
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != _digest(manifest):
        raise CheckpointError(f"{MANIFEST} has changed since it was written")
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"it has format {manifest['format']}, this version reads {FORMAT}")
    if manifest["step"] != step_of(folder):
        raise CheckpointError(f"it is of step {manifest['step']}, not of the one in its name")
    return manifest


def flaw(folder: Path, manifest: dict, names: Iterable[str] | None = None, *, hashes: bool = True) -> str | None:
    """What is wrong with the checkpoint's files (those in `names`; None = all), or None: missing, another size or, with
    `hashes`, other content than the manifest says."""
    for name in sorted(manifest["files"] if names is None else names):
        expected, path = manifest["files"][name], folder / name
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size:,} bytes, {expected['bytes']:,} were written"
            if hashes and sha256(path) != expected["sha256"]:
                return f"{name} is not what was written (sha256)"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return None


def newest(run_dir: str | os.PathLike) -> tuple[Path, dict] | None:
    """The newest checkpoint whose manifest can be trusted and whose files have the right sizes, and the manifest. Fast:
    hashes are compared by the ranks, before they load."""
    for folder in complete(run_dir):
        try:
            manifest = read_manifest(folder)
        except CheckpointError:
            continue
        if flaw(folder, manifest, hashes=False) is None:
            return folder, manifest
    return None


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- writing ---


def record_files(folder: Path, rank: int, names: Iterable[str]) -> None:
    """Leave size and hash of the files that this rank has written where `collect_files` finds them."""
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)} for name in names}
    (folder / _HASHES.format(rank=rank)).write_text(json.dumps(files))


def collect_files(folder: Path) -> dict[str, dict]:
    """What all ranks have recorded, and removes the records."""
    files: dict[str, dict] = {}
    for path in sorted(folder.glob(_HASHES.format(rank="*"))):
        files |= json.loads(path.read_text())
        path.unlink()
    return files


def commit(folder: Path, manifest: dict) -> Path:
    """Turn step_N.tmp, whose files are on disk, into the complete checkpoint step_N; returns its folder.

    manifest: `step`, `files` and what else there is to say. A kill at any moment leaves either no step_N or all of it.
    A step_N that is there already makes way first.
    """
    full = manifest | {"format": FORMAT}
    with open(folder / MANIFEST, "w") as file:
        json.dump(full | {"sha256": _digest(full)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(folder)
    final = folder.with_name(checkpoint_name(manifest["step"]))
    if final.exists():
        remove(final)
    folder.rename(final)
    _sync_folder(final.parent)
    point_latest(final)
    return final


def point_latest(folder: Path) -> None:
    """Make the link `latest` beside `folder` point at it, in one move. Where a copy of the run has made a folder of it,
    that stays as it is."""
    link = folder.with_name("latest")
    if link.is_dir() and not link.is_symlink():
        return
    partial = folder.with_name("latest.tmp")
    partial.unlink(missing_ok=True)
    partial.symlink_to(folder.name)
    os.replace(partial, link)


def prune(run_dir: str | os.PathLike, keep: int) -> None:
    """Delete all complete checkpoints but the newest `keep` (at least one)."""
    for folder in complete(run_dir)[max(1, keep) :]:
        remove(folder)


def remove(folder: Path) -> None:
    """Delete a checkpoint: renamed first, so that a kill in between leaves nothing that looks complete."""
    doomed = folder.with_name(f"{folder.name}.deleted.tmp")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def discard(folder: Path) -> None:
    """Delete what a failed save has left, so that a full disk is not left full."""
    shutil.rmtree(folder, ignore_errors=True)


def set_aside(folder: Path) -> Path:
    """Rename a flawed checkpoint, so that it is neither read nor counted again; nothing is deleted."""
    aside = folder.with_name(f"{folder.name}.corrupt")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    return aside


def clear_unfinished(run_dir: str | os.PathLike) -> None:
    """Remove what kills have left behind; nothing may be saving or deleting at this time."""
    for path in checkpoints_dir(run_dir).glob("*.tmp"):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)


def room_message(run_dir: str | os.PathLike, needed: int) -> str | None:
    """What to say when the disk has no room for `needed` more bytes; None when it has."""
    folder = checkpoints_dir(run_dir)
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return None
    return f"a checkpoint takes {needed:,} bytes and the disk of {checkpoints_dir(run_dir)} has {free:,} free"


def _digest(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sync_folder(folder: Path) -> None:
    """Put the folder's entries on disk (fsync(2): a file's own fsync does not)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
