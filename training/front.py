"""From what was typed to a run folder with a result: compose, check, claim the folder, launch; once, or for each job.

Called by train.py once Hydra has composed. Knows Hydra and OmegaConf; below it there are only plain dataclasses.
"""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from conf.check import check
from conf.resolve import resolve
from conf.schema import RootConfig, to_dict
from conf.typed import BAD_INPUT, check_keys, one_line
from conf.words import count
from pipeline.action import Impossible
from pipeline.partition import Certificate
from pipeline.placement import num_ranks
from pipeline.profile import Profile
from planning.balance import resolved_balance
from planning.calibrate import calibrated
from planning.durations import durations
from planning.report import duration
from training import announce, evaluate, join, measure, outcome, resume, spent, sweep
from training.command import EXIT_BAD_INPUT, EXIT_OK
from training.data import Corpus, prepare
from training.launch import launch
from training.record import finish_failed, read_result
from training.sweep import Job


@dataclass
class Plan:
    """A run that has passed every check."""

    composed: RootConfig
    config: RootConfig  # resolved
    corpus: Corpus | None  # None: an emulated run
    memory: list[dict]  # planning.memory's bytes of each rank
    warnings: list[str]
    split: Certificate  # of config.parallel.balance, a list by now
    profile: Profile | None  # measured times of the layers, where they were asked for
    prediction: dict  # plan.json


def run(config: DictConfig, jobs: list[Job]) -> None:
    """One composed configuration, to its end; appends the job. In a sweep bad input and failures are only recorded.

    Raises one of BAD_INPUT for bad input of a single run, KeyboardInterrupt when a sweep is to end.
    """
    hydra = HydraConfig.get()
    in_sweep = hydra.mode == RunMode.MULTIRUN
    folder = Path(os.path.relpath(hydra.runtime.output_dir))
    job = Job(folder, list(hydra.overrides.task), int(hydra.job.num) if in_sweep else None)
    with _removed_if_empty(folder):
        if in_sweep and config.resume_sweep and (earlier := sweep.find_completed(folder.parent, job.overrides)):
            job.run_dir, job.result, job.earlier = earlier, read_result(earlier), True
            print(f"done already: {earlier}")
            sweep.add(job, jobs)
            return
        try:
            if not in_sweep and _folder_typed():
                refuse_taken(folder)  # before anything is prepared or said
            config, found = _resumed(config, job)
            plan = make_plan(config, found, hydra.overrides.task)
        except BAD_INPUT as error:
            if not in_sweep:
                raise
            _record_invalid(config, job, error)
        else:
            _train(config, job, plan, found)
        sweep.add(job, jobs)
    _say_end(job, jobs, trained=config.evaluate is None)
    if in_sweep and job.interrupted and not sweep.elsewhere():
        raise KeyboardInterrupt


def _resumed(config: DictConfig, job: Job) -> tuple[DictConfig, resume.Found | None]:
    """With resume= or evaluate=: the saved configuration with what was typed on top, and the run."""
    if config.evaluate is not None:
        found = evaluate.find(_to_object(config))
        config, _ = resume.compose(config, job.overrides, found)
        if job.number is None and not _folder_typed():
            job.run_dir = evaluate.folder(job.run_dir, config.name, found)
        return config, found
    if config.resume is None:
        return config, None
    if job.number is not None:
        raise ValueError("resume= goes on with one run; for a sweep, resume_sweep=true runs the jobs that are missing")
    found = resume.find(config.resume, job.run_dir.parent)
    if found is None:
        print(f"resume=auto: no run in {job.run_dir.parent} has a checkpoint: a fresh start", flush=True)
        return config, None
    config, job.overrides = resume.compose(config, job.overrides, found)
    return config, found


