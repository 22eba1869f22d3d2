"""Emulated hardware: the engine on waits against the simulator, the planned durations, the whole of a run, refusals."""

import json
import resource
import signal
import statistics
import time

import pytest
import torch
from commands import TRAIN, processes_in, run, start, wait_for
from composing import resolved

from conf.check import check
from pipeline.action import Action
from pipeline.engines.emulated import EmulatedEngine, Hardware
from pipeline.schedule import make_schedule
from pipeline.simulate import simulate
from planning.balance import resolved_balance
from planning.durations import durations
from planning.stack import get_stack
from planning.step import step_time
from ranks import run_ranks
from training.command import EXIT_STOPPED
from training.emulate import hardware, longest_wait_s, scaled
from training.record import read_result
from training.watch import read

# --- the engine ---

# seconds of F, I and W of each of four model stages: no two the same
FORWARD, INPUT, WEIGHT = [0.03, 0.02, 0.04, 0.03], [0.02, 0.03, 0.03, 0.04], [0.03, 0.01, 0.02, 0.02]
BACKWARD = [i + w for i, w in zip(INPUT, WEIGHT, strict=True)]
CASES = [  # schedule, ranks' interleave, chunks, transfer, latency
    ("1f1b", 1, 6, 0.002, 0.001),
    ("zb_h1", 1, 6, 0.002, 0.001),
    ("gpipe", 1, 3, 0.05, 0.01),  # the link is what is slowest
]
FOLDED = [("zb_v", 2, 4, 0.002, 0.001), ("interleaved_1f1b", 2, 4, 0.002, 0.001)]  # four model stages on two ranks


def seconds_of_flushes(rank: int, world: int, cases: list) -> list[list[float]]:
    """Of each case, how long three flushes took by the wall clock."""
    result = []
    for name, interleave, chunks, transfer, latency in cases:
        costs = {"F": FORWARD, "I": INPUT, "W": WEIGHT, "B": BACKWARD}
        emulated = Hardware(
            lambda action, costs=costs: costs[action.kind][action.stage],
            lambda sender, receiver, transfer=transfer: transfer,
            lambda sender, receiver, latency=latency: latency,
        )
        engine = EmulatedEngine(make_schedule(name, world, chunks, interleave), emulated, rank=rank)
        engine.connect()
        seconds = []
        for _ in range(3):
            torch.distributed.barrier()
            begin = time.perf_counter()
            engine.accelerator.begin()
            engine.flush()
            end = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            torch.distributed.all_reduce(end, op=torch.distributed.ReduceOp.MAX)
            seconds.append(float(end))
        result.append(seconds)
    return result


@pytest.mark.parametrize("ranks, cases", [(4, CASES), (2, FOLDED)])
def test_the_wall_clock_agrees_with_the_simulator(ranks, cases):
    measured = run_ranks(seconds_of_flushes, ranks, cases)[0]
    for (name, interleave, chunks, transfer, latency), seconds in zip(cases, measured, strict=True):
        schedule = make_schedule(name, ranks, chunks, interleave)
        times = dict(forward=FORWARD, backward_input=INPUT, backward_weight=WEIGHT)
        simulated = simulate(schedule, **times, transfer_s=transfer, transfer_latency_s=latency).makespan
        assert min(seconds) > 0.97 * simulated, name  # at most CREDIT_S sooner
        assert min(seconds) < 1.15 * simulated, name  # of a machine that other tests may load


def test_jitter_is_drawn_by_seed_and_action():
    drawn = []
    for seed in (0, 0, 1):
        emulated = Hardware(lambda a: 1.0, lambda s, r: 0.0, lambda s, r: 0.0, jitter=0.1, seed=seed)
        drawn.append([emulated.draw(Action(0, "F", microbatch), flush=1) for microbatch in range(500)])
    assert drawn[0] == drawn[1] != drawn[2]
    assert abs(statistics.mean(drawn[0]) - 1) < 0.02 and 0.085 < statistics.stdev(drawn[0]) < 0.115


# --- the planned durations ---


def planned(*overrides: str):
    config = resolve_cut("hardware=emulated_a100_80gb", *overrides)
    return config, durations(config)


def resolve_cut(*overrides: str):
    return resolved_balance(resolved(*overrides))[0]


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=gpt_7b", "parallel=pp4", "train.accumulate=2"],
        ["model=gpt_1b", "parallel=pp8", "parallel.schedule=zb_h1", "parallel.checkpoint=except_last"],
        ["model=gpt3_175b", "parallel=megatron_8x4x16", "parallel.schedule=interleaved_1f1b", "parallel.chunks=8"],
    ],
)
def test_they_are_those_of_the_plan(overrides):
    config, times = planned(*overrides)
    parallel, m = config.parallel, config.parallel.chunks
    kinds = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}
    stages = range(parallel.stages * parallel.interleave)
    flush = simulate(
        make_schedule(parallel.schedule, parallel.stages, m, parallel.interleave),
        **{n: [[times.of(stage, kind, k == m - 1) for k in range(m)] for stage in stages] for n, kind in kinds.items()},
        transfer_s=times.transfer_s,
        transfer_latency_s=times.latency_s,
    )
    total = config.train.accumulate * flush.makespan + times.reduction_s + times.optimizer_s
    assert total == pytest.approx(step_time(config, get_stack("torch")).total, rel=1e-9)


