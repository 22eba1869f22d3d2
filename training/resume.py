"""What `resume=` means: which run and checkpoint, its configuration with what is typed on top, and what may not change.

The ranks find, check and load the checkpoint themselves (training/checkpoint.py); here nothing is loaded. No torch.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

from omegaconf import DictConfig, OmegaConf

from conf.schema import RootConfig
from conf.words import count
from models.describe import describe
from training import failure, manifest
from training.data import Corpus
from training.record import keep_steps, read_overrides, read_result

SOURCE = "resumed.json"  # in a folder of its own: the run that this one went on from
# open values (null) that are not chosen anew: the run goes on with what it had
KEPT = {
    "train": "global_batch sequence precision max_minutes validate_sequences".split(),
    "optimizer": "learning_rate warmup_steps".split(),
}
# what the position in the data, or the meaning of the weights, hangs on
FIXED = {
    "train.seed": "another seed gives another order of the data and other dropout",
    "train.sequence": "sequences of another length are numbered differently: data would be replayed or skipped",
    "train.global_batch": "the position in the data is steps x global batch: data would be replayed or skipped",
    "data.cross_documents": "attention would see other tokens than it was trained on",
    "model.family": "it is another model",
    "model.heads": "the same weights would mean something else",
    "optimizer.name": "its state is another optimizer's",
}


@dataclass
class Found:
    """The run to go on from, and its newest checkpoint."""

    run_dir: Path
    facts: dict  # the checkpoint's manifest

    @property
    def step(self) -> int:
        return self.facts["step"]


def find(resume: str, experiment: Path, *, key: str = "resume") -> Found | None:
    """The run that `resume` names; with "auto" the one of the `experiment` folder that saved last, or None.

    Raises ValueError for a folder that is no run, or has no complete checkpoint; `key` names the option in it.
    """
    if resume == "auto" and key == "resume":
        runs = [path for path in experiment.glob("*") if (path / ".hydra" / "config.yaml").exists()]
        saved = [(run, *newest) for run in runs if (newest := manifest.newest(run)) is not None]
        if not saved:
            return None
        run_dir, _, facts = max(saved, key=lambda item: (item[1] / manifest.MANIFEST).stat().st_mtime_ns)
        return Found(run_dir, facts)
    run_dir = Path(resume)
    if not (run_dir / ".hydra" / "config.yaml").exists():
        raise ValueError(f"{key}={resume} is no run folder: there is no {run_dir / '.hydra' / 'config.yaml'}")
    newest = manifest.newest(run_dir)
    if newest is None:
        flawed = ", ".join(folder.name for folder in manifest.complete(run_dir))
        why = f"{flawed} is not whole" if flawed else "it ended before one was saved"
        remedy = "; start it anew without resume" if key == "resume" else ""
        raise ValueError(f"{key}={resume}: the run has no complete checkpoint ({why}){remedy}")
    return Found(run_dir, newest[1])


# --- the configuration ---


def compose(typed: DictConfig, overrides: Sequence[str], found: Found) -> tuple[DictConfig, list[str]]:
    """The saved run's composed configuration with what was typed on top of it, and the overrides that say the same.

    typed: what Hydra composed from `overrides` alone. A typed group (parallel=pp4) replaces the saved one whole.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    result = OmegaConf.merge(OmegaConf.structured(RootConfig), OmegaConf.load(found.run_dir / ".hydra" / "config.yaml"))
    groups = {field.name for field in fields(RootConfig) if is_dataclass(get_type_hints(RootConfig)[field.name])}
    keys = [override.key_or_group for override in OverridesParser.create().parse_overrides(list(overrides))]
    for key in keys:
        if key.partition(".")[0] not in {field.name for field in fields(RootConfig)}:
            what = "resume" if typed.evaluate is None else "evaluate"
            raise ValueError(f"{key}= cannot be typed with {what}=; type the values themselves")
        if key in groups:
            result[key] = typed[key]
        elif key != "resume":
            OmegaConf.update(result, key, OmegaConf.select(typed, key), force_add=True)
    for key, other in (("train.steps", "train.tokens"), ("train.tokens", "train.steps")):
        if key in keys:
            OmegaConf.update(result, other, None)
    result.resume = None
    saved = [override for override in read_overrides(found.run_dir) if not _replaced(override, keys)]
    return result, saved + [override for override in overrides if not _replaced(override, ["resume"])]


def _replaced(override: str, keys: Sequence[str]) -> bool:
    own = override.partition("=")[0].lstrip("+~")
    return any(own == key or own.startswith(key + ".") for key in keys)


def keep_chosen(composed: RootConfig, overrides: Sequence[str], facts: dict) -> None:
    """Fill what is still open in `composed` with what had been chosen for the saved run; `overrides` as typed.

    A warm-up that nobody typed is made no longer than the run, which may be a shorter one now.
    """
    warmup_is_open = composed.optimizer.warmup_steps is None
    chosen = {group: list(keys) for group, keys in KEPT.items()}
    if composed.train.tokens is None:
        chosen["train"].append("steps")
    if not any(_replaced(override, ["parallel"]) for override in overrides):
        chosen["parallel"] = ["chunks", "interleave"]
    for group, keys in chosen.items():
        for key in keys:
            if getattr(getattr(composed, group), key) is None:
                setattr(getattr(composed, group), key, facts["config"][group][key])
    if warmup_is_open and composed.optimizer.warmup_steps:
        composed.optimizer.warmup_steps = min(composed.optimizer.warmup_steps, _num_steps(composed))


