"""How fast one rank computes: matrix products with an efficiency by size, element-wise work by bytes. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from conf.schema import HardwareConfig
from models.describe import DTYPE_BYTES


@dataclass(frozen=True)
class Rates:
    """One rank's device. A roofline (Williams et al. 2009): the slower of arithmetic and memory, after a launch."""

    flops: float  # peak, FLOP/s, in the precision of the products
    bytes_per_s: float  # peak memory bandwidth
    matmul_efficiency: float  # part of the peak that a large product reaches
    matmul_half_size: float  # a dimension of this size costs half the efficiency
    memory_efficiency: float  # part of the bandwidth that element-wise kernels reach
    kernel_latency_s: float  # start of one kernel
    element_bytes: int  # of the products' operands
    exponentials_per_s: float = inf  # exp, tanh, erf; inf: hidden behind the memory traffic, as on accelerators

    def matmul_s(self, rows: float, inner: float, columns: float, batch: float = 1) -> float:
        """Seconds of `batch` products [rows, inner] x [inner, columns].

        Efficiency falls with small dimensions, since a tile's start and end are not full: each counts n / (n + half).
        """
        half = self.matmul_half_size
        curve = inner / (inner + half) * (rows / (rows + half)) * (columns / (columns + half))
        arithmetic = 2 * batch * rows * inner * columns / (self.flops * self.matmul_efficiency * curve)
        moved = batch * (rows * inner + inner * columns + rows * columns) * self.element_bytes
        return max(arithmetic, moved / self._bandwidth) + self.kernel_latency_s

    def pass_s(self, moved_bytes: float, kernels: int = 1) -> float:
        """Seconds of element-wise work that reads and writes so many bytes in all."""
        return moved_bytes / self._bandwidth + kernels * self.kernel_latency_s

    def exponentials_s(self, number: float) -> float:
        """Seconds of an element-wise kernel that takes so many exponentials; 0 where they are hidden."""
        seconds = number / self.exponentials_per_s
        return seconds + self.kernel_latency_s if seconds else 0.0

    def stream_s(self, moved_bytes: float, kernels: int = 1) -> float:
        """Seconds of element-wise work on tensors that no cache holds: the weights with all that belongs to them."""
        bandwidth = self.bytes_per_s * min(1.0, self.memory_efficiency)
        return moved_bytes / bandwidth + kernels * self.kernel_latency_s

    @property
    def _bandwidth(self) -> float:
        return self.bytes_per_s * self.memory_efficiency


def figure(hardware: HardwareConfig, key: str, needed_by: str) -> float:
    """A figure of the hardware file. ValueError, naming it and what needs it, where it is null."""
    value = getattr(hardware, key)
    if value is None:
        raise ValueError(
            f"hardware={hardware.name} has no {key}, which {needed_by} needs: give hardware.{key}=…, or take another "
            "hardware file"
        )
    return value


def rates(hardware: HardwareConfig, precision: str, ranks_here: int = 1) -> Rates:
    """The rates of one rank. ranks_here: ranks of this run on one machine; on CPU they share its cores and memory."""
    kind = "bfloat16" if precision == "bfloat16" else "float32"
    flops = figure(hardware, f"peak_flops_{kind}", f"train.precision={precision}")
    cores = 1.0  # that one rank has
    if hardware.device == "cpu":
        here = int(figure(hardware, "devices_per_node", "a plan"))
        cores = max(1, here // ranks_here) * min(1, here / ranks_here)
        if cores > 1 and hardware.thread_efficiency is not None:
            cores = max(1, cores * hardware.thread_efficiency)
    if precision == "float64":
        flops /= 2
    return Rates(
        flops * cores,
        figure(hardware, "memory_bytes_per_s", "a plan") * cores,
        *(figure(hardware, key, "a plan") for key in ("matmul_efficiency", "matmul_half_size", "memory_efficiency")),
        kernel_latency_s=figure(hardware, "kernel_latency_s", "a plan"),
        element_bytes=DTYPE_BYTES[precision],
        exponentials_per_s=inf if hardware.exponentials_per_s is None else hardware.exponentials_per_s * cores,
    )
