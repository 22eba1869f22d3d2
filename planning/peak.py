"""The most that a rank's tensors hold at once: its actions walked through in order, backwards layer by layer. No torch.

What it rests on, seen with torch 2.13 by tracking every storage of a step (tests/test_memtracker.py holds it to that):

- The first backward of a stage makes its gradients; later ones make each matrix' gradient once more, to be added.
- A backward frees a layer's activations when it is done with it, so the worst moment is at one layer of the stage.
- What a stage sent to another rank, outputs and gradients, is kept until the flush ends; buffers of what it receives
  always. On its own rank what is passed on takes the place of a buffer.
- I frees nothing and keeps the gradient of every product's output until W. A recomputed unit is recomputed for I, and
  in W once for each of its matrices, all but one of these copies kept until W ends. The first stage, whose input takes
  no gradient, does nothing in I and a whole backward in W.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import ceil, inf, prod

from conf.device import LARGE_BYTES
from conf.schema import RootConfig
from models.describe import DTYPE_BYTES, LayerSpec, feedforward_width, key_value_width
from pipeline.action import Action
from planning.activations import tensor_elements
from planning.memory import (
    RUNTIME_BYTES,
    elements,
    layer_bytes,
    micro_batch,
    recomputed_units,
    states,
)

EVERY = (0, inf)  # sizes of tensors
# On CPU: code and tables of libraries at their first use in a step (torch 2.13 with MKL; 18 MiB of it pages of files)
FIRST_USE_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Live:
    """Bytes, by what they are for."""

    gradients: float = 0
    activations: float = 0
    logits: float = 0  # and what the loss makes of them
    messages: float = 0
    workspace: float = 0  # temporary tensors

    def __add__(self, other: Live) -> Live:
        return Live(*(mine + its for mine, its in zip(self._bytes, other._bytes, strict=True)))

    def __neg__(self) -> Live:
        return Live(*(-mine for mine in self._bytes))

    @property
    def total(self) -> float:
        return sum(self._bytes)

    @property
    def _bytes(self) -> tuple[float, ...]:
        return self.gradients, self.activations, self.logits, self.messages, self.workspace


def peak_memory(
    config: RootConfig, stages: dict[int, list[LayerSpec]], actions: Iterable[Action], last_stage: int
) -> dict[str, int]:
    """Bytes of one rank at its peak, by what they are for, with their `total`.

    Arguments as `peak`. weights, gradients, optimizer: both copies of a tied weight count, on whichever ranks they are.
    gradients: of stages whose first backward is over at that moment. activations: kept for the backward. logits: with
    what the loss makes of them. messages: what stages receive and have sent. workspace: temporary tensors. allocator:
    what malloc and libraries take beside all tensors. runtime: the process itself, without its model.
    """
    layers, actions = [spec for specs in stages.values() for spec in specs], list(actions)
    live = peak(config, stages, actions, last_stage)
    parts = states(config, layers)
    parts["gradients"] = ceil(live.gradients * parts["gradients"] / (_weight(config) * elements(config, layers)))
    for name in ("activations", "logits", "messages", "workspace"):
        parts[name] = ceil(getattr(live, name))
    parts |= {"allocator": ceil(_allocator(config, stages, actions, last_stage, live)), "runtime": RUNTIME_BYTES}
    return parts | {"total": sum(parts.values())}


def _allocator(
    config: RootConfig, stages: dict[int, list[LayerSpec]], actions: list[Action], last_stage: int, live: Live
) -> float:
    """On CPU, what the process holds beside its tensors (glibc 2.36's malloc as conf/device.py sets it).

    Small tensors are in a heap, which gives nothing back while something lies above it: it stays as large as it ever
    was. Large ones have pages of their own, which come and go. So both have their fullest moments at once, whenever
    these were. Besides, libraries at their first use, and holes between tensors of many sizes: these were 0.3 to 4
    times the activations of one micro-batch; 1 is within 7 % of the whole in benchmarks/planner/memory.csv.
    """
    if config.hardware.device != "cpu":
        return 0
    pools = (peak(config, stages, actions, last_stage, sizes).total for sizes in ((0, LARGE_BYTES), (LARGE_BYTES, inf)))
    holes = sum(layer_bytes(config, spec) for specs in stages.values() for spec in specs)
    return FIRST_USE_BYTES + max(0, sum(pools) - live.total) + holes


def peak(
    config: RootConfig,
    stages: dict[int, list[LayerSpec]],
    actions: Iterable[Action],
    last_stage: int,
    sizes: tuple[float, float] = EVERY,
) -> Live:
    """The fullest moment of a flush after the first step, weights and optimizer's state apart.

    config: resolved. stages: model stage -> its layers, those of one rank; actions: of that rank, in order. last_stage:
    the number of the one with the head. sizes: only tensors of at least so many bytes, and fewer than that, count.
    """
    own_of = {i: _Stage(config, specs, i, last_stage, set(stages), sizes) for i, specs in stages.items()}
    now = Live(messages=sum(own.buffers for own in own_of.values()))
    worst, started = now, set()
    for stage, kind, microbatch in actions:
        own = own_of[stage]
        plain = own.checkpoint == "never" or (
            own.checkpoint == "except_last" and microbatch == config.parallel.chunks - 1
        )
        kept = own.kept(plain)
        first = stage not in started and kind != "I"
        if kind == "F":
            now += kept + Live(messages=own.output)
        elif kind == "I" and stage == 0:
            continue
        elif kind == "I":
            worst = max(worst, now + own.split_input(plain), key=lambda live: live.total)
            now += own.between + Live(messages=own.input_gradient)
        else:
            kind = "B" if stage == 0 else kind
            moments = own.backward(plain, first) if kind == "B" else own.split_weight(plain, first)
            worst = max(worst, *(now + moment for moment in moments), key=lambda live: live.total)
            now += -kept + (Live(gradients=own.gradients) if first else Live())
            now += Live(messages=own.input_gradient) if kind == "B" else -own.between
            started.add(stage)
        worst = max(worst, now, key=lambda live: live.total)
    return max(worst, now + Live(workspace=_tied(config, stages, sizes)), key=lambda live: live.total)


def _tied(config: RootConfig, stages: dict[int, list[LayerSpec]], sizes: tuple[float, float]) -> float:
    """After the flush the other end's gradient of the tied weight comes in, as large as the weight."""
    ends = {spec.kind for specs in stages.values() for spec in specs} & {"embedding", "head"}
    if not config.model.tied or config.parallel.engine != "torch" or len(ends) != 1:
        return 0
    received = config.model.vocabulary * config.model.hidden * _weight(config) / config.parallel.tensor
    return received if sizes[0] <= received < sizes[1] else 0


def _weight(config: RootConfig) -> int:
    return 8 if config.train.precision == "float64" else 4  # bfloat16 is autocast: float32 weights and gradients


class _Stage:
    """One model stage's bytes for one micro-batch."""

    def __init__(
        self,
        config: RootConfig,
        specs: list[LayerSpec],
        index: int,
        last: int,
        here: set[int],
        sizes: tuple[float, float],
    ):
        model, parallel, train = config.model, config.parallel, config.train
        self.config, self.specs, self.sizes = config, specs, sizes
        self.checkpoint = "never" if parallel.checkpoint == "selective" else parallel.checkpoint
        self.recomputed = recomputed_units(parallel, specs) if self.checkpoint != "never" else []
        weight, t = _weight(config), parallel.tensor
        tokens = micro_batch(config) * train.sequence
        stream = tokens * model.hidden * weight / (t if parallel.sequence_parallel else 1)
        self.stream = self._counted(stream)  # [B, T, D]
        self.whole_inner = tokens * feedforward_width(model) * DTYPE_BYTES[train.precision] / t  # [B, T, F]
        self.inner = self._counted(self.whole_inner)
        self.gradients = sum(map(self._gradients, specs))
        logits = tokens * model.vocabulary / t if specs[-1].kind == "head" else 0
        self.losses = self._counted(weight * logits)  # log-probabilities: in float32 at least
        held = self._counted(DTYPE_BYTES[train.precision] * logits) if parallel.engine == "torch" else 0
        self.logits = self.losses + held
        sends = parallel.engine == "torch"
        receives, passes_on = sends and index > 0, sends and index < last
        self.output = self.stream * (passes_on and index + 1 not in here)
        self.input_gradient = self.stream * (receives and index - 1 not in here)
        validation = min(parallel.chunks, (train.validate_sequences or 0) // max(1, micro_batch(config)))
        self.buffers = self.stream * (receives * (parallel.chunks + validation) + passes_on * parallel.chunks)
        self.input = self.stream * receives  # the first layer's input is one of these buffers
        # most micro-batches are alike: each of these is asked for as many times as there are actions
        self.kept, self.backward = cache(self.kept), cache(self.backward)
        self.split_input, self.split_weight = cache(self.split_input), cache(self.split_weight)

    def kept(self, plain: bool) -> Live:
        """From F until B."""
        units = [] if plain else self.recomputed
        inside = {spec.name for unit in units for spec in unit}
        total = sum(self._layer(spec) for spec in self.specs if spec.name not in inside)
        total += sum(self._layer(unit[0], checkpointed=True) for unit in units)
        return Live(activations=max(0, total - self.input), logits=self.logits)

    def backward(self, plain: bool, first: bool) -> list[Live]:
        """Moments of B, against what is there before it; layer by layer from the last."""
        unit_of = {} if plain else {spec.name: unit for unit in self.recomputed for spec in unit}
        freed, moments = Live(), []
        for spec in reversed(self.specs):
            unit = unit_of.get(spec.name)
            if unit is not None and spec is unit[-1]:  # whole again; its input is there
                again = sum(map(self._layer, unit)) - self._layer(unit[0], checkpointed=True)
                freed += Live(activations=again)
            moments += [freed + moment for moment in self._moments(spec, first)]
            if first:
                freed += Live(gradients=self._gradients(spec))
            freed += Live(activations=-self._layer(spec), logits=-self.logits if spec.kind == "head" else 0)
        return moments

    @property
    def between(self) -> Live:
        """From I until W: the gradient of what every product and norm gave; of the logits, in place of themselves."""
        total = sum(self._outputs(spec) for spec in self.specs)
        return Live(activations=total, logits=self.losses - self.logits if self.logits else 0)

    def split_input(self, plain: bool) -> Live:
        """I: everything is still there; where recomputed, one unit besides, whose own products' gradients come last."""
        units = [] if plain else self.recomputed
        after = sum(self._outputs(spec) for spec in self.specs if not any(spec in unit for unit in units))
        worst = 0.0
        for unit in reversed(units):
            worst = max(worst, after + sum(map(self._layer, unit)))
            after += sum(map(self._outputs, unit))
        streams = (2 if units else 1) + (2 if units and self.logits else 0)  # gradients on their way
        return Live(
            activations=max(worst, after), logits=self.losses if self.logits else 0, workspace=streams * self.stream
        )

    def split_weight(self, plain: bool, first: bool) -> list[Live]:
        """W. Each matrix' gradient runs its whole unit again; of a layer that is done one of these copies goes, and the
        gradients that I left for it."""
        gradients = Live(gradients=self.gradients) if first else Live(workspace=max(map(self._matrix, self.specs)))
        units = [] if plain else self.recomputed
        if not units:
            return [gradients]
        done, worst = 0.0, 0.0
        for spec, together in ((spec, unit) for unit in units for spec in unit):
            copies = sum(len(shape) == 2 for shape in spec.parameters.values())
            whole = sum(map(self._layer, together))
            worst = max(worst, done + copies * whole)
            done += (copies - 1) * whole - self._outputs(spec)
        made = Live(gradients=sum(self._gradients(spec) for unit in units for spec in unit))
        if not first:
            made = Live(workspace=2 * max(self._matrix(spec) for unit in units for spec in unit))
        return [made + Live(activations=worst - 2 * self.stream), gradients + Live(activations=done)]

    def _counted(self, tensor_bytes: float) -> float:
        """The bytes of a tensor that is of the sizes that count, else 0."""
        return tensor_bytes if self.sizes[0] <= tensor_bytes < self.sizes[1] else 0

    def _gradients(self, spec: LayerSpec) -> float:
        weight, t = _weight(self.config), self.config.parallel.tensor
        if self.sizes == EVERY:
            return weight * tensor_elements(spec, t)
        return sum(self._counted(weight * prod(shape) / t) for shape in spec.parameters.values())

    def _layer(self, spec: LayerSpec, checkpointed: bool = False) -> float:
        """Activations: of a block those of the inner width, and all others, as large as its input."""
        total = layer_bytes(self.config, spec, checkpointed)
        if self.sizes == EVERY:
            return total
        inner = 0.0
        if spec.kind == "block" and not checkpointed and self.config.model.family != "mlp":
            inner = self.whole_inner * (3 if self.config.model.family == "llama" else 2)
        return (total - inner) * (self.stream > 0) + inner * (self.inner > 0)

    def _matrix(self, spec: LayerSpec) -> float:
        """Of the largest parameter, which is made whole before it is added; by autocast in 16 bits first."""
        element = _weight(self.config) + (2 if self.config.train.precision == "bfloat16" else 0)
        t = self.config.parallel.tensor
        return max(self._counted(element * prod(shape) / t) for shape in spec.parameters.values())

    def _moments(self, spec: LayerSpec, first: bool) -> list[Live]:
        """The fullest moments of one layer's backward, before anything of it is freed."""
        matrix = Live(gradients=self._matrix(spec)) if first else Live(workspace=self._matrix(spec))
        if spec.kind == "head":
            ends = Live(logits=2 * self.losses)  # gradients of the log-probabilities and of the logits
            return [ends, matrix + Live(workspace=self.stream)]  # one has gone, log-probabilities too
        inner = {"block": self.inner, "norm": self.stream, "embedding": 0}[spec.kind]
        if self.config.model.family == "mlp":
            inner = self.stream
        return [matrix + Live(workspace=inner + self.stream)]

    def _outputs(self, spec: LayerSpec) -> float:
        """Of every product and norm of the layer: that is where I stops and W begins."""
        D, stream = self.config.model.hidden, self.stream
        if spec.kind == "block" and self.config.model.family != "mlp":
            gated = self.config.model.family == "llama"
            products = 2 + (D + 2 * key_value_width(self.config.model)) / D  # projection, down; q, k, v
            return stream * (products + 2) + self.inner * (2 if gated else 1)
        return 0 if spec.kind in ("embedding", "head") else stream