def _train(config: DictConfig, job: Job, plan: Plan, found: resume.Found | None) -> None:
    """In a new folder, or in the one of the run that is resumed."""
    evaluates, before = config.evaluate is not None, {}
    if found is not None and not evaluates and resume.is_done(plan.config, found):
        job.run_dir, job.result, job.earlier = found.run_dir, read_result(found.run_dir), True
        print(f"all {count(found.step, 'step')} done already; a larger train.steps goes on")
        return
    clock, too_long = _wall_clock(plan)
    for warning in plan.warnings + too_long:
        print(f"warning: {warning}", file=sys.stderr)
    if evaluates:
        print(evaluate.describe(plan.config, plan.corpus, plan.memory, plan.split, found))
    else:
        _say(plan, clock)
    if found is None or evaluates or _folder_typed():
        job.run_dir = _claim_for(job)
        resume.lock(job.run_dir)
        if found is not None and not evaluates:
            resume.go_on_in(job.run_dir, found)
    else:
        before = resume.settings(found.run_dir)
        job.run_dir = resume.reopen(found)
        (job.run_dir / ".hydra" / "overrides.yaml").write_text(OmegaConf.to_yaml(job.overrides))
    (job.run_dir / ".hydra" / "config.yaml").write_text(OmegaConf.to_yaml(config))
    _write_inputs(job.run_dir, plan)
    job.result = _launch(job.run_dir, plan)
    if before and job.result["status"] in ("failed", "out_of_memory") and job.result.get("steps", 0) <= found.step:
        resume.put_back(before)  # not a step was taken with what was typed: the next start is not to inherit it


def make_plan(config: DictConfig, found: resume.Found | None = None, typed: Sequence[str] = ()) -> Plan:
    """Every check that needs no rank. Raises ValueError, or OmegaConf's errors, for bad input.

    found: the run to go on from, or to evaluate, with what was `typed` on top.
    """
    composed = _to_object(config)
    evaluates = composed.evaluate is not None
    if evaluates:
        evaluate.settle(composed, typed, found)
    elif found is not None:
        resume.keep_chosen(composed, typed, found.facts)
    if not re.fullmatch(r"[\w.+=-]+(/[\w.+=-]+)*", composed.name) or ".." in composed.name.split("/"):
        raise ValueError(f"name={composed.name} names a folder in experiments/: use letters, digits and . _ + = - only")
    resolved = resolve(composed)
    warnings = check(resolved)
    if join.joined_rank() is not None:
        join.check_world(num_ranks(resolved.parallel))
    resolved, split, profile = _cut(resolved)
    memory = announce.predicted_memory(resolved)
    if evaluates:
        memory = evaluate.memory(memory)
    if resolved.preflight:
        announce.preflight(resolved, memory)
    announce.check_room(resolved, Path("experiments", resolved.name) if found is None else found.run_dir)
    if resolved.emulate.enabled:  # reads no data
        prediction = outcome.plan_for(resolved) | {"durations": durations(calibrated(resolved)).to_dict()}
        return Plan(composed, resolved, None, memory, warnings, split, profile, prediction)
    corpus = prepare(resolved.data, sequence=resolved.train.sequence, trains=not evaluates)
    if evaluates:
        evaluate.check_compatible(resolved, corpus, found)
        warnings = evaluate.warnings(resolved, corpus, found)  # the others are of training
    elif found is not None:
        resume.check_compatible(resolved, corpus, found)
        if not _folder_typed():
            resume.lock(found.run_dir)
    prediction = {} if evaluates else outcome.plan_for(resolved)  # of training; last, since it may measure this machine
    return Plan(composed, resolved, corpus, memory, warnings, split, profile, prediction)


def _cut(config: RootConfig) -> tuple[RootConfig, Certificate, Profile | None]:
    """parallel.balance as a list, once for all ranks; the profile where it or the user asks for one."""
    by_time = config.parallel.balance == "time"
    profile = times = None
    if by_time and join.on_several_machines() and not isinstance(config.profile, str):
        raise ValueError(
            "parallel.balance=time would be measured on each machine by itself, and machines differ: give one profile "
            "to all with profile=PATH (.cache/profiles of one of them), or parallel.balance=auto"
        )
    if by_time or config.profile:
        profile = measure.find_or_measure(config)
        times = measure.layer_times(config, profile) if by_time else None
    return *resolved_balance(config, times), profile


