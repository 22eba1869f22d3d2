"""verify.py's work: from what was typed to cases, to one launch, to a table and a verdict. No torch in this process."""

from __future__ import annotations

import copy
import json
import math
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from conf.check import KNOWN, check, check_sharding
from conf.names import named
from conf.resolve import resolve
from conf.schema import ModelConfig, RootConfig, VerifyConfig, VerifyRootConfig, to_dict
from conf.typed import BAD_INPUT, check_keys, one_line
from conf.words import count
from models.describe import describe, num_parameters
from pipeline.placement import num_ranks
from pipeline.schedule import SCHEDULES, make_schedule
from planning.balance import resolved_balance
from planning.memory import machine_memory_bytes
from training.announce import gib
from training.command import Refused
from training.comparison import Report
from training.launch import launch

# Float64 copies of a parameter at the peak: of the ranks weight, gradient, its copy, and both as read back; of the
# reference weight, gradient and its copy. Activations come on top.
COPIES = 8
MATRIX_BLOCKS, MATRIX_SEQUENCE, MATRIX_STAGES = 12, 8, (2, 4)
INTERLEAVES = {"interleaved_1f1b": (2, 3), "looped_bfs": (2, 3), "zb_v": (2,), "dualpipe_v": (2,)}


def run(composed: DictConfig) -> bool:
    """Verifies one configuration (or the whole matrix), prints the outcome, returns whether it is within tolerance.

    Raises Refused for bad input.
    """
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        raise Refused("verify.py takes one configuration: leave -m out, or use verify.all=true for the whole matrix")
    try:
        check_keys(composed, VerifyRootConfig)
        typed = OmegaConf.to_object(composed)
        options = typed.verify
        cases = matrix(typed, options) if options.all else [whole(typed, options)]
        _check_memory(cases[0])
    except BAD_INPUT as error:
        raise Refused(one_line(error)) from error
    print(_heading(cases, options), flush=True)
    reports = measure(cases)
    if reports is None:
        return False
    print(_matrix_table(cases, reports) if options.all else _parameter_table(reports[0], options.rows))
    worst, what, case = max((*report.worst, _label(case)) for case, report in zip(cases, reports, strict=True))
    good = worst <= options.tolerance
    verdict = "RIGHT" if good else "WRONG"
    print(
        f"{verdict}: worst relative error {worst:.2e}, {what}{f' of {case}' if options.all else ''}; "
        f"tolerance {options.tolerance:g}"
    )
    return good


def measure(cases: list[RootConfig]) -> list[Report] | None:
    """The report of each case, from one launch; None when a rank failed."""
    with tempfile.TemporaryDirectory(prefix="verify_") as folder:
        Path(folder, "cases.json").write_text(json.dumps([to_dict(case) for case in cases]))
        ranks = max(num_ranks(case.parallel) for case in cases)
        result = launch(folder, ranks, worker=("-m", "training.parity"))
        if result["status"] == "stopped":
            raise KeyboardInterrupt
        if result["status"] != "completed":
            return None
        return [Report.from_dict(values) for values in json.loads(Path(folder, "reports.json").read_text())]


# --- cases ---


def whole(typed: RootConfig, options: VerifyConfig) -> RootConfig:
    """The configuration as train.py would run it, in float64 on CPU; width and depth as `options` say."""
    config = RootConfig(**{name: copy.deepcopy(getattr(typed, name)) for name in RootConfig.__dataclass_fields__})
    model = config.model
    if options.width is not None:
        unit, what = _width_unit(model)
        if options.width % unit:
            raise ValueError(
                f"verify.width={options.width} is not divisible by {what}: "
                f"the nearest that is: {max(1, round(options.width / unit)) * unit}"
            )
        if model.feedforward is not None:
            model.feedforward = max(1, round(model.feedforward * options.width / model.hidden))
        model.hidden = options.width
    model.blocks = options.blocks or model.blocks
    config.hardware.device = "cpu"
    config.train.precision = "float64"
    config.train.steps = config.train.steps or 1  # one is taken, whatever the run's length
    config = resolve(config, device="cpu")
    check(config)
    if config.parallel.balance == "time":
        config.parallel.balance = "auto"  # any cut has the same gradients: nothing is measured for it
    return resolved_balance(config)[0]


def _width_unit(model: ModelConfig) -> tuple[int, str]:
    """What a width must be a multiple of, and its name: whole heads, of an even width where positions rotate them."""
    if model.family == "llama":
        return 2 * model.heads, f"2 x model.heads={model.heads}"
    return model.heads, f"model.heads={model.heads}"


