"""The training loop: flushes, one optimizer step, what is logged, validation, and every way a run can end."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from conf.schema import RootConfig
from models.describe import describe, model_flops_per_token
from models.dropout import sample_keys
from models.loss import IGNORED
from pipeline.engines.base import Batch, Engine, own_part
from pipeline.placement import pipeline_of, place
from pipeline.spans import DATA, OPTIMIZER, REDUCE
from training import faults, imbalance
from training.ahead import Ahead
from training.build import build_engine, canonical_order, engine_class, make_mesh
from training.checkpoint import Checkpoints, Position
from training.data import Batches, Corpus
from training.optimizer import clip_, global_norm, learning_rate, make_optimizer
from training.progress import Progress
from training.ranks import Ranks
from training.timeline import Tracer


class NonFiniteError(ArithmeticError):
    """A loss or gradient that is nan or infinite, with the step and the rank it was met on."""


@dataclass
class Outcome:
    """What one optimizer step gave, equal on every rank."""

    loss: float | None  # mean over tokens, nats; None, as the next two: an emulated step, which learns nothing
    gradient_norm: float | None  # before clipping
    learning_rate: float | None
    stop: bool  # some rank was asked to stop
    out_of_time: bool
    memory_bytes: list[int]  # peak of each rank
    skipped: bool = False
    cut: bool = False  # an emulated step that was ended before its time: it counts for nothing


@dataclass
class Trainer:
    """Everything one rank needs for its part of the run."""

    config: RootConfig
    ranks: Ranks
    corpus: Corpus
    stop_requested: object  # () -> bool
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        config, ranks = self.config, self.ranks
        engine_class(config.parallel.engine)  # what its library takes is not the model's
        ranks.start_counting_memory()
        self.place = place(ranks.rank, config.parallel)
        mesh = make_mesh(config.parallel, ranks.device.type)
        self.engine: Engine = build_engine(config, rank=ranks.rank, device=ranks.device, mesh=mesh)
        if ranks.board is not None:
            ranks.board.peers = pipeline_of(ranks.rank, config.parallel)
        self.engine.clock.board = ranks.board
        self.watch = imbalance.Watch(config, ranks)
        layers = describe(config.model)
        self.order = canonical_order(layers)
        self.optimizer = make_optimizer(config.optimizer, self.engine.parameters, self.engine.tied)
        self.batches = Batches(self.corpus, config.train.sequence, config.train.seed)
        self.flush = config.train.global_batch // config.train.accumulate  # sequences, of all data ranks
        self._ahead = Ahead(self._read, self._following) if ranks.device.type == "cuda" else None
        self.tokens_per_step = config.train.global_batch * config.train.sequence
        self.flops_per_step = self.tokens_per_step * model_flops_per_token(config.model, config.train.sequence)

    def batch(self, step: int, first: int) -> Batch:
        """This data rank's sequences of the flush that starts at consumed sample `first`; only what this rank's stages
        need. An accelerator's are read ahead."""
        batch = self._read((step, first)) if self._ahead is None else self._ahead.get((step, first))
        tensors = (batch.inputs, batch.targets, batch.keys, batch.documents)
        return Batch(*(self._on_device(tensor) for tensor in tensors))

    def _following(self, key: tuple[int, int]) -> tuple[int, int]:
        """Step and first sample of the flush after this one."""
        first = key[1] + self.flush
        return first // self.config.train.global_batch, first

    def _read(self, key: tuple[int, int]) -> Batch:
        """In memory, whence an accelerator can take it while it computes."""
        step, first = key
        count = self.flush // self.config.parallel.data
        first += self.place.data * count
        needed = {"inputs": self.engine.needs_inputs, "targets": self.engine.needs_targets}
        want = [name for name, needs in needed.items() if needs]
        inputs, targets = self.batches.train(first, count, want)
        documents = None if self.config.data.cross_documents else self.batches.train_documents(first, count)
        keys = None
        if self.config.model.dropout > 0:
            samples = torch.arange(first, first + count)
            keys = sample_keys(self.config.train.seed, step, samples)
        arrays = (inputs, targets, keys, documents)
        tensors = [array if array is None else torch.as_tensor(array) for array in arrays]
        if self.ranks.device.type == "cuda":
            tensors = [tensor if tensor is None else tensor.pin_memory() for tensor in tensors]
        return Batch(*tensors)

    def step(self, step: int) -> Outcome:
        """One optimizer step (from 0): `accumulate` flushes, tied gradients, clipping, update."""
        config, engine = self.config, self.engine
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for index in range(config.train.accumulate):
            first = step * config.train.global_batch + index * self.flush
            with engine.clock.span(DATA, DATA):
                batch = self.batch(step, first)
            loss += engine.step(batch, 1.0 / self.tokens_per_step, last=index == config.train.accumulate - 1).to(loss)
        label = "the sum of a tied weight's gradients"
        with self.ranks.together(label), engine.clock.span(REDUCE, label):
            engine.sum_tied_gradients()
        label = "the gradient norm"
        with self.ranks.together(label), engine.clock.span(REDUCE, label):
            norm = global_norm(engine.parameters, self.order, engine.tied, self._group(), self.place)
        with engine.clock.span(REDUCE, "the step's figures"):
            loss, norm, stop, out_of_time, *memory = self._agree(loss, norm)
        rate = learning_rate(config.optimizer, step, config.train.steps)
        outcome = Outcome(loss, norm, rate, stop > 0, out_of_time > 0, [int(value) for value in memory])
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._nonfinite(step, outcome)
            return outcome
        with engine.clock.span(OPTIMIZER, OPTIMIZER):
            if config.optimizer.clip_norm is not None:
                clip_(engine.parameters, norm, config.optimizer.clip_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        return outcome

    def validate(self) -> float:
        """`held_out_loss` of `train.validate_sequences`, or of as many as there are."""
        return self.held_out_loss(min(self.config.train.validate_sequences, self.batches.num_validation))

    @torch.no_grad()
    def held_out_loss(self, count: int) -> float:
        """Mean loss in nats a token over the first `count` held-out sequences, on every rank."""
        size = -(-count // self.config.parallel.data)  # of each data rank: all take part in each forward
        first = min(self.place.data * size, count - 1)
        inputs, targets = self.batches.validation(first, min(size, count - first))
        documents = None
        if not self.config.data.cross_documents:
            documents = self.batches.validation_documents(first, min(size, count - first))
            documents = np.resize(documents, (size, documents.shape[1]))
        real = min(size, max(0, count - self.place.data * size))
        inputs, targets = (np.resize(array, (size, array.shape[1])) for array in (inputs, targets))
        targets[real:] = IGNORED
        batch = Batch(
            self._tensor(inputs if self.engine.needs_inputs else None),
            self._tensor(targets if self.engine.needs_targets else None),
            documents=self._tensor(documents),
        )
        loss = float(self.engine.evaluate(batch, size))
        (total,) = self.ranks.sum([loss if self.place.tensor == 0 else 0.0])
        return total / (count * self.config.train.sequence)

    def _agree(self, loss: torch.Tensor, norm: torch.Tensor) -> list[float]:
        """The step's one reduction of figures, and the one time that the host waits for an accelerator: the loss (known
        to the last stage alone), the norm (known to all), stop requests, rank 0's clock, memory."""
        limit = self.config.train.max_minutes
        out_of_time = self.ranks.rank == 0 and bool(limit) and time.monotonic() - self.started > 60 * limit
        memory = [0.0] * self.ranks.world
        memory[self.ranks.rank] = float(self.ranks.peak_memory_bytes())
        values = [0.0, 0.0, float(self.stop_requested()), float(out_of_time), *memory]
        figures = torch.tensor(values, dtype=torch.float64).to(self.ranks.device, non_blocking=True)
        if self.place.tensor == 0:  # tensor ranks all have the loss of their data rank's sequences
            figures[0] += loss
        if self.ranks.rank == 0:
            figures[1] += norm
        return self.ranks.sum_of(figures).tolist()

    def _nonfinite(self, step: int, outcome: Outcome) -> None:
        """Names the first parameter with a bad gradient, and its rank; stops unless told to skip."""
        own = [
            index
            for index, name in enumerate(self.order)
            if name in self.engine.parameters and not torch.isfinite(own_part(self.engine.parameters[name].grad)).all()
        ]
        firsts = self.ranks.gather(float(min(own, default=len(self.order))))
        rank = min(range(len(firsts)), key=firsts.__getitem__)
        where = "all gradients are finite"
        if firsts[rank] < len(self.order):
            where = f"first bad gradient: {self.order[int(firsts[rank])]} on rank {rank}"
        outcome.skipped = True
        if self.config.train.nonfinite != "skip":
            raise NonFiniteError(
                f"step {step + 1}: loss {outcome.loss}, gradient norm {outcome.gradient_norm} ({where}). "
                f"Lower optimizer.learning_rate or raise optimizer.warmup_steps; train.nonfinite=skip skips such steps"
            )

    def _group(self):
        return torch.distributed.group.WORLD if self.ranks.world > 1 else None

    def _on_device(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(self.ranks.device, non_blocking=True)

    def _tensor(self, array) -> torch.Tensor | None:
        return None if array is None else self._on_device(torch.from_numpy(array))


def train(trainer: Trainer, recorder, checkpoints: Checkpoints, start: Position) -> dict:
    """Runs from `start` to the last step, a stop signal or the time limit; the checkpoints that are due are saved.

    Args:
        recorder: `training.record.Recorder` on rank 0, None on the others.

    Returns:
        On every rank: `status`, why it ended, and what result.json has that metrics.jsonl does not.

    Raises NonFiniteError; whatever a rank meets.
    """
    config, ranks = trainer.config, trainer.ranks
    progress = _progress(config, start) if ranks.rank == 0 else None
    done, skipped, reason, validated = start.step, start.skipped, None, {}
    if not start.validated and _validation_due(config, done):
        validated = _validate(trainer, recorder, progress, done)
    with Tracer(config, trainer.engine, ranks, recorder, start.step) as tracer:
        while done < config.train.steps:
            begin = time.perf_counter()
            trainer.engine.clock.begin()
            faults.before_step(config.fault, ranks.rank, done + 1, checkpoints.run_dir)
            outcome = trainer.step(done)
            reason = "signal" if outcome.stop else "max_minutes" if outcome.out_of_time else None
            if outcome.cut:
                break
            seconds = time.perf_counter() - begin
            measured = trainer.engine.clock.end()
            trainer.watch.after_step(measured.timings)
            done, skipped = done + 1, skipped + outcome.skipped
            spent = tracer.after_step(done, measured)
            if progress is not None:
                recorder.step(_metrics(trainer, done, outcome, seconds, skipped) | spent)
                progress.step(done, outcome.loss, outcome.learning_rate, trainer.tokens_per_step / seconds, seconds)
            if reason is not None:
                break
            if _validation_due(config, done):
                validated = _validate(trainer, recorder, progress, done)
            if checkpoints.due(done) and done < config.train.steps:
                checkpoints.save(Position(done, skipped), wait=False)
            checkpoints.poll()
    if progress is not None:
        progress.close()
    checkpoints.save(Position(done, skipped, validated=False), wait=True)
    if reason != "signal":
        validated = _validate(trainer, recorder, progress, done)
    note = tracer.close()
    found = trainer.watch.report()
    if found is not None:
        progress.say(imbalance.sentence(found))
    return {
        "status": "completed" if reason is None else "stopped",
        "reason": reason,
        "steps": done,
        "skipped_steps": skipped or None,
        "imbalance": found,
        "bubble_note": note,
        "checkpoint": checkpoints.figures(),
        "peak_resident_bytes": [int(value) for value in ranks.gather(ranks.peak_resident_bytes())],
        **validated,
    }


def _progress(config: RootConfig, start: Position) -> Progress:
    scale = config.emulate.time_scale if config.emulate.enabled else None
    return Progress(config.train.steps, config.train.log_every, first=start.step, time_scale=scale)


def _validation_due(config: RootConfig, step: int) -> bool:
    every = config.train.validate_every
    return bool(every) and step % every == 0 and step < config.train.steps


def _validate(trainer: Trainer, recorder, progress: Progress | None, step: int) -> dict:
    loss = trainer.validate()
    if loss is None:  # there is nothing to validate (training.emulate)
        return {}
    figures, text = {"validation_loss": loss}, f"validation after step {step}: {loss:.4f} nats a token"
    bytes_per_token = trainer.batches.bytes_per_token(trainer.config.train.validate_sequences)
    if bytes_per_token is not None:
        figures["bits_per_byte"] = loss / math.log(2) / bytes_per_token
        text += f", {figures['bits_per_byte']:.4f} bits per byte"
    if progress is not None:
        recorder.validation(step, figures)
        progress.say(text)
    return figures


def _metrics(trainer: Trainer, done: int, outcome: Outcome, seconds: float, skipped: int) -> dict:
    config = trainer.config
    metrics = {
        "step": done,
        "loss": outcome.loss,
        "learning_rate": outcome.learning_rate,
        "gradient_norm": outcome.gradient_norm,
        "step_time_s": seconds,
        "tokens_per_s": trainer.tokens_per_step / seconds,
        "consumed_samples": done * config.train.global_batch,
        "consumed_tokens": done * trainer.tokens_per_step,
        "memory_bytes": outcome.memory_bytes,
        **_rates(trainer, seconds),
    }
    return metrics | ({"skipped_steps": skipped} if skipped else {})


def _rates(trainer: Trainer, seconds: float) -> dict:
    rate = trainer.flops_per_step / seconds
    peak = peak_flops(trainer.config, trainer.ranks.world)
    return {"model_flops_per_s": rate} | ({"mfu": rate / peak} if peak else {})


def peak_flops(config: RootConfig, world: int) -> float | None:
    """Peak FLOP/s of the devices in use: one a rank (fairscale: a stage); on CPU the cores that the ranks can fill."""
    hardware = config.hardware
    name = "peak_flops_bfloat16" if config.train.precision == "bfloat16" else "peak_flops_float32"
    peak = getattr(hardware, name)
    if peak is None:
        return None
    if hardware.device == "cpu":
        return peak * min(hardware.devices_per_node or 1, world * torch.get_num_threads())
    return peak * (config.parallel.stages if config.parallel.engine == "fairscale" else world)
