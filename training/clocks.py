"""How far apart the clocks of ranks are: one clock on one machine, an estimate between machines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

ROUNDS = 16  # messages there and back; the fastest counts


@dataclass(frozen=True)
class Offsets:
    """Of each rank's `time.perf_counter` against rank 0's; seconds, one entry a rank.

    shared: all ranks run on one machine, whose processes have one clock: then nothing is applied, and the estimate is
    a check of the method. uncertainty_s: half the fastest round trip; the true offset is within it.
    """

    shared: bool
    applied_s: list[float]  # what a rank's times are too large by
    estimated_s: list[float]
    uncertainty_s: list[float]

    def to_dict(self) -> dict:
        return asdict(self)


def align(
    group: dist.ProcessGroup,
    members: list[int],
    rank: int,
    *,
    now: Callable[[], float] = time.perf_counter,
    machine: str | None = None,
) -> Offsets | None:
    """Asks every rank for its time, from the first of `members` (global ranks, in order), which gets the answer; the
    others get one that says only whether the clock is shared. All of them call it.

    As NTP does: offset = their time - the middle of the round trip, the shortest of `ROUNDS` (RFC 5905, section 8).
    machine: what tells machines apart; None = found out.
    """
    machines: list = [None] * len(members)
    dist.all_gather_object(machines, machine or _machine(), group=group)
    shared = len(set(machines)) == 1
    time_there = torch.zeros(1, dtype=torch.float64)
    if rank != members[0]:
        for _ in range(ROUNDS):
            dist.recv(time_there, members[0], group=group)
            time_there[0] = now()
            dist.send(time_there, members[0], group=group)
        return Offsets(shared, [], [], [])
    estimated, uncertainty = [0.0], [0.0]
    for other in members[1:]:
        trips = []
        for _ in range(ROUNDS):
            asked = now()
            dist.send(time_there, other, group=group)
            dist.recv(time_there, other, group=group)
            answered = now()
            trips.append((answered - asked, float(time_there) - (asked + answered) / 2))
        shortest, offset = min(trips)
        estimated.append(offset)
        uncertainty.append(shortest / 2)
    applied = [0.0] * len(members) if shared else estimated
    return Offsets(shared, applied, estimated, uncertainty)


def _machine() -> str:
    """The same for processes that have one monotonic clock: the kernel's boot, and the time namespace."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/time")
    except OSError:  # not Linux, or an old one: every rank counts as a machine of its own
        return f"{os.uname().nodename} {os.getpid()}"
