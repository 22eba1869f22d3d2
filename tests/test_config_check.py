"""Every mistake in a configuration is one line with its numbers; warnings; the JSON round trip; no torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from composing import CONF, composed, resolved
from hydra.errors import HydraException

import conf.check
from conf.check import check, nearest_batches
from conf.device import Device
from conf.schema import from_dict, to_dict
from planning import advice
from planning.balance import resolved_balance
from planning.stack import get_stack
from planning.step import step_time


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch):
    monkeypatch.setattr(conf.check, "find_device", lambda: Device("cpu"))


# ---- what is refused, and with which numbers

REFUSED = [
    (["train.global_batch=30", "parallel.chunks=8"], ["train.global_batch=30", "8", "24 or 32"]),
    (["train.global_batch=3", "parallel.chunks=8"], ["train.global_batch=3", "set train.global_batch to 8"]),
    (
        ["train.global_batch=40", "train.accumulate=3"],
        ["40", "train.accumulate=3 x parallel.chunks=8 = 24", "24 or 48"],
    ),
    (["parallel.chunks=0"], ["parallel.chunks=0", "at least 1"]),
    (["parallel.stages=0"], ["parallel.stages=0", "at least 1"]),
    (["parallel.schedule=nosuch"], ["parallel.schedule=nosuch", "gpipe", "1f1b"]),
    (["parallel.engine=nosuch"], ["parallel.engine=nosuch", "single, torch, fairscale"]),
    (["parallel.stages=12"], ["12 model stages", "11 layers", "at most 11"]),
    (["parallel.stages=9", "parallel.balance=uniform"], ["9 model stages", "8 blocks", "at most 8"]),
    (["parallel=single", "parallel.stages=2"], ["parallel.stages=2", "parallel.engine=torch"]),
    (["parallel=fairscale_pp2", "parallel.schedule=1f1b"], ["1f1b", "parallel.schedule=gpipe"]),
    (["parallel=fairscale_pp2", "parallel.interleave=2"], ["parallel.interleave=2", "parallel.interleave=1"]),
    (["parallel.interleave=2"], ["interleave=2"]),
    (["parallel.balance=even"], ["parallel.balance=even", "auto, uniform"]),
    (["parallel.memory_cap_bytes=0"], ["parallel.memory_cap_bytes=0", "more than 0"]),
    (["parallel.balance=[8]"], ["[8]", "1 entry", "2 model stages"]),
    (["parallel.balance=[4,5]"], ["[4, 5]", "sums to 9", "8", "11"]),
    (["parallel.balance=[8,0]"], ["[8, 0]", "0 layers", "at least 1"]),
    (["parallel.balance=[4,4.5]"], ["[4, 4.5]", "whole numbers"]),
    (["parallel.checkpoint=sometimes"], ["sometimes", "never, except_last, always"]),
    (["parallel.checkpoint_interval=0"], ["parallel.checkpoint_interval=0"]),
    (["model.heads=3"], ["model.hidden=128", "model.heads=3", "2"]),
    (["model.family=rnn"], ["rnn", "gpt, llama, mlp"]),
    (["model.dropout=1.0"], ["model.dropout=1.0", "less than 1"]),
    (["model.dropout=-0.1"], ["model.dropout=-0.1"]),
    (["model.blocks=0"], ["model.blocks=0"]),
    (["model.vocabulary=100"], ["model.vocabulary=100", "256"]),
    (["model.vocabulary=32", "data=synthetic"], ["model.vocabulary=32", "64"]),
    (["train.sequence=2048"], ["train.sequence=2048", "model.positions=1024"]),
    (["train.steps=10", "train.tokens=1e6"], ["train.steps=10", "train.tokens=1e+06"]),
    (["train.steps=0"], ["train.steps=0"]),
    (["train.steps=-5"], ["train.steps=-5"]),
    (["train.tokens=0"], ["train.tokens=0", "more than 0"]),
    (["train.tokens=inf"], ["train.tokens=inf"]),
    (["train.global_batch=0"], ["train.global_batch=0"]),
    (["train.accumulate=0"], ["train.accumulate=0"]),
    (["train.sequence=0"], ["train.sequence=0"]),
    (["train.seed=-1"], ["train.seed=-1"]),
    (["train.max_minutes=-1"], ["train.max_minutes=-1"]),
    (["train.stall_timeout_s=0"], ["train.stall_timeout_s=0"]),
    (["train.nonfinite=ignore"], ["ignore", "stop, skip"]),
    (["train.precision=float16"], ["float16", "scaler", "bfloat16"]),
    (["train.precision=fp16"], ["fp16", "bfloat16"]),
    (["train.precision=int8"], ["int8", "float32, bfloat16, float64"]),
    (["hardware.precision=float16"], ["hardware.precision=float16", "bfloat16"]),
    (["hardware.device=tpu"], ["tpu", "auto, cpu, cuda"]),
    (["hardware=h100"], ["hardware=h100", "hardware=auto"]),
    (["hardware.device=cuda"], ["accelerator", "hardware=auto"]),
    (["optimizer.name=lion"], ["lion", "adamw, sgd, adafactor, muon"]),
    (["optimizer.schedule=step"], ["step", "cosine, linear, constant, wsd"]),
    (["optimizer.learning_rate=0"], ["optimizer.learning_rate=0", "more than 0"]),
    (["optimizer.learning_rate=nan"], ["optimizer.learning_rate=nan"]),
    (
        ["optimizer=muon", "parallel.data=2", "parallel.shard=optimizer"],
        ["optimizer=muon needs whole matrices", "parallel.shard=optimizer divides them", "set parallel.shard=none"],
    ),
    (
        ["optimizer=adafactor", "parallel.tensor=2"],
        ["optimizer=adafactor needs whole matrices", "set parallel.tensor=1, or optimizer=adamw"],
    ),
    (["optimizer=sgd", "optimizer.learning_rate=null"], ["optimizer.learning_rate", "sgd"]),
    (["optimizer.warmup_steps=400", "train.steps=300"], ["400", "300"]),
    (["optimizer.beta2=1"], ["optimizer.beta2=1"]),
    (["optimizer.clip_norm=0"], ["optimizer.clip_norm=0"]),
    (["optimizer.weight_decay=-1"], ["optimizer.weight_decay=-1"]),
    (["data.source=web"], ["web", "python_source, text, jsonl"]),
    (["data.tokenizer=words"], ["words", "byte", "bpe", "tokenizer.json"]),
    (["data.validation_fraction=0"], ["data.validation_fraction=0", "between 0 and 1"]),
    (["data.validation_fraction=1.01"], ["data.validation_fraction=1.01", "between 0 and 1"]),
    (["data.validation_fraction=1"], ["data.validation_fraction=1 holds all text out", "1 is for evaluate="]),
    (["data=text"], ["data.path"]),
    (["data=synthetic", "data.synthetic_vocabulary=1"], ["data.synthetic_vocabulary=1", "at least 2"]),
]


@pytest.mark.parametrize(("overrides", "fragments"), REFUSED, ids=[" ".join(o) for o, _ in REFUSED])
def test_refused_in_one_line_with_the_numbers(overrides, fragments):
    with pytest.raises(ValueError) as error:
        check(resolved(*overrides))
    message = str(error.value)
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize("override", ["+typo=1", "+train.stepz=3", "train.stepz=3", "train.steps=many", "model=nosuch"])
def test_hydra_refuses_unknown_keys_wrong_types_and_options(override):
    with pytest.raises((HydraException, AttributeError)) as error:
        composed(override)
    assert override.lstrip("+").split("=")[0].split(".")[-1] in str(error.value)


def test_nearest_batches():
    assert nearest_batches(30, 8) == [24, 32]
    assert nearest_batches(3, 8) == [8]
    assert nearest_batches(9, 8) == [8, 16]


def test_balance_lists_that_are_right():
    check(resolved("parallel.balance=[3,5]"))  # blocks
    check(resolved("parallel.balance=[4,7]"))  # embedding, 8 blocks, norm and head
    check(resolved("model=mlp", "parallel.balance=[4,6]"))  # an mlp has no norm


def test_more_stages_than_accelerators(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    one = Device("cuda", "NVIDIA H200", 1, 150_000_000_000, True)
    monkeypatch.setattr(conf.check, "find_device", lambda: one)
    with pytest.raises(ValueError, match="parallel.stages=4 .* has 1"):
        check(resolved("parallel=pp4", device=one))
    check(resolved("parallel=single", device=one))
    monkeypatch.setenv("RANK", "0")  # torchrun's ranks may be on other machines
    check(resolved("parallel=pp4", device=one))


# ---- what is warned about


@pytest.mark.parametrize("parallel", ["pp2", "pp4", "fairscale_pp2"])
@pytest.mark.parametrize("chunks", [2, 4])
def test_few_chunks_get_a_warning_with_the_bubble(parallel, chunks):
    config = resolved(f"parallel={parallel}", f"parallel.chunks={chunks}")
    p = config.parallel.stages
    (warning,) = check(config)
    assert f"{(p - 1) / (chunks + p - 1):.1%}" in warning and f"{(p - 1) / (4 * p + p - 1):.1%}" in warning
    assert f"parallel.chunks={4 * p}" in warning


def test_muon_is_evaluated_in_any_layout():
    layout = ["optimizer=muon", "parallel=tp2"]
    with pytest.raises(ValueError, match="needs whole matrices"):
        check(resolved(*layout))
    check(resolved(*layout, "evaluate=experiments/runs/one"))


def test_checkpointing_that_saves_nothing_is_said():
    (warning,) = check(resolved("parallel.schedule=zb_h1", "parallel.checkpoint=always"))
    assert "parallel.checkpoint=always saves no memory with parallel.schedule=zb_h1 and costs time" in warning
    # 2 norms and 4 products, and once for I; a step without is 3 forwards: F, I, W
    assert "up to 7 times again" in warning and "3.3 x the arithmetic" in warning
    planned = resolved_balance(resolved("parallel.schedule=zb_h1", "parallel.checkpoint=always"))[0]
    assert warning in advice.warnings(planned, "auto", step_time(planned, get_stack("torch")), "torch")
    assert check(resolved("parallel.schedule=zb_h1")) == check(resolved("parallel.checkpoint=always")) == []


def test_other_warnings():
    assert check(resolved("parallel.stages=1", "parallel.chunks=1")) == []
    assert check(resolved("parallel.chunks=9")) == []
    (warning,) = check(resolved("train.precision=bfloat16"))
    assert "bfloat16" in warning and "cpu" in warning
    (warning,) = check(resolved("hardware=v100", "train.precision=bfloat16"), here=False)
    assert "v100" in warning


# ---- types, round trip, imports


def test_json_round_trip():
    for overrides in ([], ["hardware=p5", "model=gpt_7b"], ["parallel.balance=[3,5]"]):
        config = resolved(*overrides)
        assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    with pytest.raises(ValueError, match="TrainConfig has no key stepz"):
        from_dict({"train": {"stepz": 1}})


def test_configuration_imports_no_torch():
    code = (
        "import sys, glob; glob.glob = lambda pattern: []\n"
        "from hydra import compose, initialize_config_dir; from omegaconf import OmegaConf\n"
        "from conf import check, device, resolve, schema; schema.register()\n"
        f"with initialize_config_dir({str(CONF)!r}, version_base='1.3'):\n"
        "    config = OmegaConf.to_object(compose('config', ['model=gpt_1b', 'parallel=pp4', 'parallel.chunks=4']))\n"
        "assert len(check.check(resolve.resolve(config))) == 1 and device.find_device().kind == 'cpu'\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=CONF.parent, check=True, timeout=60)


def test_more_stages_than_layers_are_told_before_a_schedule_is_made(monkeypatch):
    """zb_v of thousands of stages takes seconds to make, and remedies ask for many."""
    config = resolved("parallel.schedule=zb_v")
    config.parallel.stages = 4096
    monkeypatch.setattr("pipeline.schedule.make_schedule", lambda *_: pytest.fail("made"))
    with pytest.raises(ValueError, match="8192 model stages .* are more than the 11 layers"):
        check(config, here=False)
