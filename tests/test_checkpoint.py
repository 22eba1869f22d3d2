"""Checkpoints on disk: complete or not there, found out when damaged, never half loaded; disks that are full."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import resuming
import torch
from resuming import STEPS, assert_same_state

from training import manifest, shards
from training.checkpoint import Checkpoints, Position
from training.loop import Trainer
from training.manifest import CheckpointError
from training.ranks import Ranks

SAVED = (2, 4, 6, 8)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return resuming.corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory) -> Path:
    """A run with checkpoints of SAVED and of the end."""
    folder = tmp_path_factory.mktemp("finished")
    resuming.run(0, 1, corpus, folder, [(_config(), None)])
    return folder


@pytest.fixture
def run_dir(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))


def _config(**overrides):
    return resuming.config(engine="single", **{"every": 2, "keep": 9} | overrides)


def _restored(corpus, run_dir: Path, config=None) -> tuple[Position, dict[str, np.ndarray], Checkpoints]:
    trainer = Trainer(config or _config(), Ranks(0, 1, 0, torch.device("cpu")), corpus, lambda: False)
    checkpoints = Checkpoints(trainer, run_dir)
    position = checkpoints.restore()
    state = shards.state_of(trainer.engine.parameters, trainer.engine.tied, trainer.optimizer)
    return position, {name: tensor.numpy().copy() for name, tensor in state.items()}, checkpoints


def _names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


# --- what is saved ---


def test_what_a_checkpoint_says(run_dir):
    folder = manifest.complete(run_dir)[0]
    facts = manifest.read_manifest(folder)
    assert (facts["step"], facts["consumed_samples"]) == (STEPS, STEPS * 16)
    assert facts["config"]["train"]["seed"] == 3 and facts["corpus"]["tokenizer"] == "byte"
    assert set(facts["files"]) == {path.name for path in folder.iterdir()} - {"manifest.json"}
    assert "torch" in facts["versions"] and facts["parameters"]["norm.weight"] == [16]
    assert os.readlink(run_dir / "checkpoints" / "latest") == folder.name


def test_size_on_disk_is_weights_and_states(run_dir, corpus):
    _, state, checkpoints = _restored(corpus, run_dir)
    values = sum(array.nbytes for array in state.values())
    names = set(checkpoints.trainer.engine.parameters) - set(checkpoints.trainer.engine.tied)
    assert len(state) == len(names) * 4  # with exp_avg, exp_avg_sq and step; a tied weight once
    on_disk = sum(path.stat().st_size for path in manifest.complete(run_dir)[0].glob("*.distcp"))
    assert values < on_disk < values + shards.ENTRY_BYTES * len(state)


def test_the_newest_are_kept(corpus, tmp_path):
    resuming.run(0, 1, corpus, tmp_path, [(_config(keep=2), None)])
    assert _names(tmp_path) == ["latest", "step_000008", "step_000009"]


def test_no_checkpoints_at_all(corpus, tmp_path):
    config = _config()
    resuming.run(0, 1, corpus, tmp_path, [(replace(config, train=replace(config.train, checkpoint_every=0)), None)])
    assert list(tmp_path.iterdir()) == []
    assert _restored(corpus, tmp_path)[0].step == 0


# --- damaged ones ---


def _shard(folder: Path) -> Path:
    return next(folder.glob("*.distcp"))


def _flip(path: Path, at: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * len(content))] ^= 1
    path.write_bytes(content)


def _truncate(folder: Path) -> None:
    os.truncate(_shard(folder), _shard(folder).stat().st_size - 1)


def _edit_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"consumed_samples": 144', '"consumed_samples": 128'))


DAMAGE = {
    "truncated": (_truncate, "__0_0.distcp has"),
    "a flipped byte": (lambda folder: _flip(_shard(folder), 0.5), "__0_0.distcp is not what was written"),
    "a flipped byte in .metadata": (lambda folder: _flip(folder / ".metadata", 0.5), ".metadata is not what was"),
    "a shard missing": (lambda folder: _shard(folder).unlink(), "__0_0.distcp: No such file"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "it has no manifest.json"),
    "half a manifest": (lambda folder: os.truncate(folder / "manifest.json", 100), "manifest.json is not readable"),
    "another manifest": (_edit_manifest, "manifest.json has changed"),
    "another step": (lambda folder: _replace_by_older(folder), "it is of step 8"),
}


def _replace_by_older(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("step_000008"), folder)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_one_is_named_and_the_one_before_is_taken(damage, run_dir, corpus, capsys):
    do, reason = DAMAGE[damage]
    do(run_dir / "checkpoints" / "step_000009")
    position, state, _ = _restored(corpus, run_dir)
    assert (position.step, position.validated) == (8, True)
    told = capsys.readouterr().out
    assert f"step_000009 is not whole: {reason}" in told and "passed over" in told
    assert "step_000009.corrupt" in _names(run_dir) and os.readlink(run_dir / "checkpoints/latest") == "step_000008"
    manifest.remove(run_dir / "checkpoints" / "step_000008")
    assert _restored(corpus, run_dir)[0].step == 6


def test_two_damaged_ones(run_dir, corpus, capsys):
    _truncate(run_dir / "checkpoints" / "step_000009")
    _flip(_shard(run_dir / "checkpoints" / "step_000008"), 0.9)
    assert _restored(corpus, run_dir)[0].step == 6
    assert capsys.readouterr().out.count("passed over") == 2


def test_none_is_whole(run_dir, corpus):
    for folder in manifest.complete(run_dir):
        _truncate(folder)
    with pytest.raises(CheckpointError, match="no checkpoint in .* is whole"):
        _restored(corpus, run_dir)


def test_what_a_kill_leaves_is_never_read(run_dir, corpus):
    folder = run_dir / "checkpoints"
    shutil.copytree(folder / "step_000009", folder / "step_000010.tmp")  # all there but the last rename
    (folder / "step_000009").rename(folder / "step_000009.deleted.tmp")  # while deleting
    (folder / "latest.tmp").symlink_to("step_000010")
    assert _restored(corpus, run_dir)[0].step == 8
    assert not list(folder.glob("*.tmp"))


def test_a_run_goes_on_over_a_damaged_checkpoint(run_dir, finished, corpus):
    """The steps after the one before are made again, and what they end in is the same."""
    _truncate(run_dir / "checkpoints" / "step_000009")
    _, state = resuming.run(0, 1, corpus, run_dir, [(_config(), None)])
    assert_same_state(_restored(corpus, run_dir)[1], _restored(corpus, finished)[1])
    assert manifest.newest(run_dir)[0].name == "step_000009"


# --- another model ---


def test_another_models_weights_are_refused_before_anything_is_loaded(run_dir, corpus):
    config = _config()
    wider = replace(config, model=replace(config.model, feedforward=32))
    with pytest.raises(CheckpointError, match=r"block.0.feedforward.up.weight is \[32, 16\] .* and \[64, 16\]"):
        _restored(corpus, run_dir, wider)


def test_weights_that_are_not_the_saved_ones_do_not_pass_the_proof(run_dir, corpus, monkeypatch):
    """A load that went wrong unseen: one vector of the last norm is off by a hundredth."""

    def spoil(target):
        target.state["norm.bias"].add_(0.01)

    monkeypatch.setattr(shards.Target, "finish", spoil)
    with pytest.raises(CheckpointError, match="this is not the model that was saved"):
        _restored(corpus, run_dir)


# --- saving that fails ---


def _saves_again(corpus, run_dir: Path, *, wait: bool) -> Checkpoints:
    _, _, checkpoints = _restored(corpus, run_dir)
    checkpoints.save(Position(20), wait=wait)
    checkpoints.wait()
    return checkpoints


@pytest.mark.parametrize("wait", [True, False], ids=["now", "in the background"])
def test_a_disk_that_fills_up(wait, run_dir, corpus, monkeypatch):
    before = _names(run_dir)

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="step_000020 was not saved: rank 0: the disk is full; step_000009 is"):
        _saves_again(corpus, run_dir, wait=wait)
    assert _names(run_dir) == before and manifest.newest(run_dir)[0].name == "step_000009"


def test_room_is_looked_at_first(run_dir, corpus, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 1234))
    with pytest.raises(CheckpointError, match=r"a checkpoint takes [\d,]+ bytes .* has 1,234 free; step_000009 is"):
        _saves_again(corpus, run_dir, wait=True)
    assert "step_000020.tmp" not in _names(run_dir)


def test_without_memory_for_a_copy_saving_waits(run_dir, corpus, monkeypatch, caplog):
    monkeypatch.setattr("training.checkpoint.machine_memory_bytes", lambda: 10**6)
    _, _, checkpoints = _restored(corpus, run_dir)
    checkpoints.save(Position(20), wait=False)
    assert manifest.newest(run_dir)[0].name == "step_000020"  # on disk already
    assert "no memory for a copy" in caplog.text


# --- trust ---


class _Evil:
    def __reduce__(self):
        return os.system, ("true",)


def test_metadata_that_would_run_something_is_refused(run_dir):
    folder = manifest.complete(run_dir)[0]
    shards.Reader(folder).read_metadata()  # its own is read
    (folder / ".metadata").write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(pickle.UnpicklingError, match="system, which no checkpoint"):
        shards.Reader(folder).read_metadata()


def test_the_manifest_is_plain_json(run_dir):
    assert isinstance(json.loads((manifest.complete(run_dir)[0] / "manifest.json").read_text()), dict)
