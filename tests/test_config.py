"""Configuration files: each composes, resolves and passes its checks; what `null` becomes."""

from __future__ import annotations

import re

import pytest
from composing import CONF, composed, resolved
from hydra import compose, initialize_config_dir

from conf.check import check
from conf.device import Device
from conf.resolve import CPU_STEPS, adam_learning_rate, resolve
from conf.schema import register, to_dict
from models.describe import describe, num_parameters
from planning.predict import ranks_memory
from planning.step import Layout


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


# ---- every file


@pytest.mark.parametrize("group", ["model", "parallel", "optimizer", "hardware", "data"])
def test_every_option_composes_resolves_and_passes(group):
    for option in options(group):
        extra = {
            "mix": ["data.sources=[{source: python_source, weight: 1}]"],
            "tokens": ["data.path=some.bin", "data.vocabulary=1000"],
        }.get(option, ["data.path=some.txt"] if option == "text" else [])
        config = resolved(f"{group}={option}", *extra)
        check(config, here=False)
        if option != "auto":  # auto becomes what it found
            assert getattr(config, group).name == option


def test_the_groups_hold_what_the_readme_promises():
    assert set(options("model")) >= {"gpt_tiny", "gpt_124m", "gpt_350m", "gpt_1b", "gpt_7b", "gpt_10b", "gpt_100b"}
    assert set(options("model")) >= {"gpt3_175b", "gpt_1t", "mlp"}
    assert set(options("parallel")) >= {"single", "pp2", "pp4", "pp8", "fairscale_pp2", "fairscale_pp4"}
    assert set(options("hardware")) >= {"auto", "cpu", "v100", "a100_40gb", "a100_80gb", "h100", "h200", "b200"}
    assert set(options("hardware")) >= {"p4d", "p4de", "p5", "p5en"}
    assert set(options("data")) >= {
        "python_source",
        "text",
        "jsonl",
        "parquet",
        "datasets",
        "tokens",
        "synthetic",
        "mix",
    }


@pytest.mark.parametrize("experiment", options("experiment"))
def test_every_experiment_composes_and_opens_with_its_command(experiment):
    config = resolved(f"+experiment={experiment}")
    check(config)
    assert config.name == experiment
    head = (CONF / "experiment" / f"{experiment}.yaml").read_text().splitlines()[:2]
    assert head[0] == "# @package _global_"
    assert head[1].startswith("# python train.py ") and f"+experiment={experiment}" in head[1]


def test_the_sweep_experiment_covers_stages_and_chunks():
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        sweep = compose("config", ["+experiment=chunks_x_stages"], return_hydra_config=True).hydra.sweeper.params
    values = {key.removeprefix("parallel."): value.split(",") for key, value in sweep.items()}
    assert values == {
        "schedule": ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1"],
        "stages": ["2", "4", "8"],
        "chunks": ["2", "4", "8", "16", "32"],
    }
    for schedule in values["schedule"]:
        for stages in values["stages"]:
            layout = [f"parallel.schedule={schedule}", f"parallel.stages={stages}", "parallel.chunks=32"]
            config = resolved("+experiment=chunks_x_stages", *layout)
            check(config)
            assert config.emulate.enabled
            held = max(rank["total"] for rank in ranks_memory(config, Layout.of(config)))
            assert held < config.hardware.memory_bytes  # else it would end as out_of_memory


def closed_form(blocks: int, hidden: int, vocabulary: int, positions: int) -> int:
    """GPT-2 with biases and a tied head: 12 L D^2 + 13 L D + V D + P D + 2 D."""
    return 12 * blocks * hidden**2 + 13 * blocks * hidden + (vocabulary + positions + 2) * hidden


# name: blocks, hidden, heads, positions, rows of the embedding; from the papers that the files cite
PUBLISHED = {
    "gpt_tiny": (8, 128, 4, 1024, 256),
    "gpt_124m": (12, 768, 12, 1024, 50_304),
    "gpt_350m": (24, 1024, 16, 2048, 50_304),
    "gpt_1b": (16, 2304, 24, 2048, 256),
    "gpt_7b": (32, 4096, 32, 2048, 51_200),
    "gpt_10b": (48, 4096, 64, 1024, 51_200),
    "gpt_100b": (80, 10240, 128, 1024, 51_200),
    "gpt3_175b": (96, 12288, 96, 2048, 51_200),
    "gpt_1t": (128, 25600, 160, 2048, 51_200),
}


LLAMAS = {"llama_tiny": 1_607_808} | {  # those of Llama 3: as released
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
}


