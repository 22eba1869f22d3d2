"""Predicted bytes of a rank against closed forms and against real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conf.schema import (
    DataConfig,
    HardwareConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RootConfig,
    TrainConfig,
    to_dict,
)
from models.describe import activation_bytes, describe
from pipeline.action import Action
from planning.balance import resolved_balance
from planning.memory import RUNTIME_BYTES, machine_memory_bytes, rank_memory
from planning.peak import peak_memory
from planning.predict import ranks_memory
from planning.step import Layout

MIB = 2**20


def make_config(model=None, parallel=None, train=None, optimizer=None) -> RootConfig:
    """Four chunks of 8 sequences of 128 tokens; a small GPT on two ranks, AdamW, float32."""
    small = dict(name="m", family="gpt", blocks=4, hidden=128, heads=4, positions=128, vocabulary=256)
    return RootConfig(
        model=ModelConfig(**small | (model or {})),
        parallel=ParallelConfig(**dict(name="p", stages=2, chunks=4, interleave=1) | (parallel or {})),
        optimizer=OptimizerConfig(**dict(name="adamw", learning_rate=1e-3) | (optimizer or {})),
        hardware=HardwareConfig(name="cpu", device="cpu"),
        data=DataConfig(name="d", source="text"),
        train=TrainConfig(**dict(global_batch=32, sequence=128, precision="float32") | (train or {})),
    )


def predict(config: RootConfig, start=0, stop=None, held=1) -> dict[str, int]:
    return rank_memory(config, describe(config.model)[start:stop], held)


def peaks(config: RootConfig) -> list[dict[str, int]]:
    config = resolved_balance(config)[0]
    return ranks_memory(config, Layout.of(config))


@pytest.mark.parametrize(
    "optimizer, precision, bytes_each",
    [
        ({"name": "adamw"}, "float32", 16),
        ({"name": "adamw"}, "bfloat16", 16),  # autocast: float32 weights
        ({"name": "adamw"}, "float64", 32),
        ({"name": "sgd"}, "float32", 8),
        ({"name": "sgd", "momentum": 0.9}, "float32", 12),
    ],
)
def test_bytes_of_a_parameter(optimizer, precision, bytes_each):
    config = make_config(optimizer=optimizer, train={"precision": precision})
    parts = predict(config, 1, 3)
    one_block = 12 * 128**2 + 13 * 128
    assert parts["weights"] + parts["gradients"] + parts["optimizer"] == 2 * one_block * bytes_each


def test_total_is_the_sum_of_its_parts():
    parts = predict(make_config(), held=2)
    assert parts["total"] == sum(value for key, value in parts.items() if key != "total")
    for parts in peaks(make_config()):
        assert parts["total"] == sum(value for key, value in parts.items() if key != "total")


def test_both_copies_of_a_tied_weight_are_held():
    tied, untied = (predict(make_config(model={"tied": tied}))["weights"] for tied in (True, False))
    assert tied == untied


def test_logits_only_where_the_head_is():
    numbers = 8 * 128 * 256
    assert predict(make_config(), 0, 3)["logits"] == 0
    assert predict(make_config(), 3, None, held=1)["logits"] == 4 * numbers * 4  # logits, log-probabilities, gradients
    single = make_config(parallel={"engine": "single", "stages": 1})
    assert predict(single)["logits"] == 3 * numbers * 4


def test_messages_of_first_middle_and_last_rank():
    """By hand: 4 buffers for inputs, 4 for gradients; all sent so far at the last moment at which most is held."""
    message = 8 * 128 * 128 * 4
    config = make_config(parallel={"stages": 3, "balance": [2, 2, 3]}, model={"blocks": 4})
    first, middle, last = (parts["messages"] / message for parts in peaks(config))
    assert first == 4 + 4  # 0F0 0F1 0F2 0B0 0F3 0B1: four outputs sent
    assert middle == 8 + 4 + 2  # 1F0 1F1 1B0 1F2 1B1 1F3 1B2: four outputs, two gradients
    assert last == 4 + 3  # 2F3 2B3
    assert peaks(make_config(parallel={"engine": "single", "stages": 1}))[0]["messages"] == 0


def test_gradients_are_there_after_the_first_backward():
    """gpipe is fullest at the first backward when activations are larger than gradients, at the second else."""
    small, large = (make_config(parallel={"schedule": "gpipe"}, model={"hidden": hidden}) for hidden in (128, 2048))
    assert peaks(small)[0]["gradients"] < peaks(small)[0]["weights"] / 2
    assert peaks(large)[0]["gradients"] == peaks(large)[0]["weights"]


@pytest.mark.parametrize("interval, units", [(1, 4), (2, 2), (3, 2)])
def test_checkpointing_keeps_one_input_a_unit_and_one_whole_unit(interval, units):
    config = make_config(parallel={"checkpoint": "always", "checkpoint_interval": interval})
    block = activation_bytes(describe(config.model)[1], config.model, 8, 128, "float32", False)
    parts = predict(config, 1, 5, held=4)
    assert parts["activations"] == 4 * units * 8 * 128 * 128 * 4 + min(interval, 4) * block
    kept = predict(make_config(), 1, 5, held=4)["activations"]
    assert kept == 4 * 4 * block
    config.parallel.checkpoint = "except_last"
    assert parts["activations"] < predict(config, 1, 5, held=4)["activations"] < kept


def test_interleaved_micro_batches_hold_a_part_of_the_rank():
    config = make_config(parallel={"interleave": 2})
    whole = predict(make_config(), 1, 5, held=3)["activations"]
    assert predict(config, 1, 5, held=6)["activations"] == whole


TRAIN_A_RANK = """
import json, sys, torch
import models
from conf.schema import from_dict
from training.ranks import Ranks
torch.set_num_threads(1)
config, start, stop, held = from_dict(json.loads(sys.argv[1])), *map(int, sys.argv[2:])
model, T = config.model, config.train.sequence
B = config.train.global_batch // config.parallel.chunks
ranks = Ranks(0, 1, 0, torch.device("cpu"))

