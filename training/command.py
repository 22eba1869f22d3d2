"""The command line's side of train.py: errors in one line, exit codes, signals before ranks start, a sweep's table.

Light, so that --help and bad input answer at once; training.front does the work once Hydra has composed.
"""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from conf.names import file_name
from conf.schema import register
from conf.typed import BAD_INPUT, one_line
from training import join, sweep
from training.sweep import Job

EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_STOPPED = 0, 1, 2, 75  # 75: EX_TEMPFAIL of sysexits.h, "try again"

register()
# conf/hydra/default.yaml
OmegaConf.register_new_resolver("job_name", sweep.job_name, replace=True)
OmegaConf.register_new_resolver(
    "file_name", lambda model, parallel: file_name(("model", model), ("parallel", parallel)), replace=True
)


class Refused(BaseException):
    """Bad input of a single run. Not an Exception: Hydra would print about it."""


def run(config: DictConfig, jobs: list[Job]) -> None:
    """One composed configuration, to its end (training/front.py). Raises Refused for bad input of a single run."""
    from training import front

    try:
        front.run(config, jobs)
    except BAD_INPUT as error:
        if HydraConfig.get().mode == RunMode.MULTIRUN:  # the other jobs run
            raise
        raise Refused(one_line(error)) from error


def main(compose_and_run: Callable[[], None], jobs: list[Job]) -> int:
    """Call Hydra's main, print what went wrong in one line, or a sweep's table; returns the exit code."""
    full_error = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises, in place of printing and leaving
    rank = join.joined_rank()
    interrupted = False
    try:
        with _sigterm_as_interrupt():
            if {"-m", "--multirun"} & set(sys.argv):
                sweep.announce()
            if rank is not None and {"-m", "--multirun"} & set(sys.argv):
                raise Refused("-m starts one run after the other, each with its own ranks: start it without torchrun")
            if rank:
                from training import front

                return front.follow(rank)
            compose_and_run()
    except (Refused, *BAD_INPUT) as error:
        if full_error:
            raise
        if not rank:
            print(f"{Path(sys.argv[0]).name}: {one_line(error)}", file=sys.stderr)
        if rank == 0:
            join.announce_refusal()
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        interrupted = True
    finally:
        jobs += sweep.collect()
        if jobs and jobs[0].number is not None:
            print("\n" + sweep.report(jobs), flush=True)
            if interrupted:
                print("interrupted: the same command with resume_sweep=true runs what is missing")
    statuses = [job.result["status"] for job in jobs]
    if interrupted or any(job.interrupted for job in jobs):
        return EXIT_STOPPED
    return EXIT_FAILED if set(sweep.BAD) & set(statuses) else EXIT_OK


def help_text(description: str) -> str:
    """What --help prints: the groups of conf/ with their options. Hydra's own help takes a second and lists Hydra."""
    lines = [description.strip(), "", "Groups, as in `python train.py model=gpt_1b`:"]
    for folder in sorted((join.REPOSITORY / "conf").iterdir()):
        options = sorted(path.stem for path in folder.glob("*.yaml"))
        if options and folder.name != "hydra":
            plus = "+" if folder.name == "experiment" else ""  # in no defaults list: it is added
            label = f"  {plus + folder.name:<12}"
            lines.append(textwrap.fill(", ".join(options), 118, initial_indent=label, subsequent_indent=" " * 14))
    return "\n".join([*lines, "", "Values, as in `train.steps=1000`: all that --cfg job prints. Hydra: --hydra-help."])


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Outside of launch() SIGTERM ends the process as Ctrl-C does: by an exception, so that folders are tidied."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
