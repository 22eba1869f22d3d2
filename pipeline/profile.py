"""Measured time of F, B, I and W of each kind of layer, what it keeps and sends, and the file that holds it.

The file and its key need no torch; measuring does (`measure_layer`, run by training/measure.py in a child process).
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

REPEATS = (5, 30)  # at least, at most
TIMES = ("forward_s", "backward_s", "backward_input_s", "backward_weight_s")
BUDGET_S = 0.6  # of one kind of layer, after the least number of repeats


@dataclass(frozen=True)
class LayerProfile:
    """One kind of layer, one micro-batch. Times are medians over `repeats`, in seconds.

    The head's times include the loss. Gradients are added to existing ones, as in all but the first micro-batch.
    """

    layers: list[str]  # names of all layers of this kind: measured once, on the first
    forward_s: float
    backward_s: float  # B: whole
    backward_input_s: float  # I
    backward_weight_s: float  # W
    spread: dict[str, float]  # of each of the four: (third - first quartile) / median
    repeats: int
    kept_bytes: int  # from F until B: what autograd saves, parameters and output not counted
    output_bytes: int
    parameters: int
    forward_flops: int  # matrix products, counted on the meta device
    backward_flops: int

    @property
    def total_s(self) -> float:
        """F + B: what the layer takes a rank for one micro-batch."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Profile:
    """All kinds of layers of one model on one machine. `key`: what the figures hold for (training/measure.py)."""

    key: dict[str, Any]
    kinds: list[LayerProfile]

    def times(self, names: list[str], *, splits_backward: bool = False) -> list[float]:
        """Seconds of each layer for one micro-batch: F + B, or F + I + W where the schedule splits the backward.

        ValueError when a layer is not in the profile.
        """
        seconds = {}
        for kind in self.kinds:
            split = kind.forward_s + kind.backward_input_s + kind.backward_weight_s
            seconds |= dict.fromkeys(kind.layers, split if splits_backward else kind.total_s)
        missing = [name for name in names if name not in seconds]
        if missing or len(seconds) != len(names):
            raise ValueError(f"the profile has {len(seconds)} layers, not the {len(names)} of the model")
        return [seconds[name] for name in names]

    def save(self, path: Path) -> None:
        """Whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n")
        os.replace(partial, path)

    @classmethod
    def load(cls, path: Path) -> Profile:
        """ValueError when the file is no profile, OSError when it is not there."""
        try:
            values = json.loads(path.read_text())
            return cls(values["key"], [LayerProfile(**kind) for kind in values["kinds"]])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no profile: {error}") from None

    def table(self) -> str:
        """For people: one line a kind of layer; ± is half the spread between the quartiles."""
        lines = ["layer              number     F ms        B ms        I ms        W ms      kept MiB  GFLOP/s"]
        for kind in self.kinds:
            cells = [f"{1e3 * getattr(kind, name):8.3f} ±{50 * kind.spread[name]:2.0f}%" for name in TIMES]
            rate = (kind.forward_flops + kind.backward_flops) / kind.total_s / 1e9
            name = kind.layers[0] if len(kind.layers) == 1 else f"{kind.layers[0]} ..."
            lines.append(f"{name:18} {len(kind.layers):6} {''.join(cells)} {kind.kept_bytes / 2**20:9.2f} {rate:8.1f}")
        return "\n".join(lines)


# --- measuring ---


def measure_layer(
    names: list[str],
    run: Callable[[Tensor], Tensor],
    parameters: list[nn.Parameter],
    make_input: Callable[[], Tensor],
    on_meta: nn.Module,
) -> LayerProfile:
    """Times one layer as a stage of its own.

    run: the layer, and after the last one the loss; make_input: a new input of one micro-batch, requiring a gradient
    where it is not the first layer's. on_meta: the layer on the meta device, where its FLOPs are counted (torch does
    not see fused attention on CPU).
    """
    runs = _Runs(run, make_input, parameters)
    for _ in range(2):  # warm-up; gradients exist from here on
        runs.whole()
        runs.split()
    seconds: dict[str, list[float]] = {
        "forward_s": [],
        "backward_s": [],
        "backward_input_s": [],
        "backward_weight_s": [],
    }
    begin = time.perf_counter()
    while len(seconds["backward_s"]) < REPEATS[0] or (
        time.perf_counter() - begin < BUDGET_S and len(seconds["backward_s"]) < REPEATS[1]
    ):
        for measured in (runs.whole(), runs.split()):
            for name, value in measured.items():
                seconds[name].append(value)
    kept, output = _bytes(run, make_input, parameters)
    forward_flops, backward_flops = _flops(on_meta, make_input)
    return LayerProfile(
        layers=list(names),
        **{name: statistics.median(values) for name, values in seconds.items()},
        spread={name: _spread(values) for name, values in seconds.items()},
        repeats=len(seconds["backward_s"]),
        kept_bytes=kept,
        output_bytes=output,
        parameters=sum(parameter.numel() for parameter in parameters),
        forward_flops=forward_flops,
        backward_flops=backward_flops,
    )


def _spread(values: list[float]) -> float:
    first, median, third = statistics.quantiles(values, n=4)
    return (third - first) / median if median else 0.0


class _Runs:
    """One micro-batch through the layer, with the whole backward and with the split one."""

    def __init__(self, run: Callable[[Tensor], Tensor], make_input: Callable[[], Tensor], parameters: list):
        self.run, self.make_input, self.parameters = run, make_input, parameters

    def _forward(self) -> tuple[Tensor, Tensor, Tensor | None, float]:
        import torch

        x = self.make_input()
        begin = _now(x)
        y = self.run(x)
        seconds = _now(x) - begin
        return x, y, torch.ones_like(y) if y.dim() else None, seconds

    def whole(self) -> dict[str, float]:
        import torch

        x, y, gradient, forward = self._forward()
        begin = _now(x)
        torch.autograd.backward(y, gradient)
        return {"forward_s": forward, "backward_s": _now(x) - begin}

    def split(self) -> dict[str, float]:
        """As torch's runtime does it: the first layer, whose input takes no gradient, does everything in W."""
        import torch

        from pipeline.engines.torch_runtime import backward_input, backward_weight

        x, y, gradient, forward = self._forward()
        if not x.requires_grad:
            begin = _now(x)
            torch.autograd.backward(y, gradient)
            return {"forward_s": forward, "backward_input_s": 0.0, "backward_weight_s": _now(x) - begin}
        begin = _now(x)
        groups = backward_input(y, gradient, x, self.parameters)
        middle = _now(x)
        backward_weight(self.parameters, groups)
        return {"forward_s": forward, "backward_input_s": middle - begin, "backward_weight_s": _now(x) - middle}


