"""A sweep's jobs: their folders' names, what an earlier sweep has already done, and the table at the end."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from comparing.front import tables, write
from comparing.runs import find, read, read_all
from conf import words
from training.record import read_overrides, read_result

BAD = ("failed", "out_of_memory", "invalid")  # statuses that make the command's exit code 1
REPOSITORY = Path(__file__).resolve().parent.parent
SWEEP = "PIPELINE_SWEEP"  # environment variable of `announce`


@dataclass
class Job:
    """One run of train.py, in a sweep or by itself."""

    run_dir: Path
    overrides: list[str]  # as typed; in a sweep with this job's values
    number: int | None = None  # in a sweep, from 0
    result: dict = field(default_factory=dict)  # result.json's content
    earlier: bool = False  # an earlier run had done it
    began: float = field(default_factory=time.monotonic)

    @property
    def interrupted(self) -> bool:
        """A signal stopped it (and not train.max_minutes)."""
        return self.result.get("status") == "stopped" and self.result.get("reason") == "signal"


def num_jobs() -> int | None:
    """How many the sweep that runs now has; None where this process does not run them all one after the other."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.override_parser.overrides_parser import OverridesParser

    sweeper, launcher = HydraConfig.get().sweeper, HydraConfig.get().launcher
    if not (sweeper._target_.endswith("BasicSweeper") and launcher._target_.endswith("BasicLauncher")):
        return None
    preset = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    typed = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    parsed = {o.get_key_element(): o for o in OverridesParser.create().parse_overrides([*preset, *typed])}
    count = 1
    for override in parsed.values():
        if not override.is_sweep_override():
            continue
        if not override.is_discrete_sweep():  # glob(*)
            return None
        count *= len(list(override.sweep_string_iterator()))
    return count


def progress(jobs: Sequence[Job]) -> str:
    """A line after each job: how many are done, and how long the rest takes if they take as long as those that ran."""
    from training.progress import duration

    total, now = num_jobs(), time.monotonic()
    if total is None:
        return ""
    left = total - len(jobs)
    ran = sum(job.result.get("status") != "skipped" and not job.earlier for job in jobs)
    if not left or not ran:
        return f"{len(jobs)} of {words.count(total, 'job')} done"
    return f"{len(jobs)} of {words.count(total, 'job')} done, about {duration((now - jobs[0].began) / ran * left)} left"


def swept(overrides: Sequence[str]) -> dict[str, str]:
    """The overrides of one job that differ between jobs: typed with several values, or from hydra.sweeper.params.

    Keys by their last part, where that is clear: {"stages": "2", "chunks": "8"}.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    typed = [argument for argument in _typed() if not argument.startswith("-")]
    parsed = OverridesParser.create().parse_overrides(typed)
    varies = {override.get_key_element(): override.is_sweep_override() for override in parsed}  # the last one counts
    pairs = [override.partition("=")[::2] for override in overrides]
    pairs = [(key.lstrip("+~"), value) for key, value in pairs if varies.get(key, True)]
    last = [key.rpartition(".")[2] for key, _ in pairs]
    return {short if last.count(short) == 1 else key: value for short, (key, value) in zip(last, pairs, strict=True)}


def job_name(number: int, overrides: Sequence[str]) -> str:
    """The end of a job's folder name, e.g. "03_stages=2_chunks=8": safe in any file system, bounded in length."""
    values = "_".join(f"{key}={value}" for key, value in swept(overrides).items())
    return f"{number:02d}_{words.safe(values)}".strip("_-")


def find_completed(experiment: Path, overrides: Sequence[str]) -> Path | None:
    """The newest run folder of this experiment that ended well with the same overrides, or None."""
    wanted = _identity(overrides)
    for run_dir in sorted(filter(Path.is_dir, experiment.glob("*")), reverse=True):
        result = read_result(run_dir)
        if result and ended_well(result) and _identity(read_overrides(run_dir)) == wanted:
            return run_dir
    return None


def ended_well(result: dict) -> bool:
    """Completed, or stopped by its own time limit."""
    return result["status"] == "completed" or (result["status"] == "stopped" and result.get("reason") == "max_minutes")


def _identity(overrides: Sequence[str]) -> list[str]:
    return sorted(override for override in overrides if override.partition("=")[0].lstrip("+") != "resume_sweep")


def mark(result: dict) -> str:
    """What stands behind the status of a run on hardware that is not there."""
    return " (emulated)" if result.get("emulated") else ""


# --- the end ---


def report(jobs: Sequence[Job]) -> str:
    """All jobs in the table of compare.py, in their order, and where the page on all runs of the experiment is."""
    runs = [read(job.run_dir) for job in jobs]
    extra = {"job": [f"{job.number}{' (earlier)' if job.earlier else ''}" for job in jobs]}
    return f"{tables(runs, extra)}\n\n{_page(jobs[0].run_dir.parent)}"


def _page(experiment: Path) -> str:
    try:
        page = write(read_all(find([experiment])), experiment, str(experiment))[-1]
    except (ValueError, ImportError, OSError) as error:
        return f"no page: {error}"
    return f"look at it: {page} (again: python compare.py {experiment})"


# --- jobs in other processes, where hydra/launcher says so ---


def announce() -> None:
    """In the process that -m was typed into: tell the jobs of a launcher that starts them elsewhere, through the
    environment, what was typed, where the code is, and where to leave what became of them."""
    drop = Path("experiments", ".sweeps", uuid.uuid4().hex[:12]).absolute()
    told = {"process": _process(), "typed": sys.argv[1:], "drop": str(drop)}
    os.environ[SWEEP] = json.dumps(told)
    paths = [str(REPOSITORY), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


def elsewhere() -> bool:
    """Whether this process runs a job of a sweep that was typed into another process."""
    told = _told()
    return told is not None and told["process"] != _process()


def add(job: Job, jobs: list[Job]) -> None:
    """Note what became of a job; where the sweep's own process does not see `jobs`, in a file for `collect`."""
    jobs.append(job)
    if job.number is not None and elsewhere():
        drop = Path(_told()["drop"])
        drop.mkdir(parents=True, exist_ok=True)
        partial = drop / f"{job.number}.tmp"
        partial.write_text(json.dumps(asdict(job) | {"run_dir": str(job.run_dir.absolute())}))
        os.replace(partial, drop / f"{job.number}.json")


def collect() -> list[Job]:
    """In the sweep's own process: the jobs that ran elsewhere, by number."""
    told = _told()
    if told is None or elsewhere():
        return []
    jobs, drop = [], Path(told["drop"])
    for path in drop.glob("*.json"):
        job = Job(**json.loads(path.read_text()))
        job.run_dir = Path(os.path.relpath(job.run_dir))
        jobs.append(job)
    shutil.rmtree(drop, ignore_errors=True)
    with suppress(OSError):  # of a sweep beside this one
        drop.parent.rmdir()
    return sorted(jobs, key=lambda job: job.number)


def _typed() -> list[str]:
    return _told()["typed"] if elsewhere() else sys.argv[1:]


def _told() -> dict | None:
    text = os.environ.get(SWEEP)
    return None if text is None else json.loads(text)


def _process() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"
