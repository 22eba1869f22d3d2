"""What can be told to be wrong with an emulated run (`emulate` in conf/schema.py), in one line each."""

from __future__ import annotations

import os
from dataclasses import asdict

from conf.schema import EmulateConfig, RootConfig


def check_emulation(config: RootConfig, *, here: bool = True) -> None:
    """A resolved configuration. Raises ValueError with the numbers and the remedy. here: False for a plan."""
    emulate, parallel = config.emulate, config.parallel
    if not emulate.enabled:
        for key, value in asdict(emulate).items():
            if value != getattr(EmulateConfig(), key):
                raise ValueError(f"emulate.{key}={value} needs emulate.enabled=true, or hardware=emulated_a100_80gb")
        return
    if parallel.engine != "torch":
        raise ValueError(
            f"emulate.enabled=true runs one process a pipeline rank, not parallel.engine={parallel.engine}: "
            "set parallel.engine=torch"
        )
    for key in ("slow_rank", "slow_host"):
        rank = getattr(emulate, key)
        if rank is not None and rank >= parallel.stages:
            raise ValueError(
                f"emulate.{key}={rank} is no rank of parallel.stages={parallel.stages}: use 0 to {parallel.stages - 1}"
            )
    if emulate.slow_link is not None and emulate.slow_link > parallel.stages - 2:
        links = f"use 0 to {parallel.stages - 2}" if parallel.stages > 1 else "one stage has no link"
        raise ValueError(
            f"emulate.slow_link={emulate.slow_link} is no link from a rank of parallel.stages={parallel.stages} to the "
            f"next: {links}"
        )
    if here:
        _check_here(config)


def _check_here(config: RootConfig) -> None:
    if config.parallel.balance == "time":
        raise ValueError(
            "parallel.balance=time would measure this machine's layers, not the emulated hardware's: set "
            "parallel.balance=auto, the planned times"
        )
    if config.resume is not None:
        raise ValueError(f"resume={config.resume}: an emulated run has no checkpoint to go on from; start it again")
    if "RANK" in os.environ:
        raise ValueError("an emulated run stays on one machine, whose clock its ranks share: start it without torchrun")
