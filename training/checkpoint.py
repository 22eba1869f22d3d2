"""Saving and loading a run's state under canonical names, so that any layout can go on from what any other has saved.

State is what arithmetic cannot give back: parameters and the optimizer's tensors ("optimizer.NAME.exp_avg"), a tied
weight once, by its owner's name. Data order, dropout and learning rate follow from (seed, step). Each rank saves the
names that it holds and loads the names that it needs (torch.distributed.checkpoint); training/manifest.py says what
makes a checkpoint complete.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
import warnings
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from conf.schema import to_dict
from models.describe import describe
from planning.memory import machine_memory_bytes
from training import manifest
from training.manifest import CheckpointError
from training.record import versions
from training.shards import Reader, Target, Writer, cause, state_bytes, state_of

log = logging.getLogger("training")

PROOF_SEQUENCES = 4  # held-out sequences whose loss a checkpoint holds
# largest relative difference between that loss and the one that another layout computes from the same weights: sums in
# another order; bfloat16 also has 8 bits of mantissa
TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 2e-2}
GROUP_TIMEOUT = timedelta(hours=2)  # a rank with little to write waits for the slowest disk
STAGING_RESERVE_BYTES = 2**30  # of memory that a copy of the state leaves free


@dataclass
class Position:
    """Where in its run a model is."""

    step: int = 0  # optimizer steps done
    skipped: int = 0  # of these, how many changed nothing (train.nonfinite=skip)
    validated: bool = True  # the validation that is due after this step, if any, is recorded


class Checkpoints:
    """Saves and restores one run's trainer; every rank calls each method together with the others."""

    def __init__(self, trainer, run_dir: str | os.PathLike, source: str | os.PathLike | None = None):
        """source: the folder of the run to start from while `run_dir` has no checkpoint of its own."""
        self.trainer, self.run_dir, self.source = trainer, Path(run_dir), source and Path(source)
        self.ranks = trainer.ranks
        self.every, self.keep = trainer.config.train.checkpoint_every, trainer.config.train.keep_checkpoints
        # a group of its own: a save in the background must not meet the training's messages
        self.group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT) if dist.is_initialized() else None
        self._future: Future | None = None
        self._stager: DefaultStager | None = None  # keeps its buffers for the next save
        self._saving, self._begun = self.run_dir, 0.0  # the folder of the save under way, and when it began
        self.stalls: list[float] = []  # seconds that training stood still, a save
        self.bytes = 0  # of the state, all ranks
        self.saved_step: int | None = None

    def due(self, step: int) -> bool:
        return bool(self.every) and step % self.every == 0

    # --- saving ---

    def save(self, position: Position, *, wait: bool) -> None:
        """Save what follows from `position.step` steps; in the background unless `wait` or memory for a copy is short.

        Raises CheckpointError, also for an earlier save in the background that failed.
        """
        if not self.every:
            return
        begin = time.perf_counter()
        self.wait()  # never two at once
        if position.step == self.saved_step:
            return
        proof = self.trainer.held_out_loss(self._proof_sequences())
        state = state_of(self.trainer.engine.parameters, self.trainer.engine.tied, self.trainer.optimizer)
        self.ranks.works("saving a checkpoint")
        self._check_room(state)
        folder = manifest.checkpoints_dir(self.run_dir) / f"{manifest.checkpoint_name(position.step)}.tmp"
        writer = Writer(folder, self._facts(position, proof), self.keep)
        arguments = {
            "storage_writer": writer,
            "planner": DefaultSavePlanner(flatten_state_dict=False),
            **self._distributed(),
        }
        self._saving, self._begun = folder, time.perf_counter()
        try:
            background = not wait and self._stage_fits(state)
            if background:
                self._stager = self._stager or _make_stager()
                self._future = dcp.async_save(state, async_stager=self._stager, **arguments)
            else:
                dcp.save(state, **arguments)
        except (CheckpointException, OSError) as error:  # a victim of another rank's death stays what it is
            raise self._failed(error) from error
        finally:
            self.stalls.append(time.perf_counter() - begin)
            self.ranks.works("the step")
        self.saved_step = position.step
        if not background:
            self._said()

    def poll(self) -> None:
        """Look after a save in the background. Raises CheckpointError when it has failed."""
        if self._future is not None and self._future.done():
            self.wait()

    def wait(self) -> None:
        """Until nothing is being saved. Raises CheckpointError when it has failed."""
        if self._future is None:
            return
        future, self._future = self._future, None
        self.ranks.works("waiting for a checkpoint to be written")
        try:
            future.result()
        except (CheckpointException, OSError) as error:
            raise self._failed(error) from error
        finally:
            self.ranks.works("the step")
        self._said()

    def figures(self) -> dict | None:
        """For result.json: the newest checkpoint, bytes of a state, seconds that a save held training up (median)."""
        if not self.stalls:
            return None
        return {"step": self.saved_step, "state_bytes": self.bytes, "stall_s": statistics.median(self.stalls)}

    def _said(self) -> None:
        seconds = time.perf_counter() - self._begun
        log.info("saved %s in %.2f s, training stood %.2f s", self._saving.stem, seconds, self.stalls[-1])

    def _failed(self, error: Exception) -> CheckpointError:
        left = manifest.complete(self.run_dir)
        older = f"{left[0].name} is complete" if left else "there is no older one"
        if self.ranks.rank == 0:
            manifest.discard(self._saving)
        return CheckpointError(f"{self._saving.stem} was not saved: {cause(error)}; {older}")

    def _facts(self, position: Position, proof: float) -> dict:
        config = self.trainer.config
        if self.ranks.rank != 0:
            return {"rank": self.ranks.rank}
        layers = describe(config.model)
        return {
            "rank": 0,
            **asdict(position),
            "consumed_samples": position.step * config.train.global_batch,
            "consumed_tokens": position.step * self.trainer.tokens_per_step,
            "proof": {"sequences": self._proof_sequences(), "loss": str(proof), "precision": config.train.precision},
            "corpus": self.trainer.corpus.to_dict(),
            "parameters": {name: list(shape) for layer in layers for name, shape in layer.parameters.items()},
            "tied": self.trainer.engine.tied,
            "world": self.ranks.world,
            "versions": versions(),
            "config": to_dict(config),
        }

    def _check_room(self, state: dict[str, Tensor]) -> None:
        self.bytes = int(self.ranks.sum([float(state_bytes(state, self.trainer.place))])[0])
        message = manifest.room_message(self.run_dir, self.bytes) if self.ranks.rank == 0 else None
        if self.ranks.sum([float(message is not None)])[0]:
            left = manifest.complete(self.run_dir)
            older = f"; {left[0].name} is complete" if left else ""
            raise CheckpointError(f"{message or 'rank 0 found no room for a checkpoint'}{older}")

    def _stage_fits(self, state: dict[str, Tensor]) -> bool:
        """Whether every machine has memory for a copy of its ranks' state; where a copy exists, it is used again."""
        if self._stager is not None:
            return True
        size = state_bytes(state)
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks.world))
        short = size * local + STAGING_RESERVE_BYTES > machine_memory_bytes()
        if self.ranks.sum([float(short)])[0]:
            log.warning("no memory for a copy of the state (%.1f GiB): saving holds training up", size / 2**30)
            return False
        return True

    def _proof_sequences(self) -> int:
        return min(PROOF_SEQUENCES, self.trainer.batches.num_validation)

    def _distributed(self) -> dict:
        if self.group is None:
            # torch says so at every call
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        return {"process_group": self.group, "no_dist": self.group is None}

    # --- restoring ---

    def restore(self, *, weights_only: bool = False) -> Position:
        """Bring parameters and optimizer to the newest checkpoint that is whole; position 0 where there is none at all.

        One that is not whole is named, set aside and passed over. Nothing is loaded before every file of it was found
        to be what was written. Raises CheckpointError when there are checkpoints and none is whole, or when the loss
        of the held-out batch is not the one that was saved. weights_only: without the optimizer's state, on whatever
        data; the loss is not compared.
        """
        self.ranks.works("looking for a checkpoint")
        folders = self._agree_on_candidates()
        for folder in folders:
            facts, reason = self._examine(folder)
            if reason is None:
                self._load(folder, weights_only)
                if not weights_only:
                    self._prove(folder, facts)
                return Position(facts["step"], facts["skipped"], facts["validated"])
            self._pass_over(folder, reason)
        if folders:
            raise CheckpointError(f"no checkpoint in {folders[0].parent} is whole; what is wrong with each is above")
        return Position()

    def _agree_on_candidates(self) -> list[Path]:
        folders = []
        if self.ranks.rank == 0:
            manifest.clear_unfinished(self.run_dir)
            folders = manifest.complete(self.run_dir)
            if not folders and self.source is not None:
                folders = manifest.complete(self.source)
        if self.group is None:
            return folders
        holder = [folders]
        dist.broadcast_object_list(holder, src=0, group=self.group)
        return holder[0]

    def _examine(self, folder: Path) -> tuple[dict, str | None]:
        """The manifest, and what is wrong with the checkpoint; the files are shared out over the ranks for hashing."""
        facts, reason = {}, None
        try:
            facts = manifest.read_manifest(folder)
            own = sorted(facts["files"])[self.ranks.rank :: self.ranks.world]
            reason = manifest.flaw(folder, facts, own)
        except CheckpointError as error:
            reason = str(error)
        if self.group is None:
            return facts, reason
        reasons: list = [None] * self.ranks.world
        dist.all_gather_object(reasons, reason, group=self.group)
        return facts, next((reason for reason in reasons if reason is not None), None)

    def _pass_over(self, folder: Path, reason: str) -> None:
        if self.ranks.rank == 0:
            where = folder
            if folder.parent == manifest.checkpoints_dir(self.run_dir):
                where = manifest.set_aside(folder)
            text = f"{folder.name} is not whole: {reason}; passed over ({where})"
            log.warning(text)
            print(text, flush=True)

    def _load(self, folder: Path, weights_only: bool) -> None:
        reader = Reader(folder)
        target = Target(self.trainer, reader.read_metadata(), weights_only=weights_only)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            dcp.load(target.state, storage_reader=reader, planner=planner, **self._distributed())
        except CheckpointException as error:
            raise CheckpointError(f"{folder}: {cause(error)}") from error
        target.finish()
        if folder.parent == manifest.checkpoints_dir(self.run_dir):
            self.saved_step = manifest.step_of(folder)
            if self.ranks.rank == 0:
                manifest.point_latest(folder)

    def _prove(self, folder: Path, facts: dict) -> None:
        """The loss of the held-out batch at the loaded weights must be the one that was saved."""
        saved, sequences = float(facts["proof"]["loss"]), facts["proof"]["sequences"]
        found = self.trainer.held_out_loss(sequences)
        precisions = {self.trainer.config.train.precision, facts["proof"]["precision"]}
        tolerance = max(TOLERANCE[precision] for precision in precisions)
        difference = 0.0 if found == saved or (found != found and saved != saved) else abs(found - saved) / abs(saved)
        text = (
            f"from {folder}: the loss of {sequences} held-out sequences is {found:.8g}, {saved:.8g} when it was saved: "
            f"relative difference {difference:.1e}, at most {tolerance:g}"
        )
        if not difference <= tolerance:
            raise CheckpointError(f"{text}: this is not the model that was saved")
        log.info("resumed %s", text)
        if self.ranks.rank == 0:
            print(f"resumed {text}", flush=True)


def _make_stager() -> DefaultStager:
    cuda = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=cuda
        )
    )
