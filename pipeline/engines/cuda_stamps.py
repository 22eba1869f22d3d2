"""Time stamps on CUDA: events in the stream, so that nothing waits for the device until the step is over.

Written for GPUs, and not yet run on one.
"""

from __future__ import annotations

import time

import torch

from pipeline.engines.clock import Stamps


class CudaStamps(Stamps):
    """Moments as the device's current stream comes to them. A receive makes the stream wait, so the time between two
    events before and after it is the device's idle time, whatever the host does meanwhile."""

    def begin(self) -> None:
        self._base = torch.cuda.Event(enable_timing=True)
        self._base.record()
        self._base.synchronize()  # once a step: the device's clock and the host's meet here
        self._base_s = time.perf_counter()

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, stamp: torch.cuda.Event) -> float:
        stamp.synchronize()
        return self._base_s + self._base.elapsed_time(stamp) / 1e3
