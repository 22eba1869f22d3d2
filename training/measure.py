"""The profile of a run's layers: found in .cache/profiles, or measured in a child process with a rank's threads.

`python -m training.measure PROFILE.json < resolved.json` is that child. Imports torch there only.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from conf.device import find_device
from conf.schema import RootConfig, from_dict, to_dict
from models.describe import LayerSpec, describe
from pipeline.placement import num_ranks
from pipeline.profile import LayerProfile, Profile, measure_layer
from pipeline.schedule import make_schedule
from planning.memory import micro_batch
from training.launch import PARENT_PID, REPOSITORY, die_with_parent, threads_per_rank

if TYPE_CHECKING:
    import torch

CACHE = REPOSITORY / ".cache" / "profiles"
TIMEOUT_S = 1800
# of the key: where two profiles differ in these, they are of different work; in the others, of different machines
WORK = ("model", "micro_batch", "sequence", "precision", "checkpoint")


def profile_key(config: RootConfig) -> dict:
    """All that a resolved configuration's times depend on: model, micro-batch, precision, hardware, versions."""
    model = asdict(config.model)
    for name in ("name", "initializer_std"):
        del model[name]
    return {
        "model": model,
        "micro_batch": micro_batch(config),
        "sequence": config.train.sequence,
        "precision": config.train.precision,
        "checkpoint": config.parallel.checkpoint,
        "hardware": find_device().name if config.hardware.device == "cuda" else _processor(),
        "threads": threads_per_rank(num_ranks(config.parallel)),
        "versions": {"torch": metadata.version("torch"), "python": platform.python_version()},
    }


def find_or_measure(config: RootConfig) -> Profile:
    """The profile of a resolved configuration; measured (a few seconds a kind) when there is none in the cache.

    profile=true: measured anew. profile=PATH: that file is taken. ValueError: it is not there, is no profile, or is one
    of other work.
    """
    key = profile_key(config)
    if isinstance(config.profile, str):
        path = Path(config.profile)
        if not path.is_file():
            raise ValueError(f"profile={path} is not there; profile=true measures one")
        profile = Profile.load(path)
        _check_same_work(path, profile.key, key)
        return profile
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = CACHE / f"{digest}.json"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # jobs and ranks that start together measure once
        if not path.exists() or config.profile:
            _measure_in_child(config, path, key["threads"])
        return Profile.load(path)


def layer_times(config: RootConfig, profile: Profile) -> list[float]:
    """Measured seconds of each layer for one micro-batch, as the configuration's schedule runs its backward."""
    parallel = config.parallel
    splits = parallel.engine == "torch" and (
        make_schedule(parallel.schedule, parallel.stages, parallel.chunks, parallel.interleave).splits_backward
    )
    return profile.times([spec.name for spec in describe(config.model)], splits_backward=splits)


def _check_same_work(path: Path, theirs: dict, ours: dict) -> None:
    for name in WORK:
        if theirs.get(name) == ours[name]:
            continue
        mine, other = ours[name], theirs.get(name)
        if name == "model":
            differing = [key for key in mine if not isinstance(other, dict) or other.get(key) != mine[key]]
            name, mine = f"model.{differing[0]}", mine[differing[0]]
            other = other.get(differing[0]) if isinstance(other, dict) else None
        raise ValueError(
            f"profile={path} is one of other work: it has {name}={other} and this run {mine}; "
            "profile=true measures this one"
        )


def _measure_in_child(config: RootConfig, path: Path, threads: int) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), PARENT_PID: str(os.getpid())}
    child = subprocess.run(
        [sys.executable, "-m", "training.measure", str(path)],
        input=json.dumps(to_dict(config)),
        cwd=REPOSITORY,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
    )
    if child.returncode:
        raise RuntimeError(f"measuring the layers failed:\n{child.stderr.strip()[-2000:]}")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


# --- in the child ---


def measure(config: RootConfig) -> Profile:
    """Builds one layer of each kind, as a stage of its own with the run's precision and checkpointing, and times it."""
    import torch

    device = torch.device("cuda" if config.hardware.device == "cuda" else "cpu")
    kinds: dict[tuple, list[LayerSpec]] = {}
    for spec in describe(config.model):
        shapes = tuple(shape for shape in spec.parameters.values())
        kinds.setdefault((spec.kind, shapes), []).append(spec)
    return Profile(profile_key(config), [_measure_kind(config, specs, device) for specs in kinds.values()])


def _measure_kind(config: RootConfig, specs: list[LayerSpec], device: torch.device) -> LayerProfile:
    import torch

    import models
    from models.dropout import sample_keys
    from models.loss import token_loss
    from pipeline.engines.base import Stage
    from training.build import DTYPES

    model, train = config.model, config.train
    shape, dtype = (micro_batch(config), train.sequence), DTYPES[train.precision]
    index = [spec.name for spec in describe(model)].index(specs[0].name)

    def build(place: torch.device | str) -> list[tuple[str, torch.nn.Module]]:
        return models.build(model, seed=0, start=index, stop=index + 1, dtype=dtype, device=place)

    module = Stage(build(device), precision=train.precision, checkpoint=config.parallel.checkpoint)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.vocabulary, shape, generator=generator).to(device)
    stream = torch.randn(*shape, model.hidden, generator=generator).to(device, dtype)
    key = sample_keys(0, 0, torch.arange(shape[0])).to(device) if model.dropout else None
    is_first, is_last = specs[0].kind == "embedding", specs[0].kind == "head"

    def run(x: torch.Tensor) -> torch.Tensor:
        y = module(x, key)
        return token_loss(y, tokens) / tokens.numel() if is_last else y

    return measure_layer(
        [spec.name for spec in specs],
        run,
        list(module.parameters()),
        make_input=lambda: tokens if is_first else stream.detach().requires_grad_(),
        on_meta=build("meta")[0][1],
    )


def main(path: str) -> None:
    die_with_parent()
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    measure(from_dict(json.loads(sys.stdin.read()))).save(Path(path))


if __name__ == "__main__":
    main(sys.argv[1])
