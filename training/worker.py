"""What each rank runs: `python -m training.worker RUN_DIR`, started by training.launch (under torchrun by train.py)."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from conf.schema import RootConfig, from_dict
from training import failure, held_out, launch, resume
from training.bigram import bigram_loss
from training.checkpoint import Checkpoints
from training.data import Batches, Corpus
from training.loop import Trainer, train
from training.outcome import read_plan
from training.ranks import Ranks, start
from training.record import Recorder
from training.watch import Board, Watchdog

log = logging.getLogger("training")

WATCHDOG_FIRST_S = 30.0  # torch gives up this much later than the watchdog, which says why


def main(run_dir: str | None) -> None:
    """Trains as the rank that the environment says (RANK, WORLD_SIZE, ...).

    `run_dir` holds resolved.json and corpus.json; None on a rank that joins and is told the folder by rank 0.
    An exception leaves logs/rank_K.error.json and ends the process with code 1.
    """
    stop = launch.StopFlag()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    store = None
    if world > 1:
        store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(minutes=5)))
        store = launch.own_attempt(store)
        run_dir = launch.agree_on_folder(store, rank, run_dir)
    with launch.guard(run_dir, rank):
        _log_to_file(Path(run_dir), rank)
        if rank == 0:
            _say_restart(Path(run_dir), world)
        config = from_dict(json.loads(Path(run_dir, "resolved.json").read_text()))
        corpus = json.loads(Path(run_dir, "corpus.json").read_text())
        corpus = corpus and Corpus.from_dict(corpus)
        if world == 1 and config.parallel.engine == "torch":
            store = dist.HashStore()  # torch's stages want a group, also of one
        timeout_s = config.train.stall_timeout_s
        if config.emulate.enabled:
            from training import emulate

            timeout_s = emulate.stall_timeout_s(config, Path(run_dir), says=rank == 0)
        device = "cpu" if config.emulate.enabled else config.hardware.device
        ranks = start(device, store, rank, world, timeout_s + WATCHDOG_FIRST_S)
        if world > 1:
            ranks.board = Board(Path(run_dir), rank)
            Watchdog(ranks.board, Path(run_dir), world, timeout_s, lambda error: launch.end(run_dir, rank, error))
        try:
            if config.emulate.enabled:
                emulate.run(config, Path(run_dir), ranks, stop)
            elif config.evaluate is not None:
                held_out.run(config, corpus, Path(run_dir), ranks, lambda: stop.requested)
            else:
                _run(config, corpus, Path(run_dir), ranks, stop)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _run(config: RootConfig, corpus: Corpus, run_dir: Path, ranks: Ranks, stop: launch.StopFlag) -> None:
    torch.manual_seed(config.train.seed)  # nothing here draws from it; what a library draws is then the same each run
    trainer = Trainer(config, ranks, corpus, lambda: stop.requested)
    try:
        checkpoints = Checkpoints(trainer, run_dir, resume.read_source(run_dir))
        start = checkpoints.restore()
        recorder = Recorder(run_dir, config, start.step) if ranks.rank == 0 else None
        result = train(trainer, recorder, checkpoints, start)
        if ranks.rank == 0:
            result["split"] = read_plan(run_dir)["split"]
            result |= _against_bigram(config, corpus, result)
            recorder.finish(result.pop("status"), result)
    finally:
        trainer.engine.close()


def _say_restart(run_dir: Path, world: int) -> None:
    """When launch()'s agent has started the ranks again: what ended them, which must not be taken for the end of this
    attempt. The other ranks wait in `start` for this one. (Under torchrun the ranks that failed have said it.)"""
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt and launch.PARENT_PID in os.environ:
        cause = failure.cause_of_restart(run_dir, world)
        failure.clear(run_dir)
        text = f"{cause}: restart {attempt} of {os.environ.get('TORCHELASTIC_MAX_RESTARTS', '?')}"
        log.warning(text)
        print(text, flush=True)


def _against_bigram(config: RootConfig, corpus: Corpus, result: dict) -> dict:
    """A count model fitted on the same training tokens, printed below the trained one's validation."""
    if "validation_loss" not in result:
        return {}
    bigram = bigram_loss(corpus, config.train.sequence, config.train.validate_sequences)
    if bigram is not None:
        verdict = "beaten" if result["validation_loss"] < bigram else "not beaten yet"
        text = f"bigram counts, same tokens: {bigram:.4f} nats a token"
        batches = Batches(corpus, config.train.sequence, config.train.seed)
        bytes_per_token = batches.bytes_per_token(config.train.validate_sequences)
        if bytes_per_token is not None:
            text += f", {bigram / math.log(2) / bytes_per_token:.4f} bits per byte"
        print(f"{text}: {verdict}", flush=True)
    if corpus.entropy_floor is not None:
        print(f"entropy floor of the data:  {corpus.entropy_floor:.4f} nats a token", flush=True)
    return {} if bigram is None else {"bigram_loss": bigram}


def _log_to_file(run_dir: Path, rank: int) -> None:
    """Rank K logs to logs/rank_K.log; warnings also reach the terminal."""
    folder = run_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / f"rank_{rank}.log")
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


if __name__ == "__main__":
    launch.die_with_parent()
    main(sys.argv[1])
