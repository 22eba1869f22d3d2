"""Kill a run again and again, at random moments, and see that it ends as if nothing had happened.

    python benchmarks/checkpoint/soak.py --kills 100

Trains gpt_tiny on two ranks, with a checkpoint every second step, twice: once undisturbed, once under kills (SIGKILL)
of a rank, which train.max_restarts brings back, or of the launcher, after which resume=auto goes on. Moments: inside a
step, while a checkpoint is being saved, while one is being deleted, while ranks are starting. At the end the losses of
all steps and the last weights and optimizer states must be the same bit for bit, and no process may be left.
Exit code 0 when they are; the last line is a JSON object with the counts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from training import manifest  # noqa: E402
from training.launch import children  # noqa: E402

MOMENTS = ("in a step", "while saving", "while deleting", "while starting")
WATCH_S = 30.0  # longest wait for a moment; then the kill comes anyway
GONE_S = 10.0  # the processes of a killed launcher must be gone by then
SMALL = (
    "model=gpt_tiny data=synthetic data.synthetic_tokens=200000 parallel.chunks=4 train.global_batch=8 "
    "train.sequence=32 train.validate_every=0 train.validate_sequences=8 train.checkpoint_every=2 train.max_minutes=0"
).split()


def start(folder: Path, name: str, steps: int, *overrides: str) -> subprocess.Popen:
    """train.py in a session of its own, its output in a file."""
    command = [sys.executable, str(REPOSITORY / "train.py"), *SMALL, f"train.steps={steps}", f"name={name}", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(folder / f"{name}.out", "a") as output:
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def current(folder: Path, name: str) -> Path | None:
    """The run that was last written to: a launcher killed early may leave a folder that never became one."""
    records = (folder / "experiments" / name).glob("*/metrics.jsonl")
    found = [(path.stat().st_mtime_ns, path.parent) for path in records]
    return max(found)[1] if found else None


def being(run_dir: Path | None, what: str) -> bool:
    """Whether a checkpoint is being saved ("step_N.tmp") or deleted at this moment."""
    if run_dir is None:
        return False
    deleting = what == "while deleting"
    folder = manifest.checkpoints_dir(run_dir)
    names = os.listdir(folder) if folder.is_dir() else []
    return any(name.endswith(".deleted.tmp") == deleting for name in names if name.endswith(".tmp") and "step" in name)


def last_step(run_dir: Path | None) -> int:
    path = None if run_dir is None else run_dir / "metrics.jsonl"
    if path is None or not path.exists():
        return 0
    lines = path.read_text().splitlines()
    return json.loads(lines[-1])["step"] if lines and lines[-1].endswith("}") else 0


class Soak:
    """One run under kills."""

    def __init__(self, folder: Path, steps: int, seed: int):
        self.folder, self.steps, self.random = folder, steps, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.unfinished: Counter[str] = Counter()  # kills that left a checkpoint half saved or half deleted
        self.launcher = self._start()

    def _start(self) -> subprocess.Popen:
        return start(self.folder, "soak", self.steps, "resume=auto", "train.max_restarts=1000000")

    def kill_once(self) -> bool:
        """Waits for a random moment and kills; False when the run has ended."""
        moment = self.random.choice(MOMENTS)
        whole = self.random.random() < 0.4  # the launcher, and with it all
        if not self._wait_for(moment):
            return False
        ranks = children(self.launcher.pid)
        victim = self.launcher.pid if whole or not ranks else self.random.choice(ranks)
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            return self.launcher.poll() is None
        self._count_unfinished()
        self.counts[moment] += 1
        self.counts["of the launcher" if victim == self.launcher.pid else "of a rank"] += 1
        if victim == self.launcher.pid:
            self.launcher.wait()
            self._nothing_left()
            self.launcher = self._start()
        return True

    def _wait_for(self, moment: str) -> bool:
        """Until the run is at this moment, or there was none for long; False when it has ended."""
        run_dir = current(self.folder, "soak")
        begin, first = time.monotonic(), last_step(run_dir)
        if moment == "while starting":
            time.sleep(self.random.uniform(0, 4))
            return self.launcher.poll() is None
        while self.launcher.poll() is None and time.monotonic() - begin < WATCH_S:
            run_dir = run_dir or current(self.folder, "soak")
            if moment == "in a step":
                if last_step(run_dir) > first:
                    time.sleep(self.random.uniform(0, 0.5))
                    break
                time.sleep(0.02)
            elif being(run_dir, moment):
                if moment == "while saving":
                    time.sleep(self.random.uniform(0, 0.1))
                break
            else:
                time.sleep(0.0005)
        return self.launcher.poll() is None

    def _nothing_left(self) -> None:
        deadline = time.monotonic() + GONE_S
        while left := processes_in(self.folder):
            assert time.monotonic() < deadline, f"left after the launcher was killed: {left}"
            time.sleep(0.05)

    def _count_unfinished(self) -> None:
        for what in ("while saving", "while deleting"):
            self.unfinished[what] += being(current(self.folder, "soak"), what)

    def finish(self) -> int:
        code = self.launcher.wait()
        self._nothing_left()
        return code


def processes_in(folder: Path) -> list[str]:
    """Command lines of other processes that work in this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command, cwd = (entry / "cmdline").read_bytes(), os.readlink(entry / "cwd")
            except OSError:
                continue
            if command and cwd == str(folder):
                found.append(command.replace(b"\0", b" ").decode())
    return found


def losses(run_dir: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def compare(expected: Path, found: Path) -> list[str]:
    """What differs between two runs, in words; [] when they are the same bit for bit."""
    import torch

    from training.shards import read_state

    wrong = [] if losses(expected) == losses(found) else ["the losses of the steps"]
    ends = [manifest.newest(run_dir)[0] for run_dir in (expected, found)]
    if ends[0].name != ends[1].name:
        return [*wrong, f"the last checkpoints: {ends[0].name} and {ends[1].name}"]
    one, other = (read_state(end) for end in ends)
    return wrong + [name for name in one | other if not torch.equal(one[name], other[name])]


def soak(folder: Path, kills: int, seed: int) -> dict:
    """The counts and what was wrong, as the command prints it."""
    steps = 6 * kills + 20
    undisturbed = start(folder, "undisturbed", steps)
    code = undisturbed.wait()
    assert code == 0, (folder / "undisturbed.out").read_text()
    begin = time.monotonic()
    run = Soak(folder, steps, seed)
    while sum(run.counts[moment] for moment in MOMENTS) < kills and run.kill_once():
        pass
    code = run.finish()
    wrong = [] if code == 0 else [f"exit code {code}"]
    return {
        "kills": sum(run.counts[moment] for moment in MOMENTS),
        "moments": dict(run.counts),
        "seen_unfinished": dict(run.unfinished),
        "steps": steps,
        "seconds": round(time.monotonic() - begin),
        "wrong": wrong or compare(current(folder, "undisturbed"), current(folder, "soak")),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the runs are kept; a folder that is removed if not given")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        result = soak(folder, arguments.kills, arguments.seed)
        print(json.dumps(result))
        return 1 if result["wrong"] or result["kills"] < arguments.kills else 0


if __name__ == "__main__":
    sys.exit(main())