@pytest.mark.parametrize("name", options("model"))
def test_parameter_count_is_what_the_file_says(name):
    model = resolved(f"model={name}", "parallel=single").model
    count = num_parameters(describe(model))
    if name == "mlp":
        expected = 2 * 256 * 128 + 8 * (128**2 + 128)
    elif name in LLAMAS:
        expected = LLAMAS[name]
    else:
        blocks, hidden, heads, positions, vocabulary = PUBLISHED[name]
        assert (model.blocks, model.hidden, model.heads, model.positions) == (blocks, hidden, heads, positions)
        expected = closed_form(blocks, hidden, vocabulary, positions)
    assert count == expected
    assert f"# {count:,} parameters" in (CONF / "model" / f"{name}.yaml").read_text()


def test_gpt_1b_and_the_published_gpt2():
    assert 1.0e9 <= num_parameters(describe(resolved("model=gpt_1b").model)) <= 1.1e9
    unpadded = resolved("model=gpt_124m", "model.vocabulary_multiple=1").model
    assert num_parameters(describe(unpadded)) == 124_439_808  # as released


@pytest.mark.parametrize("name", [n for n in options("hardware") if n not in ("auto", "cuda")])
def test_every_hardware_figure_has_a_source(name):
    hardware = composed(f"hardware={name}").hardware
    figures = ["peak_flops_float32", "peak_flops_bfloat16", "memory_bytes", "memory_bytes_per_s", "link_bytes_per_s"]
    figures += ["network_bytes_per_s", "price_usd_per_hour"]
    for key in figures:
        assert (getattr(hardware, key) is not None) == (key in hardware.sources), key
    for key, source in hardware.sources.items():
        assert re.search(r"20\d\d-\d\d-\d\d$", source), f"{key} has no date: {source}"
    assert (hardware.price_usd_per_hour is None) == (hardware.price_date is None)


def test_hardware_units():
    p4d, p5 = composed("hardware=p4d").hardware, composed("hardware=p5").hardware
    assert p4d.network_bytes_per_s * 8 * 8 == 400e9  # bits a second of a node of eight
    assert p5.network_bytes_per_s * 8 * 8 == 3200e9
    assert p4d.memory_bytes * 8 == 320 * 2**30 and p5.memory_bytes * 8 == 640 * 2**30
    assert p4d.peak_flops_bfloat16 == 312e12 and p4d.link_bytes_per_s == 300e9


# ---- what null becomes


def test_the_default_run():
    config = resolved()
    train, parallel = config.train, config.parallel
    assert (config.model.name, parallel.name, config.hardware.device) == ("gpt_tiny", "pp2", "cpu")
    assert (train.sequence, train.global_batch, train.precision, train.max_minutes) == (128, 32, "float32", 15)
    assert (parallel.chunks, parallel.interleave, config.model.feedforward, config.model.vocabulary) == (8, 1, 512, 256)
    assert train.steps // train.validate_every == 4 and 15 <= train.steps / train.log_every <= 25
    assert check(config) == []


def test_resolving_fills_everything_once_and_touches_nothing_given():
    config = composed()
    before = to_dict(config)
    once = resolve(config)
    assert to_dict(config) == before
    assert resolve(once) == once
    open_values = {k for k, v in to_dict(once)["train"].items() if v is None}
    assert open_values == {"tokens"}
    given = {
        "train.steps": 7,
        "train.global_batch": 24,
        "train.sequence": 33,
        "train.max_minutes": 2,
        "train.log_every": 3,
    }
    given |= {"train.validate_every": 0, "train.validate_sequences": 5, "optimizer.warmup_steps": 6}
    config = resolved("hardware=cpu", *(f"{k}={v}" for k, v in given.items()))
    for key, value in given.items():
        group, name = key.split(".")
        assert getattr(getattr(config, group), name) == value, key


@pytest.mark.parametrize("model", options("model"))
@pytest.mark.parametrize("parallel", ["single", "pp2", "pp8"])
def test_runs_on_cpu_are_short(model, parallel):
    config = resolved(f"model={model}", f"parallel={parallel}")
    train = config.train
    check(config)
    assert 4 <= train.steps <= CPU_STEPS
    assert config.optimizer.warmup_steps <= train.steps / 10
    assert train.precision == "float32" and train.max_minutes == 15 and train.sequence == 128
    assert 1 <= train.validate_every <= train.steps
    assert train.validate_sequences % train.global_batch == 0


