"""What `evaluate=` means: which run and checkpoint, its configuration with what is typed on top, and what must fit.

Nothing is loaded here (training/held_out.py does, on the ranks), and nothing in the run's folder is touched. No torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from conf.check_data import sidecar_path
from conf.names import named
from conf.schema import RootConfig
from conf.words import count
from pipeline.partition import Certificate
from training import resume
from training.announce import gib
from training.data import Corpus
from training.manifest import checkpoint_name
from training.resume import Found

# of planning.memory's bytes of a training rank: what a rank that only runs forward does not hold
NOT_HELD = ("gradients", "optimizer", "activations")
# what a longer sequence than the run's meets, of families whose layers know positions
UNTRAINED = {
    "gpt": "the learned positions beyond are as they were initialised",
    "llama": "rotary positions so far apart were never met in training",
}


def find(typed: RootConfig) -> Found:
    """The run that `evaluate` names, and its newest checkpoint. Raises ValueError for a folder that is no run, or has
    no complete checkpoint, and for a configuration that asks for something else besides."""
    if typed.resume is not None:
        raise ValueError("evaluate= and resume= are both given: one looks at a run, the other goes on with it")
    if typed.emulate.enabled:
        raise ValueError("evaluate= needs real ranks: an emulated one has no weights; leave out emulate.enabled=true")
    return resume.find(typed.evaluate, Path(), key="evaluate")


def folder(started: Path, name: str, found: Found) -> Path:
    """Where the result goes; `started`: the folder that Hydra would take, whose name begins with the time."""
    moment = started.name[: len("2025-01-31_12-00-00")]
    return Path("experiments", name, f"{moment}_evaluate_{found.run_dir.resolve().name}")


def settle(composed: RootConfig, typed: Sequence[str], found: Found) -> None:
    """Fill what is open with the saved run's values, and leave to conf/resolve.py what only training needs: in another
    layout the saved batch may not divide. `composed` is changed; `typed`: overrides."""

    def given(key: str) -> bool:
        return any(override.lstrip("+").startswith((f"{key}=", f"{key}.")) for override in typed)

    resume.keep_chosen(composed, typed, found.facts)
    if given("parallel") and not given("train.global_batch"):
        composed.train.global_batch, composed.train.accumulate = None, 1
    composed.train.checkpoint_every = 0
    composed.evaluate = os.path.abspath(found.run_dir)  # for the ranks


def memory(training: list[dict]) -> list[dict]:
    """Bytes of each rank, from those of a rank that trains."""
    ranks = [{key: 0 if key in NOT_HELD else size for key, size in rank.items() if key != "total"} for rank in training]
    return [rank | {"total": sum(rank.values())} for rank in ranks]


def check_compatible(config: RootConfig, corpus: Corpus, found: Found) -> None:
    """Raises ValueError, with both values, when the checkpoint cannot read these data, or is of another model."""
    saved = found.facts["corpus"]
    for key in ("tokenizer", "vocabulary"):
        if getattr(corpus, key) != saved[key]:
            raise ValueError(
                f"the data have another {key} than the run was trained with: {corpus.description} ({key} "
                f"{getattr(corpus, key)}), it had {saved['description']} ({saved[key]}){_remedy(config, found)}"
            )
    resume.check_parameters(config, found.facts)
    model, before = asdict(config.model), found.facts["config"]["model"]
    for key in ("family", "heads"):
        if model[key] != before[key]:
            raise ValueError(f"model.{key}={model[key]} is not the run's {before[key]}: other weights fit it")
    precisions = config.train.precision, found.facts["config"]["train"]["precision"]
    if precisions[0] != precisions[1] and "float64" in precisions:
        raise ValueError(
            f"train.precision={precisions[0]} cannot read a checkpoint in {precisions[1]}: weights have another type"
        )


def warnings(config: RootConfig, corpus: Corpus, found: Found) -> list[str]:
    """What makes the loss another one than it seems to be."""
    said, saved = [], found.facts["config"]
    here, there = config.train.sequence, saved["train"]["sequence"]
    if config.model.family in UNTRAINED and here > there:
        said.append(
            f"train.sequence={here} is longer than the {there} tokens of the sequences that the run was trained on: "
            f"{UNTRAINED[config.model.family]}"
        )
    fractions = config.data.validation_fraction, saved["data"]["validation_fraction"]
    if corpus.content_hash == found.facts["corpus"]["content_hash"] and fractions[0] != fractions[1]:
        said.append(
            f"data.validation_fraction={fractions[0]:g} of the run's own data, of which it held out {fractions[1]:g}: "
            "what is evaluated may be what it was trained on"
        )
    return said


def _remedy(config: RootConfig, found: Found) -> str:
    """Which data.tokenizer to type, where the run's own is still to be had and text is read; else what data to take.
    Empty where nothing is known to help."""
    data, identity = found.facts["config"]["data"], found.facts["corpus"]["tokenizer"]
    if config.data.source == "tokens":
        return (
            f": stored ids stay what they are, whatever data.tokenizer says: give text, or ids made with {identity} "
            f'(as "tokenizer" in {sidecar_path(config.data.path).name} beside them)'
        )
    if config.data.source == "synthetic":
        return ": synthetic data are no text and have no tokenizer: give data that the run's tokenizer can read"
    if data["tokenizer"] != "bpe":
        return "" if data["source"] == "synthetic" else f": set data.tokenizer={data['tokenizer']}"
    for stamp in sorted(Path(data["cache"], "tokenizers").glob("*/sha256")):  # a BPE that was trained for the run
        if stamp.read_text()[:16] == identity.rpartition(" ")[2]:
            return f": set data.tokenizer={stamp.with_name('tokenizer.json')}"
    return ""


def describe(config: RootConfig, corpus: Corpus, held: list[dict], split: Certificate, found: Found) -> str:
    """What is about to be evaluated."""
    parallel = config.parallel
    cut = f", cut {split.balance}" if len(split.balance) > 1 else ""
    return "\n".join(
        [
            f"evaluate   {found.run_dir}, {checkpoint_name(found.step)}: model {named('model', config.model)}",
            f"parallel   {named('parallel', parallel)}: engine {parallel.engine}, {count(len(held), 'process')}{cut}; "
            f"{', '.join(gib(rank['total']) for rank in held)} of memory",
            f"data       {corpus.description}; {corpus.validation_tokens:,} tokens held out "
            f"(data.validation_fraction={config.data.validation_fraction:g}), sequences of {config.train.sequence}",
        ]
    )