def test_what_is_planted_is_there_and_time_is_stretched():
    overrides = "model=gpt_7b parallel=pp4 emulate.time_scale=3 emulate.slow_rank=2 emulate.slow_factor=1.5 "
    overrides += "emulate.slow_link=1 emulate.slow_link_factor=7 emulate.slow_host=0 emulate.slow_host_s=0.25"
    config, times = planned(*overrides.split())
    emulated = hardware(config, times)
    schedule = make_schedule("1f1b", 4, config.parallel.chunks)
    for row in schedule.actions:
        for action in row:
            factor = 4.5 if action.stage == 2 else 3.0
            expected = times.of(action.stage, action.kind, False) * factor
            assert emulated.duration(action) == pytest.approx(expected)
    for pair, factor in {(0, 1): 3, (1, 2): 21, (2, 1): 21, (2, 3): 3}.items():
        assert emulated.transfer(*pair) == pytest.approx(factor * times.transfer_s)
        assert emulated.latency(*pair) == pytest.approx(factor * times.latency_s)
    assert [emulated.host(rank) for rank in range(4)] == [0.75, 0, 0, 0]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_the_longest_wait_is_a_step_with_what_is_planted(schedule):
    overrides = ["model=gpt_7b", "parallel=pp4", f"parallel.schedule={schedule}", "train.accumulate=2"]
    config, times = planned(*overrides, "emulate.time_scale=3")
    step_s = step_time(config, get_stack("torch")).total
    assert longest_wait_s(config, times) == pytest.approx(3 * step_s, rel=1e-9)
    flushes, chunks = 2, config.parallel.chunks
    ends_s = 3 * (times.reduction_s + times.optimizer_s)
    config.emulate.jitter = 0.1
    assert longest_wait_s(config, times) > 1.3 * (3 * step_s - ends_s)  # five times it; messages do not jitter
    config.emulate.jitter, config.emulate.slow_host, config.emulate.slow_host_s = 0.0, 1, 10.0
    actions = chunks * (3 if schedule == "zb_h1" else 2)
    hosts_s = 3 * flushes * actions * 10.0
    assert hosts_s < longest_wait_s(config, times) < 3 * step_s + hosts_s


def test_figures_in_the_emulated_seconds():
    figures = {"step_time_s": 6.0, "tokens_per_s": 10.0, "steps": 3, "time": {"compute_s": [3.0, 1.5]}, "loss": 2.0}
    expected = {"step_time_s": 2.0, "tokens_per_s": 30.0, "steps": 3, "time": {"compute_s": [1.0, 0.5]}, "loss": 2.0}
    assert scaled(figures, 3.0) == expected


# --- whole runs ---

SHORT = ["hardware=emulated_a100_80gb", "model=gpt_7b", "train.steps=2"]


@pytest.fixture
def cwd(tmp_path):
    yield tmp_path
    assert processes_in(tmp_path) == []