def _now(x: Tensor) -> float:
    """Seconds, when the device is done with all that it was given."""
    if x.device.type == "cuda":
        import torch

        torch.cuda.synchronize(x.device)
    return time.perf_counter()


def _bytes(run: Callable[[Tensor], Tensor], make_input: Callable[[], Tensor], parameters: list) -> tuple[int, int]:
    """Bytes kept for the backward, the input among them, parameters and output not; and those of the output."""
    import torch

    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    saved: dict[int, Any] = {}  # the tensors are kept alive, so that no address comes twice

    def pack(tensor: Tensor) -> Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    x = make_input()
    pack(x)  # recomputation keeps it out of autograd's sight
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = run(x)
    skipped = own | {y.untyped_storage().data_ptr()}
    kept = sum(t.untyped_storage().nbytes() for pointer, t in saved.items() if pointer not in skipped)
    return kept, y.numel() * y.element_size()


def _flops(module: nn.Module, make_input: Callable[[], Tensor]) -> tuple[int, int]:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    x = make_input()
    x = torch.empty_like(x, device="meta", requires_grad=x.requires_grad)
    with FlopCounterMode(display=False) as forward:
        y = module(x)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.backward(y, torch.empty_like(y))
    return forward.get_total_flops(), backward.get_total_flops()
