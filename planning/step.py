"""The time of one optimizer step, and what it goes into: compute, bubble, communication, optimizer. No torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import prod

from conf.checkpointing import forwards_again, splits_backward
from conf.schema import ParallelConfig, RootConfig
from models.describe import LayerSpec, describe, is_hidden_matrix
from pipeline.partition import rank_of_stage, split_stages
from pipeline.placement import num_ranks, reduces_each
from pipeline.schedule import make_schedule
from planning.layers import Cost, LayerCost, layer_cost
from planning.links import Links, links
from planning.memory import micro_batch
from planning.rates import Rates, rates
from planning.stack import Stack
from planning.steady import Flush, flush

NEWTON_SCHULZ_STEPS = 5  # of torch.optim.Muon
# Times that a parameter's elements are read or written by torch's loops over single tensors (torch 2.13), clipping
# aside. adafactor: three norms of weight and gradient 3, the estimate 1, its division, floor and root 6, the update 3,
# its norm 1, the weight 3. muon, as for a matrix: momentum 3, Nesterov's 3, a bfloat16 copy and its scale 3, decay 2,
# the weight 3.
PASSES = {"adafactor": 17, "muon": 14}


@dataclass(frozen=True)
class StageTimes:
    """Seconds of each model stage for one micro-batch, and of what a stage sends to the next."""

    layers: list[LayerCost]
    recompute: list[Cost]  # forward run again before the backward, or for I
    again: list[Cost]  # and once more, as often as it takes, for W where that is apart (conf/checkpointing.py)
    gather: list[float]  # full sharding: the weights of the stage, once a forward and once a backward
    reduce: list[float]  # its gradients, where data ranks add them up after each micro-batch
    hidden: bool  # whether these run beside the computation, or (on processors) take the same cores
    host: list[float]  # what sharing layers costs the host, in forward and backward together
    action_overhead_s: float
    transfer_s: float
    latency_s: float

    @property
    def forward(self) -> list[float]:
        return [
            self._beside(cost.forward.total, gather) + host / 3 + self.action_overhead_s
            for cost, gather, host in zip(self.layers, self.gather, self.host, strict=True)
        ]

    @property
    def last_input(self) -> list[float]:
        """Backward for the input, nothing recomputed."""
        rows = zip(self.layers, self.gather, self.reduce, self.host, strict=True)
        return [
            self._beside(cost.backward_input.total, gather + reduce) + host * 2 / 3 + self.action_overhead_s
            for cost, gather, reduce, host in rows
        ]

    def _beside(self, compute: float, messages: float) -> float:
        return max(compute, messages) if self.hidden else compute + messages

    @property
    def last_weight(self) -> list[float]:
        """Backward for the weights, nothing recomputed."""
        return [cost.backward_weight.total for cost in self.layers]

    @property
    def backward_input(self) -> list[float]:
        return [i + r.total for i, r in zip(self.last_input, self.recompute, strict=True)]

    @property
    def backward_weight(self) -> list[float]:
        return [w + r.total for w, r in zip(self.last_weight, self.again, strict=True)]

    @property
    def backward(self) -> list[float]:
        """Of both at once."""
        return [i + w for i, w in zip(self.backward_input, self.last_weight, strict=True)]

    def last(self, parallel: ParallelConfig) -> dict[str, list[float]]:
        """What differs for the last micro-batch, under `parallel.checkpoint=except_last`."""
        if parallel.checkpoint != "except_last":
            return {}
        both = [i + w for i, w in zip(self.last_input, self.last_weight, strict=True)]
        return {"backward_input": self.last_input, "backward_weight": self.last_weight, "backward": both}


@dataclass(frozen=True)
class Layout:
    """Which layers every model stage has, and which rank runs it."""

    stages: list[list[LayerSpec]]  # in stage order
    rank_of: list[int]
    kinds: list[Counter[str]]  # of each stage: kind of layer -> how many
    elements: list[int]  # of each stage: of all weights, both copies of a tied one

    @classmethod
    def of(cls, config: RootConfig) -> Layout:
        """config: resolved."""
        by_name = {layer.name: layer for layer in describe(config.model)}
        rank_of = rank_of_stage(config.parallel)
        names = split_stages(config.parallel.balance, len(rank_of), list(by_name))
        stages = [[by_name[name] for name in stage] for stage in names]
        kinds = [Counter(spec.kind for spec in specs) for specs in stages]
        elements = [sum(prod(shape) for spec in specs for shape in spec.parameters.values()) for specs in stages]
        return cls(stages, rank_of, kinds, elements)

    def most_parameters(self, together: bool) -> int:
        """Parameters, as tensors, of the rank that has most; `together`: of all ranks."""
        held = [0] * (max(self.rank_of) + 1)
        for specs, rank in zip(self.stages, self.rank_of, strict=True):
            held[rank] += sum(len(spec.parameters) for spec in specs)
        return sum(held) if together else max(held)

    @property
    def rank_elements(self) -> list[int]:
        held = [0] * (max(self.rank_of) + 1)
        for elements, rank in zip(self.elements, self.rank_of, strict=True):
            held[rank] += elements
        return held


def stage_times(config: RootConfig, layout: Layout, stack: Stack, device: Rates, paths: Links) -> StageTimes:
    """What every model stage takes on its rank. config: resolved."""
    parallel, train = config.parallel, config.train
    one_of = {spec.kind: spec for specs in layout.stages for spec in specs}  # layers of one kind cost the same
    cost_of = {kind: layer_cost(spec, config, stack, device, paths.tensor) for kind, spec in one_of.items()}
    stages, recomputed, gather, reduce, host = [], [], [], [], []
    reruns = forwards_again(config) - 1 if parallel.checkpoint != "never" and splits_backward(parallel) else 0
    for kinds, elements in zip(layout.kinds, layout.elements, strict=True):
        whole, again = LayerCost(Cost(), Cost(), Cost()), Cost()
        for kind, number in kinds.items():
            whole += cost_of[kind] * number
            if parallel.checkpoint == "selective":
                again += cost_of[kind].attention * number
            elif parallel.checkpoint != "never" and (kind == "block" or parallel.engine == "fairscale"):
                again += cost_of[kind].forward * number
        stages.append(whole)
        recomputed.append(again)
        whole_s = paths.data.gather_s(elements / parallel.tensor * weight_bytes(config, stack))
        gather.append(whole_s if parallel.shard == "full" else 0.0)
        reduce.append(whole_s if reduces_each(parallel) else 0.0)
        host.append(kinds["block"] * shared_block_s(config))
    wide = stack.stream_bytes if train.precision == "bfloat16" else device.element_bytes
    message = micro_batch(config) * train.sequence * config.model.hidden * wide
    if stack.split_messages:
        message /= parallel.tensor
    overhead = 0.0  # the others only call a module
    if parallel.engine == "torch":
        measured = config.hardware.action_overhead_s if stack.name == "torch" else None
        overhead = stack.action_overhead_s if measured is None else measured
    again = [again * (reruns if stage else 0) for stage, again in enumerate(recomputed)]  # the first stage has no I
    return StageTimes(
        stages, recomputed, again, gather, reduce, config.hardware.device != "cpu", host, overhead,
        message / paths.stage.bytes_per_s, paths.stage.latency_s,
    )  # fmt: skip


def shared_block_s(config: RootConfig) -> float:
    """Of the host, for forward and backward of a block that ranks share."""
    parallel, hardware = config.parallel, config.hardware
    seconds = hardware.tensor_block_s if parallel.tensor > 1 else 0.0
    if parallel.data > 1:
        own = hardware.sharded_block_s if parallel.shard in ("gradients", "full") else hardware.replicated_block_s
        return (seconds or 0.0) + (own or 0.0)
    return seconds or 0.0


def weight_bytes(config: RootConfig, stack: Stack) -> int:
    """Of an element of the weights as they are sent."""
    return {"float64": 8, "float32": 4, "bfloat16": stack.gradient_bytes}[config.train.precision]


@dataclass(frozen=True)
class Step:
    """One optimizer step; seconds. The parts add up to `total`: work and waiting are means over pipeline ranks."""

    parts: dict[str, float]
    bubble_fraction: float  # of a flush

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def step_time(config: RootConfig, stack: Stack, *, explain: bool = True) -> Step:
    """The step of a resolved configuration, on the very schedule and split that would run.

    explain: tell idle time by its reasons, which takes two more simulations; else it is all in "bubble".
    """
    parallel = config.parallel
    device = rates(config.hardware, config.train.precision, ranks_here=num_ranks(config.parallel))
    paths = links(config.hardware, parallel)
    layout = Layout.of(config)
    times = stage_times(config, layout, stack, device, paths)
    ranks = len(set(layout.rank_of))
    if one_at_a_time(config):
        makespan = parallel.chunks * sum(_busy(times)) - _spared(config, times)
        real = Flush(makespan, [makespan])
        waiting, ranks = {}, 1
    else:
        real = run_flush(parallel, times)
        idle = real.makespan - sum(real.busy) / len(real.busy)
        waiting = _waiting(parallel, times, real) if explain else {"bubble": idle}
    parts = {name: seconds / ranks for name, seconds in _work(config, times).items()} | waiting
    parts = {name: seconds * config.train.accumulate for name, seconds in parts.items()}
    parts |= after_flushes(config, layout, stack, device, paths)
    return Step(parts, real.bubble_fraction)


def one_at_a_time(config: RootConfig) -> bool:
    """Whether the stages never overlap: the single engine, and fairscale on CPU, whose stages share one worker."""
    engine = config.parallel.engine
    return engine == "single" or (engine == "fairscale" and config.hardware.device == "cpu")


def run_flush(parallel: ParallelConfig, times: StageTimes, **changed: float) -> Flush:
    """One flush of the schedule with these times."""
    transfers = dict(latency_s=times.latency_s, transfer_s=times.transfer_s) | changed
    schedule = replace(parallel, schedule="gpipe") if parallel.engine == "fairscale" else parallel
    return flush(
        schedule, times.forward, times.backward_input, times.backward_weight, backward=times.backward,
        last=times.last(parallel), **transfers,
    )  # fmt: skip


def _busy(times: StageTimes) -> list[float]:
    """F + I + W of each model stage for one micro-batch."""
    return [sum(parts) for parts in zip(times.forward, times.backward_input, times.backward_weight, strict=True)]


def _spared(config: RootConfig, times: StageTimes) -> float:
    """What the last micro-batch does not recompute, all stages."""
    return sum(r.total for r in times.recompute) if config.parallel.checkpoint == "except_last" else 0.0


def _waiting(parallel: ParallelConfig, times: StageTimes, real: Flush) -> dict[str, float]:
    """Mean idle time of a flush, by its reason: transfers are what it loses without them; imbalance what it loses when,
    besides, every stage takes the mean (0 where it gains); the schedule has the rest."""
    idle = real.makespan - sum(real.busy) / len(real.busy)
    at_once = run_flush(parallel, times, latency_s=0.0, transfer_s=0.0)

    def mean(seconds: list[float]) -> list[float]:
        return [sum(seconds) / len(seconds)] * len(seconds)

    schedule = replace(parallel, schedule="gpipe") if parallel.engine == "fairscale" else parallel
    kinds = (times.forward, times.backward_input, times.backward_weight)
    last = {name: mean(seconds) for name, seconds in times.last(parallel).items()}
    even = flush(schedule, *map(mean, kinds), backward=mean(times.backward), last=last)
    transfers = real.makespan - at_once.makespan
    left = idle - transfers
    # recomputed, a stage's W may take longer than another's I and W together, and the mean stages work less or more
    imbalance = max(0.0, left - (even.makespan - sum(even.busy) / len(even.busy)))
    return {
        "bubble_schedule": left - imbalance,
        "bubble_imbalance": imbalance,
        "stage_transfers": transfers,
    }


def _work(config: RootConfig, times: StageTimes) -> dict[str, float]:
    """Seconds of all model stages in one flush, by kind."""
    m = config.parallel.chunks
    recomputes = m - 1 if config.parallel.checkpoint == "except_last" else m
    parts = dict.fromkeys(("forward", "backward_input", "backward_weight", "recompute", "tensor_parallel"), 0.0)
    for layer, again in zip(times.layers, times.recompute, strict=True):
        for name in ("forward", "backward_input", "backward_weight"):
            cost = getattr(layer, name)
            parts[name] += m * (cost.matmul + cost.elementwise)
            parts["tensor_parallel"] += m * cost.tensor
        parts["recompute"] += recomputes * (again.matmul + again.elementwise)
        parts["tensor_parallel"] += recomputes * again.tensor
    for number, again in zip(_weights_apart(config, times), times.again, strict=True):
        parts["recompute"] += number * (again.matmul + again.elementwise)
        parts["tensor_parallel"] += number * again.tensor
    parts["host"] = m * (2 * len(times.layers) * times.action_overhead_s + sum(times.host))
    if config.parallel.shard in ("gradients", "full"):
        seconds = m * (sum(times.forward) + sum(times.last_input)) - parts["host"]
        parts["data_gather"] = seconds - m * sum(c.forward.total + c.backward_input.total for c in times.layers)
    return parts


def _weights_apart(config: RootConfig, times: StageTimes) -> list[int]:
    """Of each model stage: micro-batches of a flush whose W is apart and recomputes."""
    number, parallel = [0] * len(times.layers), config.parallel
    if any(cost.total for cost in times.again):
        plain = parallel.chunks - 1 if parallel.checkpoint == "except_last" else None
        schedule = make_schedule(parallel.schedule, parallel.stages, parallel.chunks, parallel.interleave)
        for stage, kind, microbatch in (action for row in schedule.actions for action in row):
            number[stage] += kind == "W" and microbatch != plain
    return number


def after_flushes(config: RootConfig, layout: Layout, stack: Stack, device: Rates, paths: Links) -> dict[str, float]:
    """Data-parallel communication that no computation hides, the sum of a tied weight's two gradients, the update; of
    the rank with most parameters."""
    parallel, model = config.parallel, config.model
    held = layout.rank_elements
    most = (sum(held) if one_at_a_time(config) else max(held)) / parallel.tensor
    element = weight_bytes(config, stack)
    gathered = 0 if parallel.shard == "full" else paths.data.gather_s(most * element)
    reduced = 0.0 if reduces_each(parallel) and config.hardware.device == "cpu" else paths.data.gather_s(most * element)
    reduction = stack.exposed_reduction * (reduced + gathered)
    if parallel.data > 1 and not reduces_each(parallel):
        blocks = [0] * (max(layout.rank_of) + 1)
        for kinds, rank in zip(layout.kinds, layout.rank_of, strict=True):
            blocks[rank] += kinds["block"]
        reduction += max(blocks) * (config.hardware.reduced_block_s or 0.0)
    tied = 0.0
    if model.tied and parallel.stages > 1 and parallel.engine == "torch" and layout.rank_of[0] != layout.rank_of[-1]:
        tied = paths.ends.all_reduce_s(model.vocabulary / parallel.tensor * model.hidden * element)
    parts = parallel.data if parallel.shard != "none" else 1
    kernels = stack.update_kernels * layout.most_parameters(one_at_a_time(config))
    update = device.stream_s(optimizer_bytes(config, stack) * most / parts, kernels)
    if config.optimizer.name == "muon":
        update += newton_schulz_s(config, layout, device)
    return {"data_parallel": reduction, "tied_weight": tied, "optimizer": update}


def newton_schulz_s(config: RootConfig, layout: Layout, device: Rates) -> float:
    """Seconds in which Muon makes the momentum of a rank's matrices orthogonal, of the rank with most of it.

    An [m, n] matrix, m the smaller side, takes the products [m, n] x [n, m], [m, m] x [m, m] and [m, m] x [m, n]:
    4 n m^2 + 2 m^3 FLOPs in each of five steps (https://kellerjordan.github.io/posts/muon/, "Runtime"), in bfloat16.
    """
    if config.hardware.peak_flops_bfloat16:
        device = rates(config.hardware, "bfloat16", ranks_here=num_ranks(config.parallel))
    seconds: dict[str, float] = {}
    for spec in (spec for specs in layout.stages for spec in specs if spec.kind not in seconds):
        sides = [sorted(shape) for name, shape in spec.parameters.items() if is_hidden_matrix(name, shape)]
        products = [(m, n, m) for m, n in sides] + [(m, m, m) for m, _ in sides] + [(m, m, n) for m, n in sides]
        seconds[spec.kind] = NEWTON_SCHULZ_STEPS * sum(device.matmul_s(*product) for product in products)
    held = [0.0] * (max(layout.rank_of) + 1)
    for kinds, rank in zip(layout.kinds, layout.rank_of, strict=True):
        held[rank] += sum(seconds[kind] * number for kind, number in kinds.items())
    return sum(held) if one_at_a_time(config) else max(held)


def optimizer_bytes(config: RootConfig, stack: Stack) -> float:
    """Bytes that the update moves for each parameter, clipping included."""
    element = 8 if config.train.precision == "float64" else 4
    if config.optimizer.name == "sgd":
        return element * (3 + (2 if config.optimizer.momentum else 0) + (3 if config.optimizer.clip_norm else 0))
    if config.optimizer.name in PASSES:
        return element * (PASSES[config.optimizer.name] + (3 if config.optimizer.clip_norm else 0))
    return stack.optimizer_bytes * (2 if element == 8 else 1)