def train(layers, steps):
    optimizer = torch.optim.AdamW([p for _, module in layers for p in module.parameters()], fused=True)
    for step in range(steps):
        optimizer.zero_grad()
        waiting = []
        for _ in range(held):
            key = models.sample_keys(0, step, torch.arange(B)) if model.dropout else None
            tokens = torch.randint(model.vocabulary, (B, T))
            x = tokens if layers[0][0] == "embedding" else torch.randn(B, T, model.hidden, requires_grad=True)
            for _, module in layers:
                x = module(x, key)
            if layers[-1][0] == "head":
                waiting.append((models.token_loss(x, tokens), None))
            else:
                waiting.append((x, torch.randn_like(x)))
            del x
        while waiting:
            output, gradient = waiting.pop(0)
            output.backward(gradient)
            del output
        optimizer.step()

small = models.build(model, seed=0, start=1, stop=2)  # loads what torch loads at first use
x = small[0][1](torch.randn(1, 8, model.hidden))
x.sum().backward()
torch.optim.AdamW(small[0][1].parameters(), fused=True).step()
del small, x
ranks.start_counting_memory()
train(models.build(model, seed=0, start=start, stop=stop), 4)
print(ranks.peak_memory_bytes())
"""


@pytest.mark.parametrize(
    "model, start, stop, held",
    [
        (dict(hidden=1024, heads=16, blocks=4), 1, 3, 1),  # weights are most of it
        (dict(hidden=256, heads=4, blocks=8), 0, 5, 4),  # activations are
        (dict(hidden=256, heads=4, blocks=8, dropout=0.1), 5, 10, 2),
        (dict(hidden=256, heads=4, blocks=1, vocabulary=20_000), 1, 4, 2),  # logits are
    ],
)
def test_prediction_against_the_growth_of_a_real_process(model, start, stop, held):
    config = make_config(model=model, parallel={"engine": "single", "stages": 1})
    actions = [Action(0, kind, index) for kind in "FB" for index in range(held)]
    parts = peak_memory(config, {0: describe(config.model)[start:stop]}, actions, 0)
    arguments = [json.dumps(to_dict(config)), *map(str, (start, stop, held))]
    run = subprocess.run([sys.executable, "-c", TRAIN_A_RANK, *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    print({key: value // MIB for key, value in parts.items()}, int(run.stdout) // MIB)
    assert parts["total"] - RUNTIME_BYTES == pytest.approx(int(run.stdout), rel=0.35)  # malloc's holes vary that much


IDLE_RANK = """
import sys, torch.distributed as dist
import training.worker, training.record, pipeline.engines.torch_engine  # what a rank imports
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(sys.argv[2]), world_size=2)
dist.barrier()
rollup = dict(line.split(":") for line in open("/proc/self/smaps_rollup").readlines()[1:])
print(int(rollup["Pss"].split()[0]) * 1024)
dist.barrier()
"""


def test_runtime_against_two_idle_ranks(tmp_path):
    command = [sys.executable, "-c", IDLE_RANK, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    for measured in [int(rank.communicate(timeout=60)[0]) for rank in ranks]:
        assert RUNTIME_BYTES == pytest.approx(measured, rel=0.25)


def write_machine(root, available, cgroup, files):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    "cgroup, files, left",
    [
        ("", {}, 1000 * MIB),
        ("0::/job\n", {"job/memory.max": "max\n", "job/memory.current": f"{90 * MIB}\n"}, 1000 * MIB),
        (  # version 2: the limit is on a parent; unused file pages count as free
            "0::/job/part\n",
            {
                "job/memory.max": f"{300 * MIB}\n",
                "job/memory.current": f"{100 * MIB}\n",
                "job/memory.stat": f"anon 5\ninactive_file {40 * MIB}\n",
                "job/part/memory.max": "max\n",
                "job/part/memory.current": f"{90 * MIB}\n",
            },
            240 * MIB,
        ),
        (  # version 1, seen from inside a container: the group's path does not exist there
            "4:cpu,cpuacct:/x\n3:memory:/docker/abc\n0::/\n",
            {
                "memory/memory.limit_in_bytes": f"{500 * MIB}\n",
                "memory/memory.usage_in_bytes": f"{200 * MIB}\n",
                "memory/memory.stat": "total_inactive_file 0\n",
            },
            300 * MIB,
        ),
    ],
    ids=["no_groups", "no_limit", "version_2", "version_1"],
)
def test_machine_memory(tmp_path, cgroup, files, left):
    write_machine(tmp_path, 1000 * MIB, cgroup, files)
    assert machine_memory_bytes(str(tmp_path)) == left


def test_machine_memory_of_this_machine():
    total = Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]
    assert 0 < machine_memory_bytes() <= int(total) * 1024