def _to_object(config: DictConfig) -> RootConfig:
    check_keys(config, RootConfig)
    composed = OmegaConf.to_object(config)
    assert isinstance(composed, RootConfig)
    return composed


# --- the folder ---


def claim(folder: Path, *, chosen_by_user: bool = False) -> Path:
    """Make `folder` a new run's own and return it: with "-2", "-3", … when it has a run already, also one that another
    process starts at this moment. Raises ValueError instead when the user chose the folder."""
    if chosen_by_user:
        refuse_taken(folder)
    number, candidate = 1, folder
    while True:
        candidate.mkdir(parents=True, exist_ok=True)
        try:
            (candidate / ".hydra").mkdir()  # only one process can
            return candidate
        except FileExistsError:
            number += 1
            candidate = folder.with_name(f"{folder.name}-{number}")
        except FileNotFoundError:
            pass  # another start, refused, has just removed its empty folder of the same name


def refuse_taken(folder: Path) -> None:
    """Raises ValueError when the folder holds a run."""
    if any((folder / name).exists() for name in (".hydra", "result.json", "metrics.jsonl")):
        raise ValueError(f"hydra.run.dir={folder} already holds a run; choose another folder, nothing was touched")


def _folder_typed() -> bool:
    typed = HydraConfig.get().overrides.hydra
    return any(override.startswith(("hydra.run.dir=", "hydra.sweep.")) for override in typed)


def _claim_for(job: Job) -> Path:
    run_dir = claim(job.run_dir, chosen_by_user=_folder_typed())
    for name, content in (("overrides", job.overrides), ("hydra", OmegaConf.create({"hydra": HydraConfig.get()}))):
        (run_dir / ".hydra" / f"{name}.yaml").write_text(OmegaConf.to_yaml(content))
    return run_dir


def _write_inputs(run_dir: Path, plan: Plan) -> None:
    """What the ranks read; each file whole or not at all."""
    for name, content in (
        ("resolved.json", to_dict(plan.config)),
        ("corpus.json", plan.corpus and plan.corpus.to_dict()),
        ("plan.json", plan.prediction | {"split": plan.split.to_dict()}),
    ):
        partial = run_dir / f"{name}.{os.getpid()}.tmp"
        partial.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(partial, run_dir / name)


@contextmanager
def _removed_if_empty(folder: Path) -> Iterator[None]:
    """Hydra makes the folder before anything is checked: away with it, and its parents, when nothing came in."""
    try:
        yield
    finally:
        below = [] if folder.is_absolute() or ".." in folder.parts else folder.parents[:-1]
        with suppress(OSError):  # not empty, or not there
            for path in (folder, *below):
                path.rmdir()


def _record_invalid(config: DictConfig, job: Job, error: Exception) -> None:
    job.run_dir = _claim_for(job)
    (job.run_dir / ".hydra" / "config.yaml").write_text(OmegaConf.to_yaml(config))
    status = "out_of_memory" if isinstance(error, announce.DoesNotFit) else "invalid"
    if isinstance(error, Impossible):
        status = "skipped"
    composed = None
    with suppress(*BAD_INPUT):
        composed = _to_object(config)
    why = "reason" if status == "skipped" else "failure"
    job.result = finish_failed(job.run_dir, status, composed, **{why: one_line(error)})


# --- the run ---


