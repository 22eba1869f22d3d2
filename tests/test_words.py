"""What the commands say: counts, numbers, the names of what runs, faults in what was typed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from composing import CONF, composed, resolved

from conf.names import NAMED, file_name, named
from conf.schema import RootConfig
from conf.typed import check_keys, one_line
from conf.words import count, large, plural, significant
from planning.front import plan_of
from planning.report import duration, render
from training.announce import describe_run, predicted_memory, split_line

# ---- numbers


@pytest.mark.parametrize(
    "number, noun, said",
    [
        (1, "stage", "1 stage"),
        (0, "stage", "0 stages"),
        (8, "micro-batch", "8 micro-batches"),
        (1, "process", "1 process"),
        (4, "process", "4 processes"),
        (2, "flush", "2 flushes"),
        (2, "entry", "2 entries"),
        (4096, "token", "4,096 tokens"),
    ],
)
def test_counts(number, noun, said):
    assert count(number, noun) == said and plural(number, noun) == said.split(" ")[1]


@pytest.mark.parametrize(
    "seconds, said",
    [
        (0.0000259, "0.0259 ms"),
        (0.32, "320 ms"),
        (0.99996, "1 s"),
        (23.61, "23.6 s"),
        (999.4, "999 s"),
        (1312.0, "21.9 minutes"),
        (2 * 3600.0, "2 hours"),
        (1300 * 3600.0, "54.2 days"),
        (3e9, "34,700 days"),
        (-1312.0, "-21.9 minutes"),
    ],
)
def test_durations_have_three_digits_and_no_power_of_ten(seconds, said):
    assert duration(seconds) == said


def test_numbers_are_written_out():
    assert [significant(v) for v in (0.02591, 7, 23.61, 999.7, 1312.4, 1e7)] == [
        "0.0259", "7", "23.6", "1,000", "1,310", "10,000,000",
    ]  # fmt: skip
    assert [large(v) for v in (1, 983_040, 104.86e9, 999.96e9, 3e12)] == [
        "1", "983,040", "104.9 billion", "1 trillion", "3 trillion",
    ]  # fmt: skip
    assert large(12_345_678) == "12.35 million"


# ---- names


@pytest.mark.parametrize("group", NAMED)
def test_every_file_as_it_is_goes_by_its_own_name(group):
    """Also resolved: what was open and has been filled, or padded, is no change."""
    for option in sorted(path.stem for path in (CONF / group).glob("*.yaml")):
        for config in (composed(f"{group}={option}"), resolved(f"{group}={option}", "optimizer.learning_rate=1")):
            values = getattr(config, group)
            assert named(group, values) == values.name


@pytest.mark.parametrize(
    "group, typed, said",
    [
        ("parallel", "parallel.stages=8 parallel.schedule=gpipe", "pp2 with schedule=gpipe, stages=8"),
        ("parallel", "parallel.tensor=2 parallel.sequence_parallel=true", "pp2 with tensor=2, sequence_parallel=true"),
        ("parallel", "parallel.stages=2 parallel.chunks=16", "pp2"),  # its own value; an open value
        ("parallel", "parallel.name=mine parallel.stages=8", "mine"),  # no such file
        ("model", "model=gpt_7b model.vocabulary=1000", "gpt_7b with vocabulary=1000"),
        ("model", "model.tied=false", "gpt_tiny with tied=false"),
        ("hardware", "hardware=p4d hardware.network_bytes_per_s=null", "p4d with network_bytes_per_s=null"),
        ("hardware", "hardware=emulated_h100 hardware.memory_bytes=1e9", "emulated_h100 with memory_bytes=1e+09"),
    ],
)
def test_what_was_typed_over_a_file_is_said(group, typed, said):
    assert named(group, getattr(composed(*typed.split()), group)) == said


def test_an_experiments_values_are_said_too():
    config = composed("+experiment=chunks_x_stages")
    written = composed(f"model={config.model.name}").model
    differ = [key for key in ("blocks", "hidden", "heads") if getattr(config.model, key) != getattr(written, key)]
    said = named("model", config.model)
    assert [key for key in ("blocks", "hidden", "heads") if f"{key}=" in said] == differ


def test_names_of_files_are_safe_bounded_and_can_be_typed():
    config = composed("parallel.schedule=../my schedule.py:eager", "parallel.stages=8")
    name = file_name(("model", config.model), ("parallel", config.parallel))
    assert name == "gpt_tiny_pp2_schedule-..-my-schedule.py-eager_stages-8"
    long = replace(config.parallel, schedule="x" * 500)
    assert len(file_name(("parallel", long))) == 120
    assert composed(f"resume=experiments/runs/{name}").resume.endswith(name)


def test_the_plan_says_what_it_plans():
    config, plan = plan_of(composed("model=gpt3_175b", "parallel.stages=8", "hardware=a100_80gb"), "torch")
    plan["run"] |= {"hours": 1300.0, "tokens": 104.86e9, "steps": 1}
    text = render(plan, config)
    assert "parallel   pp2 with stages=8: 8 stages = 8 devices, 8 a node; 1f1b" in text
    assert "run        1 step, 104.9 billion tokens: 1,300 hours = 54.2 days" in text
    one = ["parallel=single", "model.blocks=1", "parallel.chunks=1", "train.global_batch=1", "train.sequence=1"]
    config, plan = plan_of(composed(*one, "hardware=p4d", "train.steps=1"), "torch")
    text = render(plan, config)
    assert "gpt_tiny with blocks=1: " in text and ", 1 block of width 128" in text
    assert "single: 1 stage = 1 device, 8 a node" in text and "1 sequence of 1 token = 1 token a step: 1 micro" in text
    assert not re.search(r"\b1 (stages|devices|blocks|sequences|tokens|micro-batches|steps|model)\b(?!/s)", text)


def test_the_run_says_what_it_runs():
    config = resolved("parallel.stages=4", "model.blocks=6", "parallel.chunks=1", "train.steps=1", "train.sequence=1")
    config.parallel.balance = "uniform"
    text = describe_run(config, None, predicted_memory(config))
    assert "model      gpt_tiny with blocks=6: " in text and "parallel   pp2 with stages=4: engine torch, " in text
    assert ", 1 micro-batch: " in text and "run        1 step = 32 tokens, " in text and "of 1 token = 32" in text


def test_the_cut_of_a_large_model_is_said_in_words():
    from planning.balance import resolved_balance

    _, split = resolved_balance(resolved("model=gpt_7b", "hardware=p4d", "parallel.balance=flops"))
    assert "e+" not in split_line(split) and re.search(r"\d (b|tr)illion flops", split_line(split))


# ---- faults in what was typed

FAULTS = {
    "hardware=nope": "hardware=nope is unknown; known are a100, ",
    "optimizer=adam": "optimizer=adam is unknown. Did you mean optimizer=adamw? Known are adafactor, adamw, muon, sgd",
    "data=nope": "data=nope is unknown; known are ",
    "+experiment=quickstar": "+experiment=quickstar is unknown. Did you mean +experiment=quickstart? Known are ",
    "experiment=quickstart": "experiment=quickstart needs a plus: +experiment=quickstart",
    "parallel.stagez=2": "parallel.stagez is no key of the configuration. Did you mean parallel.stages? Known in ",
    "train.stepz=3": "train.stepz is no key of the configuration. Did you mean train.steps? Known in train are steps, ",
    "stages=3": "stages is no key of the configuration. Did you mean parallel.stages? Known are name, ",
    "parallel.stages=two": "parallel.stages=two must be a whole number",
    "train.steps=1.5": "train.steps=1.5 must be a whole number",
    "train.steps.x=1": "train.steps.x=1: train.steps must be a whole number",
    "parallel.stages=null": "parallel.stages=null must be a value, not null",
    "model.dropout=much": "model.dropout=much must be a number",
    "preflight=maybe": "preflight=maybe must be true or false",
    "model.family=[1]": "model.family=[1] must be text",
    "data.sources=3": "data.sources=3 must be a list, as in [a,b]",
    "train=3": "train=3: train is a group of keys, type one of them: steps, tokens, ",
    "train.steps": "train.steps is no override: type KEY=VALUE",
    "resume=a=b": "resume=a=b cannot be read (mismatched input '=' expecting <EOF>): text with such characters",
    "parallel.balance=[1": "parallel.balance=[1 cannot be read (no viable alternative at input '[1'): type KEY=VALUE, ",
    "model=a,b": "model=a,b has several values: -m (--multirun) runs each of them, ",
    "+model=gpt_1b": "model has a value already: type model=NAME without the plus",
    "~model": "model has no value: type model=",
    "parallel=null": "a group (model, parallel, …) takes the name of one of its files, not null",
}


@pytest.mark.parametrize("typed", FAULTS)
def test_a_fault_is_one_line_that_says_what_is_right(typed):
    with pytest.raises(Exception) as error:
        composed(typed)
    said = one_line(error.value)
    assert said.startswith(FAULTS[typed]) and "\n" not in said and str(CONF) not in said and "Config search" not in said


def test_keys_after_a_plus_are_checked_by_their_class():
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", ["+train.stepz=3"])
    with pytest.raises(ValueError, match=r"train.stepz is no key .* Did you mean train.steps\?"):
        check_keys(config, RootConfig)
