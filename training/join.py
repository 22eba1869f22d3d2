"""Under torchrun (or any starter that sets RANK) the ranks are there already: they agree on rank 0's folder and train.

Every rank composes and checks the same configuration; only rank 0 makes folders and prints.
"""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from training.launch import REPOSITORY, agree_on_folder, own_attempt

# rank 0 may tokenise a large corpus first, and the others' file systems may be slower than its own
AGREE_TIMEOUT = timedelta(minutes=30)
FAREWELL = timedelta(seconds=10)


def joined_rank() -> int | None:
    """This process' rank when it was started as one of many, None when train.py starts the ranks."""
    present = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    return int(os.environ["RANK"]) if present else None


def check_world(num_ranks: int) -> None:
    """Raises ValueError when the starter's number of processes is not the one that the layout needs."""
    world = int(os.environ["WORLD_SIZE"])
    if world != num_ranks:
        raise ValueError(
            f"this layout needs {num_ranks} processes and {world} were started: torchrun's --nproc-per-node times "
            f"--nnodes must be {num_ranks} = parallel.stages x parallel.data x parallel.tensor, or change these"
        )


def on_several_machines() -> bool:
    """Whether the ranks that were started are not all on this machine."""
    return joined_rank() is not None and os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]


def compose_without_folder() -> DictConfig:
    """The configuration as typed, as Hydra's main composes it on rank 0, but nothing is made or logged."""
    from hydra import compose, initialize_config_dir
    from hydra._internal.utils import get_args_parser

    arguments = get_args_parser().parse_args()
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        return compose(arguments.config_name or "config", overrides=arguments.overrides)


def announce_folder(run_dir: Path) -> None:
    """Rank 0: tell the others where the run's folder is."""
    agree_on_folder(_store(), 0, str(run_dir))


def announce_refusal() -> None:
    """Rank 0: tell the others that nothing will run, and wait a little until they know (it may host the store)."""
    store = _store()
    agree_on_folder(store, 0, "")
    with suppress(Exception):
        store.wait([f"told_{rank}" for rank in range(1, int(os.environ["WORLD_SIZE"]))], FAREWELL)


def hear_folder(rank: int) -> str:
    """Another rank: the folder that rank 0 chose, "" when it refused."""
    store = _store()
    run_dir = agree_on_folder(store, rank, None)
    store.set(f"told_{rank}", "")
    return run_dir


def train(run_dir: str | Path) -> None:
    """Be the rank that the environment says, in this process."""
    from training import worker

    worker.main(str(run_dir))


def _store() -> Any:
    """The key-value store that the starter, or rank 0, keeps at MASTER_ADDR:MASTER_PORT."""
    import torch.distributed as dist

    store, _, _ = next(dist.rendezvous("env://", timeout=AGREE_TIMEOUT))
    _kept.append(store)  # it lives in rank 0 when there is no agent: as long as the process
    return own_attempt(store)


_kept: list[Any] = []
