"""What this machine has: the accelerators that torch sees, asked in a child process, and the cores it may use."""

from __future__ import annotations

import ctypes
import glob
import importlib.metadata
import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

CACHE = Path(__file__).parent.parent / ".cache" / "device.json"
LARGE_BYTES = 16 * 2**20  # tensors on a processor from this size on have memory pages of their own

# Runs in a child, since importing torch takes seconds and the parent of the ranks must never touch the accelerator.
ASK_TORCH = """
import json, torch
found = {"kind": "cpu"}
if torch.cuda.is_available():
    p = torch.cuda.get_device_properties(0)
    found = {"kind": "cuda", "name": p.name, "count": torch.cuda.device_count(), "memory_bytes": p.total_memory,
             "bfloat16": p.major >= 8}
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Device:
    """The kind of device that a run on this machine gets, and how many of them."""

    kind: str  # cpu | cuda
    name: str = ""  # as the driver calls it
    count: int = 0  # accelerators
    memory_bytes: int = 0  # of one accelerator
    bfloat16: bool = False  # its matrix units take bfloat16 (compute capability 8.0 and later)


@cache
def find_device() -> Device:
    """The accelerators of this machine, or Device("cpu"). Told at once without /dev/nvidia*; else torch is asked.

    Its answer is cached until the driver, the devices, torch or CUDA_VISIBLE_DEVICES change.
    """
    nodes = sorted(glob.glob("/dev/nvidia*") + glob.glob("/dev/dxg"))  # dxg: Windows' Linux subsystem
    if not nodes:
        return Device("cpu")
    key = [nodes, _driver(), importlib.metadata.version("torch"), os.environ.get("CUDA_VISIBLE_DEVICES")]
    try:
        stored = json.loads(CACHE.read_text())
        if stored["key"] == key:
            return Device(**stored["device"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # never asked, or a file that is not ours: ask
    child = subprocess.run([sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, timeout=300)
    if child.returncode != 0:
        return Device("cpu")  # not cached: a broken driver may be mended
    device = Device(**json.loads(child.stdout.strip().splitlines()[-1]))
    try:
        CACHE.parent.mkdir(parents=True, exist_ok=True)
        CACHE.write_text(json.dumps({"key": key, "device": asdict(device)}))
    except OSError:
        pass  # a read-only checkout asks each time
    return device


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""


def num_cores() -> int:
    """The processor cores that this process may use: its affinity, cut by a container's quota (cgroup v2)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def memory_bytes() -> int:
    """The machine's memory, cut by a container's limit (cgroup v2)."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))  # "max" = no limit: ValueError
    except (OSError, ValueError):
        return memory


def keep_large_tensors_apart() -> None:
    """glibc's malloc, in this process: tensors of LARGE_BYTES and more get pages of their own. Left alone it takes up
    to 32 MiB from its heap, where the logits of a large vocabulary leave holes of many times their size that nobody can
    predict."""
    with suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, LARGE_BYTES)  # M_MMAP_THRESHOLD, which no longer grows by itself then
        libc.mallopt(
            -1, 4 * LARGE_BYTES
        )  # M_TRIM_THRESHOLD, as large as it would have grown: trimming costs page faults
