"""`Pipe(layers, balance=…, devices=…, chunks=…, checkpoint=…)`: a pipelined module in a plain training loop."""

from __future__ import annotations

import atexit
import warnings
import weakref
from collections.abc import Iterable

import torch
from torch import nn

with warnings.catch_warnings():
    # fairscale's last release is of 2022: it meets newer torch's deprecations while it is imported
    warnings.simplefilter("ignore")
    import fairscale.nn
    from fairscale.nn.pipe.worker import join_workers

CHECKPOINT_MODES = ("never", "except_last", "always")


class Pipe(fairscale.nn.Pipe):
    """A list of layers cut into stages that work on micro-batches one after the other (fill and drain).

    Forward splits the batch (dimension 0) into `chunks` micro-batches and sends them through the stages; backward runs
    through the same pipeline in reverse, so `output = pipe(input); loss(output).backward()` is all a loop needs.
    This is fairscale's `Pipe` (the GPipe schedule, arXiv 1811.06965; fairscale.readthedocs.io) with what its users
    miss: plain lists are taken, the default balance is even, CPU works, and it can be closed. A pipe that is still
    open when Python ends would hang the process for ever, so it is closed then.

    Args:
        layers: modules in order, an `nn.Sequential` or a list; each takes and gives one tensor or a tuple of tensors.
        balance: layers of each stage; default: as even as possible over `devices`.
        devices: one device for each stage; default: every CUDA device, or one CPU stage for each entry of `balance`.
            Stages on the same device (all CPU stages) do not overlap: they share one worker.
        chunks: micro-batches of a batch.
        checkpoint: which micro-batches recompute their activations: "never", "except_last" or "always".

    Raises:
        ValueError: a balance that does not sum to the layers or has a zero, chunks < 1, an unknown checkpoint mode.
    """

    def __init__(
        self,
        layers: nn.Sequential | Iterable[nn.Module],
        balance: list[int] | None = None,
        *,
        devices: list[torch.device | str | int] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
    ) -> None:
        module = layers if isinstance(layers, nn.Sequential) else nn.Sequential(*layers)
        if devices is None:
            count = torch.cuda.device_count()
            wanted = len(balance) if balance is not None else max(count, 1)
            if count and wanted > count:
                raise ValueError(f"balance={balance} asks for {wanted} stages, but there are {count} CUDA devices")
            devices = list(range(wanted)) if count else ["cpu"] * wanted
        if balance is None:
            each, extra = divmod(len(module), len(devices))
            balance = [each + (stage < extra) for stage in range(len(devices))]
        _check(list(balance), len(module), len(devices), chunks, checkpoint)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fairscale says of itself that it is deprecated
            super().__init__(module, list(balance), devices=devices, chunks=chunks, checkpoint=checkpoint)
        _open.add(self)

    def close(self) -> None:
        """Ends the worker threads; the parameters stay, a further forward raises. May be called twice."""
        pipeline = self.pipeline
        if pipeline.in_queues:
            join_workers(pipeline.in_queues, pipeline.out_queues)
            pipeline.in_queues, pipeline.out_queues = [], []  # fairscale's own __del__ then has nothing to wait for

    def forward(self, input):
        """Output of the last stage for the whole batch; shapes are those of the unpipelined layers."""
        if not self.pipeline.in_queues:
            raise RuntimeError("this Pipe is closed")
        return super().forward(input)

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *_) -> None:
        self.close()


_open: weakref.WeakSet[Pipe] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pipe in list(_open):
        pipe.close()


def _check(balance: list[int], num_layers: int, num_devices: int, chunks: int, checkpoint: str) -> None:
    if len(balance) != num_devices:
        raise ValueError(f"balance={balance} has {len(balance)} stages, but {num_devices} devices are given")
    if sum(balance) != num_layers or min(balance, default=0) < 1:
        raise ValueError(
            f"balance={balance} must be {len(balance)} numbers of at least 1 that sum to the {num_layers} layers"
        )
    if chunks < 1:
        raise ValueError(f"chunks={chunks}: at least 1")
    if checkpoint not in CHECKPOINT_MODES:
        raise ValueError(f"checkpoint={checkpoint!r} is unknown; known: {', '.join(CHECKPOINT_MODES)}")