def matrix(typed: RootConfig, options: VerifyConfig) -> list[RootConfig]:
    """Every schedule x stages x interleave x chunks x accumulation x tied x checkpointing, and the other engines; for a
    layout with data or tensor ranks `mesh_matrix`."""
    model = typed.model
    if typed.parallel.data * typed.parallel.tensor > 1:
        return mesh_matrix(typed, options)
    base = VerifyConfig(width=options.width or 8 * model.heads, blocks=options.blocks or MATRIX_BLOCKS)
    layouts = []
    for name, stages in product(SCHEDULES, MATRIX_STAGES):
        for interleave in INTERLEAVES.get(name, (1,)):
            for chunks, checkpoint in product(_chunks(name, stages, interleave), ("never", "always")):
                layouts.append(
                    dict(engine="torch", schedule=name, stages=stages, interleave=interleave, chunks=chunks)
                    | dict(checkpoint=checkpoint)
                )
    fill_and_drain = dict(schedule="gpipe", interleave=1, chunks=8)
    for engine, stages, checkpoint in product(("fairscale",), MATRIX_STAGES, ("never", "except_last", "always")):
        layouts.append(fill_and_drain | dict(engine=engine, stages=stages, checkpoint=checkpoint))
    layouts.append(fill_and_drain | dict(engine="single", stages=1, checkpoint="never"))
    cases = []
    for tied, layout, accumulate in product((True, False), layouts, (1, 2)):
        config = replace(
            typed,
            model=replace(model, tied=tied, dropout=0.1 if accumulate == 2 else 0.0, positions=MATRIX_SEQUENCE),
            parallel=replace(typed.parallel, **layout, balance="uniform"),
            train=replace(
                typed.train,
                accumulate=accumulate,
                global_batch=accumulate * layout["chunks"],
                sequence=MATRIX_SEQUENCE,
            ),
        )
        cases.append(whole(config, base))
    cases.sort(key=lambda case: (case.train.global_batch, case.model.tied, case.model.dropout))  # references are shared
    return cases