def test_gpt_1b_fits_its_time():
    """A bare loop of this model took 110 s a step of 2,048 tokens on two cores: what fits 15 minutes."""
    train = resolved("parallel=pp4", "model=gpt_1b").train
    assert train.global_batch * train.sequence == 2048
    assert 3 <= train.steps and train.steps * 110 < 0.8 * 15 * 60
    validations = train.steps // train.validate_every
    assert validations >= 1
    assert validations * train.validate_sequences <= 0.1 * 3 * train.steps * train.global_batch


def test_a_batch_that_was_left_open_always_divides():
    for chunks in (1, 3, 5, 7, 12, 50):
        for accumulate in (1, 2, 3):
            config = resolved(f"parallel.chunks={chunks}", f"train.accumulate={accumulate}")
            check(config)
            unit = chunks * accumulate
            assert config.train.global_batch % unit == 0
            nearest = min(range(unit, 10 * unit + 33, unit), key=lambda n: abs(n - 32))
            assert abs(config.train.global_batch - 32) == abs(nearest - 32)


def test_tokens_become_steps_rounded_up():
    overrides = ["train.global_batch=32", "train.sequence=128", "train.tokens={}"]
    for tokens, steps in ((1, 1), (4096, 1), (4097, 2), (1e6, 245)):
        assert resolved(*(o.format(tokens) for o in overrides)).train.steps == steps


def test_a_shorter_time_limit_shortens_the_run():
    assert resolved("model=gpt_124m", "train.max_minutes=5").train.steps < resolved("model=gpt_124m").train.steps
    assert resolved("train.max_minutes=0").train.max_minutes == 0


def test_the_accelerator_recipe():
    config = resolved("hardware=h100", "model=gpt_7b", "parallel=pp8")
    assert config.train.precision == "bfloat16" and config.train.max_minutes == 0
    assert config.optimizer.clip_norm == 1.0 and config.optimizer.warmup_steps == 5000
    assert config.train.checkpoint_every == 2000
    assert config.train.sequence == 2048 and config.train.global_batch % config.parallel.chunks == 0
    short = resolved("hardware=h100", "train.steps=200")
    assert short.optimizer.warmup_steps == 20
    assert resolved("hardware=v100").train.precision == "float32"


def test_learning_rate_falls_with_size():
    """Kaplan et al. 2020, eq. D.1, beside the rates that GPT-3 (table 2.1) was trained with: within a factor of two."""
    for parameters, published in ((125e6, 6e-4), (350e6, 3e-4), (1.3e9, 2e-4), (6.7e9, 1.2e-4), (175e9, 0.6e-4)):
        assert 0.5 <= adam_learning_rate(int(parameters)) / published <= 2
    assert resolved("optimizer.learning_rate=0.5").optimizer.learning_rate == 0.5


def test_auto_takes_the_figures_of_a_known_device():
    h200 = Device("cuda", "NVIDIA H200", 8, 150_000_000_000, True)
    config = resolved(device=h200)
    assert config.hardware.device == "cuda" and config.hardware.name == "auto (NVIDIA H200)"
    assert config.hardware.peak_flops_bfloat16 == 989e12 and config.train.precision == "bfloat16"
    assert config.hardware.memory_bytes == 150e9 and config.hardware.devices_per_node == 8
    assert config.hardware.price_usd_per_hour is None
    of_the_device = {"peak_flops_float32", "peak_flops_bfloat16", "memory_bytes_per_s", "link_bytes_per_s"}
    assert of_the_device <= set(config.hardware.sources)
    assert not {"network_bytes_per_s", "price_usd_per_hour", "devices_per_node"} & set(config.hardware.sources)


def test_auto_leaves_the_figures_of_an_unknown_device_open():
    config = resolved(device=Device("cuda", "Tesla T4", 1, 16 * 2**30, False))
    assert config.hardware.peak_flops_bfloat16 is None and config.train.precision == "float32"
    assert config.optimizer.warmup_steps == 5000


@pytest.mark.parametrize("overrides", [["model=gpt_1b", "parallel=pp4"], ["model=gpt_124m"], ["train.steps=12"], []])
def test_the_first_step_moves_a_logit_by_about_one(overrides):
    """Wide models without a warm-up are thrown off by the published rate in one step."""
    config = resolved(*overrides)
    model, first = config.model, config.optimizer.learning_rate / max(1, config.optimizer.warmup_steps)
    assert first * model.hidden * model.feedforward * model.blocks <= 100 * 1.05  # the rate is given in two digits
    assert config.optimizer.learning_rate > 0