def _num_steps(composed: RootConfig) -> int:
    """As conf/resolve.py counts them, once the batch is known."""
    train = composed.train
    return train.steps or math.ceil(train.tokens / (train.global_batch * train.sequence))


def check_compatible(config: RootConfig, corpus: Corpus, found: Found) -> None:
    """Raises ValueError, with both values, when a resolved configuration cannot go on from what was saved."""
    facts = found.facts
    _check_corpus(corpus, facts["corpus"])
    check_parameters(config, facts)
    values = asdict(config)
    for key, reason in FIXED.items():
        group, _, name = key.partition(".")
        saved = facts["config"][group].get(name, values[group][name])  # a key may be younger than the checkpoint
        if values[group][name] != saved:
            raise ValueError(f"{key}={values[group][name]} cannot be changed on resume from {saved}: {reason}")
    precisions = config.train.precision, facts["config"]["train"]["precision"]
    if precisions[0] != precisions[1] and "float64" in precisions:
        raise ValueError(
            f"train.precision={precisions[0]} cannot go on from a checkpoint in {precisions[1]}: its weights have "
            f"another type"
        )
    if config.train.steps < found.step:
        raise ValueError(
            f"train.steps={config.train.steps} is less than the {count(found.step, 'step')} that the checkpoint has: "
            f"set train.steps to more"
        )


def _check_corpus(corpus: Corpus, saved: dict) -> None:
    for key, what in (("tokenizer", "tokenizer"), ("vocabulary", "vocabulary"), ("content_hash", "text")):
        if getattr(corpus, key) != saved[key]:
            raise ValueError(
                f"the data have another {what} than the run that is resumed: {corpus.description} "
                f"({key} {getattr(corpus, key)}), it had {saved['description']} ({saved[key]})"
            )
    if corpus.train_tokens != saved["train_tokens"]:
        raise ValueError(
            f"the data are split otherwise than in the run that is resumed: {corpus.train_tokens:,} training tokens, "
            f"it had {saved['train_tokens']:,}"
        )


def check_parameters(config: RootConfig, facts: dict) -> None:
    """Raises ValueError, with both, where the model's parameters are not those of the checkpoint with these facts."""
    layers = describe(config.model)
    here = {name: list(shape) for layer in layers for name, shape in layer.parameters.items()}
    for name in dict.fromkeys([*here, *facts["parameters"]]):
        ours, saved = here.get(name, "not there"), facts["parameters"].get(name, "not there")
        if ours != saved:
            raise ValueError(f"the checkpoint is of another model: {name} is {ours} here and {saved} in the checkpoint")
    tied = {copy: owner for layer in layers for copy, owner in layer.tied.items()}
    if tied != facts["tied"]:
        raise ValueError(f"the checkpoint is of another model: tied are {tied} here and {facts['tied']} there")


# --- the folder ---


def is_done(config: RootConfig, found: Found) -> bool:
    """Whether the saved run ended well and has no step left to take."""
    result = read_result(found.run_dir)
    return bool(result) and result["status"] == "completed" and found.step >= config.train.steps


def lock(run_dir: Path) -> None:
    """Keep every other process from training in `run_dir` for as long as this one lives, or locks another folder.

    Raises ValueError when one does, or the folder cannot be written.
    """
    try:
        folder = run_dir / "logs"
        folder.mkdir(exist_ok=True)
        file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ValueError(f"cannot write to {run_dir}: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise ValueError(f"{run_dir} is being trained by another process; nothing was touched") from None
    except OSError:
        pass  # a file system without locks
    while _locked:
        os.close(_locked.pop())
    _locked.append(file)


_locked: list[int] = []  # the descriptor that holds the lock


def reopen(found: Found) -> Path:
    """Make the saved run's folder ready to go on: its result is kept as result.step_N.json."""
    failure.clear(found.run_dir)
    result = found.run_dir / "result.json"
    if result.exists():
        os.replace(result, found.run_dir / f"result.{manifest.checkpoint_name(found.step)}.json")
    return found.run_dir


def settings(run_dir: Path) -> dict[Path, bytes]:
    """What a start writes over in the folder of a run that it goes on with."""
    names = (".hydra/overrides.yaml", ".hydra/config.yaml", "resolved.json", "corpus.json", "plan.json")
    return {path: path.read_bytes() for path in (run_dir / name for name in names) if path.exists()}


def put_back(settings: dict[Path, bytes]) -> None:
    """Undo that; each file whole or not at all."""
    for path, content in settings.items():
        partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        partial.write_bytes(content)
        os.replace(partial, path)


def go_on_in(run_dir: Path, found: Found) -> None:
    """Make a new folder one that goes on from the saved run: its records so far, and where to load from."""
    metrics = found.run_dir / "metrics.jsonl"
    if metrics.exists():
        (run_dir / "metrics.jsonl").write_bytes(metrics.read_bytes())
        keep_steps(run_dir, found.step)
    (run_dir / SOURCE).write_text(json.dumps({"source": os.path.abspath(found.run_dir), "step": found.step}) + "\n")


def read_source(run_dir: str | os.PathLike) -> str | None:
    """The run that this folder's run went on from, where that is another folder."""
    path = Path(run_dir) / SOURCE
    return json.loads(path.read_text())["source"] if path.exists() else None