def _launch(run_dir: Path, plan: Plan) -> dict:
    """Train in `run_dir`, and return result.json; also when something unforeseen goes wrong here."""
    print(f"folder     {run_dir}\n", flush=True)
    try:
        if join.joined_rank() is not None:
            join.announce_folder(run_dir)
            join.train(run_dir)
            return read_result(run_dir)
        restarts = plan.config.train.max_restarts
        if plan.config.emulate.enabled:  # a process stands for all tensor and data ranks of its stage
            return launch(run_dir, plan.config.parallel.stages, max_restarts=restarts, forked=True)
        return launch(run_dir, num_ranks(plan.config.parallel), max_restarts=restarts)
    except Exception as error:
        traceback.print_exc()
        return finish_failed(run_dir, "failed", failure=f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        finish_failed(run_dir, "stopped", reason="signal")
        raise


def follow(rank: int) -> int:
    """A rank other than 0 that was started by torchrun: no folder, nothing printed; returns the exit code."""
    error = None
    try:
        config = join.compose_without_folder()
        if config.resume is None and config.evaluate is None:  # else the folder is there already, and rank 0 checks
            plan = make_plan(config)
    except BAD_INPUT as bad:
        error = bad
    run_dir = join.hear_folder(rank)
    if error is not None or not run_dir:
        if run_dir:  # rank 0 found nothing wrong: it is this machine
            print(f"train.py: rank {rank}: {one_line(error)}", file=sys.stderr)
        return EXIT_BAD_INPUT
    if not Path(run_dir, "corpus.json").exists():  # another machine, and no shared file system
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        _write_inputs(Path(run_dir), plan)
    join.train(run_dir)
    return EXIT_OK


# --- what is printed ---


def _say(plan: Plan, clock: str) -> None:
    if plan.profile is not None:
        print(plan.profile.table() + "\n")
    print(announce.describe_run(plan.config, plan.corpus, plan.memory))
    if len(plan.split.balance) > 1:
        print(announce.split_line(plan.split))
    if clock:
        print(clock)
    chosen = announce.chosen_values(plan.composed, plan.config)
    if chosen:
        indent = " " * len("chosen     ")
        print("chosen     " + textwrap.fill(" ".join(chosen), 100, subsequent_indent=indent, break_on_hyphens=False))


def _wall_clock(plan: Plan) -> tuple[str, list[str]]:
    """How long an emulated run will take on this machine, by its planned step, and a warning where it is too long."""
    if not plan.config.emulate.enabled or "predicted" not in plan.prediction:
        return "", []
    train, scale = plan.config.train, plan.config.emulate.time_scale
    step_s = plan.prediction["predicted"]["step_time_s"]
    here_s = train.steps * step_s * scale
    planned = f"{duration(here_s)} by this machine's clock: {train.steps:,} x {duration(step_s)} x time_scale={scale:g}"
    if not train.max_minutes or here_s <= 60 * train.max_minutes:
        return f"time       {planned}", []
    warning = (
        f"the run is planned to take {planned}, and train.max_minutes={train.max_minutes:g} ends it before: lower "
        "emulate.time_scale or train.steps, or set train.max_minutes=0"
    )
    return f"time       {planned}", [warning]


def _say_end(job: Job, jobs: list[Job], trained: bool) -> None:
    result = job.result
    if job.number is None and (comparison := outcome.table(result)):
        print("\n" + comparison)
    if job.number is None and (went := spent.table(result)):
        print("\n" + went)
    if job.number is None:
        print(f"\n{result['status']}{sweep.mark(result)}: {job.run_dir}{_how_to_go_on(job)}")
        if trained:
            print("look at it: tensorboard --logdir experiments", flush=True)
    else:
        note = f": {result['failure']}" if result["status"] in sweep.BAD else ""
        if result["status"] == "skipped":
            note = f": {result['reason']}"
        print(f"job {job.number} {result['status']}{sweep.mark(result)}{note}: {job.run_dir}", flush=True)
        if done := sweep.progress(jobs):
            print(done, flush=True)


def _how_to_go_on(job: Job) -> str:
    """After a stop: what ended the run, and the command that takes it further."""
    result = job.result
    if result["status"] != "stopped":
        return ""
    lines = []
    if result.get("reason") == "max_minutes":
        limit = json.loads((job.run_dir / "resolved.json").read_text())["train"]["max_minutes"]
        lines.append(f"train.max_minutes={limit:g} was over; train.max_minutes=0 lifts it")
    if any((job.run_dir / "checkpoints").glob("step_*")):
        lines.append(f"to go on: python train.py resume={job.run_dir}")
    return "".join(f"\n{line}" for line in lines)