def test_a_run_is_marked_and_learns_nothing(cwd):
    limit = "train.stall_timeout_s=0.1"  # far below a step: planned waits are no stall
    batch = ["parallel.chunks=4", "train.global_batch=8", "emulate.time_scale=3"]
    done = run(*TRAIN, *SHORT, *batch, "model.blocks=16", limit, cwd=cwd, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "s by this machine's clock: train.stall_timeout_s=0.1 counts beyond it" in done.stdout
    assert "EMULATED by 2 processes" in done.stdout and "completed (emulated): experiments/runs/" in done.stdout
    assert "loss" not in done.stdout
    (run_dir,) = (cwd / "experiments" / "runs").iterdir()
    result, plan = read_result(run_dir), json.loads((run_dir / "plan.json").read_text())
    assert result["emulated"] is True and result["steps"] == 2
    # in the emulated hardware's seconds; other tests may load this machine
    assert -0.2 < result["error"]["step_time_s"] < 0.02 and -0.2 < result["error"]["bubble_fraction"] < 0.02
    assert not {"loss", "validation_loss", "peak_memory_bytes", "peak_resident_bytes"} & set(result)
    assert len(result["predicted"]["peak_memory_bytes"]) == len(plan["durations"]["forward"]) == 2
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [(record["step"], record["emulated"]) for record in records] == [(1, True), (2, True)]
    assert json.loads((run_dir / "corpus.json").read_text()) is None and not (run_dir / "checkpoints").exists()


def test_a_sweep_with_what_does_not_fit_and_what_cannot_be(cwd):
    swept = ["parallel.schedule=dualpipe_v", "parallel.chunks=2,4", "model.blocks=8,96"]
    done = run(*TRAIN, "-m", *SHORT, *swept, "emulate.time_scale=0.1", "train.global_batch=8", cwd=cwd, timeout=120)
    assert done.returncode == 1, done.stderr
    folders = sorted(path for path in (cwd / "experiments" / "runs").iterdir() if path.is_dir())
    results = [read_result(folder) for folder in folders]
    assert [result["status"] for result in results] == ["skipped", "skipped", "completed", "out_of_memory"]
    assert all(result["emulated"] for result in results)
    assert "at least 2 x stages" in results[0]["reason"] and "80.00 GiB of memory" in results[3]["failure"]
    assert "1 of 4 jobs done\n" in done.stdout and "3 of 4 jobs done, about" in done.stdout


def test_sixteen_ranks_of_gpt3_start_in_the_time_of_one_import(cwd):
    layout = "model=gpt3_175b parallel.stages=16 parallel.tensor=8 parallel.chunks=16 parallel.checkpoint=always"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [*TRAIN, "hardware=emulated_a100_80gb", *layout.split(), "train.global_batch=16", "train.steps=1"]
    done = run(*command, "emulate.time_scale=0.2", "train.trace=0", cwd=cwd, timeout=120)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 25, "of both cores: 15 s of waiting for the ranks would be 30"


ENDLESS = [*SHORT, "model=gpt_tiny", "parallel.stages=3", "emulate.time_scale=1e6"]  # hours in a step


def test_the_time_limit_ends_a_run_in_the_middle_of_a_step(cwd):
    done = run(*TRAIN, *ENDLESS, "train.max_minutes=0.02", cwd=cwd, timeout=30)
    assert done.returncode == 0, done.stderr
    (warning,) = [line for line in done.stderr.splitlines() if "planned to take" in line]
    assert warning.startswith("warning: ") and "train.max_minutes=0.02" in warning
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("time ")]
    (run_dir,) = (cwd / "experiments" / "runs").iterdir()
    step_s = json.loads((run_dir / "plan.json").read_text())["predicted"]["step_time_s"]
    told, unit = line.split()[1:3]
    assert unit == "hours" and float(told) == pytest.approx(2 * step_s * 1e6 / 3600, rel=0.01)
    result = read_result(run_dir)
    assert (result["status"], result["reason"], result["steps"]) == ("stopped", "max_minutes", 0)
    assert result["emulated"] is True and "step_time_s" not in result  # a step that was cut is none


def test_a_signal_ends_a_run_in_the_middle_of_a_step(cwd):
    process = start(*TRAIN, *ENDLESS, cwd=cwd)
    wait_for(lambda: any("1F0" in state or "is in 0F0" in state for state in states(cwd)))
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=8)
    assert process.returncode == EXIT_STOPPED, errors
    assert "stopped (emulated)" in output and "planned to take" not in errors
    (run_dir,) = (cwd / "experiments" / "runs").iterdir()
    result = read_result(run_dir)
    assert (result["status"], result["reason"], result["steps"]) == ("stopped", "signal", 0)


def states(cwd) -> list[str]:
    """What each rank of the one run is doing."""
    folders = list((cwd / "experiments").glob("runs/*"))
    found = [read(folder, rank) for folder in folders for rank in range(3)]
    return [str(state) for state in found if state is not None]


# --- bad input ---

REFUSED = [
    (["parallel=single"], ["emulate.enabled=true", "parallel.engine=single", "parallel.engine=torch"]),
    (["emulate.time_scale=0"], ["emulate.time_scale=0", "more than 0"]),
    (["emulate.jitter=1"], ["emulate.jitter=1", "less than 1"]),
    (["emulate.slow_rank=2"], ["emulate.slow_rank=2", "parallel.stages=2", "0 to 1"]),
    (["emulate.slow_host=7"], ["emulate.slow_host=7", "parallel.stages=2"]),
    (["emulate.slow_link=1"], ["emulate.slow_link=1", "0 to 0"]),
    (["parallel.balance=time"], ["parallel.balance=time", "parallel.balance=auto"]),
    (["resume=auto"], ["resume=auto", "no checkpoint"]),
    (["hardware=cpu", "emulate.jitter=0.1"], ["emulate.jitter=0.1", "emulate.enabled=true"]),
]


@pytest.mark.parametrize("overrides, words", REFUSED)
def test_what_cannot_be_emulated_is_refused(overrides, words):
    with pytest.raises(ValueError) as caught:
        check(resolved("hardware=emulated_a100_80gb", *overrides))
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


def test_under_torchrun_it_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="one machine"):
        check(resolved("hardware=emulated_a100_80gb"))


def test_a_figure_that_is_missing_is_named_before_a_rank_starts(cwd):
    unknown = ("hardware=emulated_h200", "hardware.network_bytes_per_s=null")
    done = run(*TRAIN, *unknown, "parallel.stages=10", "model.blocks=10", cwd=cwd)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "no network_bytes_per_s" in done.stderr and "parallel.stages=10" in done.stderr
    assert not (cwd / "experiments").exists()