def mesh_matrix(typed: RootConfig, options: VerifyConfig) -> list[RootConfig]:
    """The ranks of the typed layout, every schedule x each level of sharding that it allows x sequence parallelism;
    in turn tied with dropout and two flushes, and untied with one and activation checkpointing."""
    model, parallel = typed.model, typed.parallel
    base = VerifyConfig(width=options.width or 8 * model.heads, blocks=options.blocks or MATRIX_BLOCKS)
    kinds = ((True, 0.1, 2, "never"), (False, 0.0, 1, "always"))
    levels = KNOWN["parallel.shard"] if parallel.data > 1 else ("none",)
    sequence_parallel = (False, True) if parallel.tensor > 1 else (False,)
    cases = []
    for name in SCHEDULES:
        interleave = INTERLEAVES.get(name, (1,))[0]
        chunks = _chunks(name, parallel.stages, interleave)[0]
        for number, (level, shared) in enumerate(product(levels, sequence_parallel)):
            tied, dropout, accumulate, checkpoint = kinds[(number // 2 + number) % 2]
            layout = dict(schedule=name, interleave=interleave, chunks=chunks, checkpoint=checkpoint, shard=level)
            batch = accumulate * chunks * parallel.data
            config = replace(
                typed,
                model=replace(model, tied=tied, dropout=dropout, positions=MATRIX_SEQUENCE),
                parallel=replace(parallel, **layout, sequence_parallel=shared, balance="uniform"),
                train=replace(typed.train, accumulate=accumulate, global_batch=batch, sequence=MATRIX_SEQUENCE),
            )
            try:
                check_sharding(config.parallel)
            except ValueError:  # refused, with the reason, wherever it is asked for
                continue
            cases.append(whole(config, base))
    cases.sort(key=lambda case: (case.train.global_batch, case.model.tied, case.model.dropout))  # references are shared
    return cases


def _chunks(schedule: str, stages: int, interleave: int) -> list[int]:
    """The least number of chunks that the schedule takes, and 8."""
    for chunks in range(1, 9):
        try:
            make_schedule(schedule, stages, chunks, interleave)
            return sorted({chunks, 8})
        except ValueError:
            continue
    raise AssertionError(f"{schedule} takes no number of chunks up to 8")


def _check_memory(config: RootConfig) -> None:
    """Raises ValueError, with a smaller model of the same structure that fits, when the machine has too little."""
    count = num_parameters(describe(config.model))
    need, available = COPIES * 8 * count, machine_memory_bytes()
    if need <= available:
        return
    model = config.model
    stages = config.parallel.stages * config.parallel.interleave
    width, blocks = model.hidden, max(stages, min(model.blocks, 2 * stages))
    unit, _ = _width_unit(model)
    while width > unit:
        feedforward = round(model.feedforward * width / model.hidden)
        smaller = replace(model, hidden=width, blocks=blocks, feedforward=feedforward)
        if COPIES * 8 * num_parameters(describe(smaller)) <= available / 4:
            break
        width = max(1, width // 2 // unit) * unit
    raise ValueError(
        f"{count:,} parameters need about {gib(need)} in float64, beside one process' reference, and this machine has "
        f"{gib(available)} free: verify the same structure with verify.width={width} verify.blocks={blocks}"
    )


# --- what is printed ---


def _heading(cases: list[RootConfig], options: VerifyConfig) -> str:
    config = cases[0]
    train, model = config.train, config.model
    if options.all:
        what = f"width {model.hidden} and {count(model.blocks, 'block')}, float64{_documents(config)}"
        return f"{count(len(cases), 'case')}, {model.name} with {what}"
    return (
        f"{_label(config)}\n{named('model', model)}: {num_parameters(describe(model)):,} parameters, float64, "
        f"{count(train.global_batch, 'random sequence')} of {count(train.sequence, 'token')}{_documents(config)}; "
        "reference: one process, plain autograd"
    )


def _documents(config: RootConfig) -> str:
    if config.data.cross_documents or config.model.family == "mlp":  # which has no attention
        return ""
    return ", attention inside documents"


def _label(config: RootConfig) -> str:
    parallel = config.parallel
    parts = [f"{parallel.engine} {parallel.schedule}", f"stages {parallel.stages}"]
    if parallel.interleave > 1:
        parts.append(f"interleave {parallel.interleave}")
    parts.append(f"chunks {parallel.chunks}")
    if parallel.data > 1:
        parts.append(f"data {parallel.data}, shard {parallel.shard}")
    if parallel.tensor > 1:
        parts.append(f"tensor {parallel.tensor}{' with sequence parallelism' * parallel.sequence_parallel}")
    if config.train.accumulate > 1:
        parts.append(f"accumulate {config.train.accumulate}")
    parts.append("tied" if config.model.tied else "untied")
    if config.model.dropout:
        parts.append(f"dropout {config.model.dropout:g}")
    if parallel.checkpoint != "never":
        parts.append(f"checkpoint {parallel.checkpoint}")
    return ", ".join(parts)


def _parameter_table(report: Report, rows: int) -> str:
    shown = report.rows[:rows]
    width = max(len(row.parameter) for row in shown)
    lines = [f"{'parameter':<{width}}  rank  gradient  weights after SGD"]
    for row in shown:
        rank = "none" if row.rank < 0 else row.rank
        lines.append(f"{row.parameter:<{width}}  {rank:>4}  {_error(row.gradient_error)}  {_error(row.weight_error)}")
    count = len(report.rows)
    if count > rows:
        lines.append(f"... {count - rows} more with smaller errors (verify.rows={count} shows all)")
    lines.append(f"loss {report.loss_error:.2e}, gradient norm {report.norm_error:.2e}")
    return "\n".join(lines)


def _matrix_table(cases: list[RootConfig], reports: list[Report]) -> str:
    """The worst error of each engine, schedule, stages and interleave over everything else that varies."""
    if cases[0].parallel.data * cases[0].parallel.tensor > 1:
        return _mesh_table(cases, reports)
    families: dict[tuple, list[float]] = {}
    for case, report in zip(cases, reports, strict=True):
        parallel = case.parallel
        key = (parallel.engine, parallel.schedule, parallel.stages, parallel.interleave)
        families.setdefault(key, []).append(report.worst[0])
    lines = [f"{'engine':<10} {'schedule':<17} stages interleave cases  worst error"]
    for (engine, schedule, stages, interleave), errors in sorted(families.items()):
        layout = f"{engine:<10} {schedule:<17} {stages:>6} {interleave:>10}"
        lines.append(f"{layout} {len(errors):>5}  {_error(max(errors))}")
    lines.append("each with: least and 8 chunks, 1 and 2 flushes (dropout 0.1 with 2), tied and untied, checkpointing")
    return "\n".join(lines)


def _mesh_table(cases: list[RootConfig], reports: list[Report]) -> str:
    """The worst error of each schedule, level of sharding and sequence parallelism."""
    families: dict[tuple, list[float]] = {}
    for case, report in zip(cases, reports, strict=True):
        parallel = case.parallel
        key = (parallel.schedule, parallel.interleave, parallel.shard, parallel.sequence_parallel)
        families.setdefault(key, []).append(report.worst[0])
    parallel = cases[0].parallel
    lines = [
        f"{parallel.stages} pipeline x {parallel.data} data x {parallel.tensor} tensor ranks",
        f"{'schedule':<17} interleave {'shard':<10} sequence parallel  cases  worst error",
    ]
    for (schedule, interleave, shard, shared), errors in families.items():
        layout = f"{schedule:<17} {interleave:>10} {shard:<10} {'yes' if shared else 'no':<17}"
        lines.append(f"{layout} {len(errors):>6}  {_error(max(errors))}")
    lines.append("in turn tied with dropout 0.1 and 2 flushes, and untied with 1 flush and activation checkpointing")
    return "\n".join(lines)


def _error(value: float) -> str:
    return " missing or twice" if math.isinf(value) else f"{value:8.2e}"
