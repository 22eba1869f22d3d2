"""Runs a function on several gloo ranks for a test: one time limit, no fixed port, no process left behind."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The fork server imports torch once, so that a rank starts in a fraction of a second.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed.pipelining", "models.gpt", "models.mlp", "training.build"])


def run_ranks(function, world: int, *args, timeout_s: float = 120.0) -> list:
    """`function(rank, world, *args)` on `world` processes of one gloo group; their return values in rank order.

    `function` must be importable (module level). Raises AssertionError with the traceback of the first rank that
    failed, or when the limit is over; every process has ended when it returns.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(target=_rank, args=(function, rank, world, folder, theirs, args))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, timeout_s)
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes: list, timeout_s: float) -> list:
    deadline = time.monotonic() + timeout_s
    results: dict[int, object] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = multiprocessing.connection.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        assert ready, f"no answer within {timeout_s} s from ranks {sorted(set(range(len(pipes))) - set(results))}"
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                good, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise AssertionError(f"rank {rank} died without an answer") from None
            assert good, f"rank {rank} failed:\n{value}"
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank(function, rank: int, world: int, folder: str, pipe, args) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        store = dist.FileStore(os.path.join(folder, "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
        try:
            # plain pickle: multiprocessing would hand over tensors by reference to this process, which ends
            pipe.send_bytes(pickle.dumps((True, function(rank, world, *args))))
        finally:
            dist.destroy_process_group()
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
