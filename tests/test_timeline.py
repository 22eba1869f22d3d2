"""Timelines of real processes: planted causes named with their size, the trace format, what a run leaves."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from commands import SMALL, TRAIN, run
from composing import resolved

import cases
from pipeline import picture, trace
from pipeline.bubble import PARTS, explain
from pipeline.draw import COLOURS
from pipeline.engines.base import Batch
from pipeline.engines.emulated import CREDIT_S, EmulatedEngine, Hardware
from pipeline.schedule import Action, make_schedule
from pipeline.simulate import simulate
from pipeline.spans import RankStep, Timing
from ranks import run_ranks
from training import spent
from training.build import build_engine
from training.ranks import Ranks
from training.timeline import Tracer, crowded, kept_steps

# --- planted in processes that only wait, which follow theory: gpipe's makespan is (m + p - 1)(F + B) ---

P, M, F, B = 3, 4, 0.04, 0.08
SLOW, LINK_S, HOST_S = 1.75, 0.12, 0.03
CAUSES = {"none": {}, "stage": {"slow": 1}, "link": {"link": {1, 2}}, "host": {"host": 1}}


def _hardware(slow: int | None = None, link: set = frozenset(), host: int | None = None) -> Hardware:
    return Hardware(
        lambda action: {"F": F, "B": B}[action.kind] * (SLOW if action.stage == slow else 1),
        transfer=lambda sender, receiver: 0.0,
        latency=lambda sender, receiver: LINK_S if {sender, receiver} == link else 0.0,
        host=lambda rank: HOST_S if rank == host else 0.0,
    )


def _measured(rank: int, world: int) -> dict[str, RankStep]:
    """A flush with each cause; again, up to five times, where this machine was late and so added causes of its own."""
    steps = {}
    for name, planted in CAUSES.items():
        for _ in range(5):
            engine = EmulatedEngine(make_schedule("gpipe", P, M), _hardware(**planted), rank=rank)
            engine.connect()
            dist.barrier()
            engine.clock.begin()
            engine.flush()
            steps[name] = engine.clock.end()
            late = [None] * world
            dist.all_gather_object(late, engine.accelerator.lateness_s)
            if max(late) < CREDIT_S:
                break
    return steps


@pytest.fixture(scope="module")
def explained():
    ranks = run_ranks(_measured, P)
    return {name: explain(make_schedule("gpipe", P, M), [rank[name] for rank in ranks]) for name in CAUSES}


def _near(values: list[float], expected: list[float]) -> None:
    assert values == pytest.approx(expected, abs=0.025)  # of steps of 0.7 s


def test_nothing_planted_is_schedule_idle_alone(explained):
    parts = explained["none"].parts
    _near(parts["schedule_idle_s"], [(P - 1) * (F + B)] * P)
    for name in ("imbalance_idle_s", "exposed_communication_s", "host_gap_s"):
        _near(parts[name], [0.0] * P)
    assert explained["none"].bubble_fraction == pytest.approx((P - 1) / (M + P - 1), abs=0.03)


def test_a_slow_stage_is_named_with_its_size(explained):
    parts, mean = explained["stage"].parts, (F + B) * (P - 1 + SLOW) / P
    idle = (P - 1) * (F + B) + M * SLOW * (F + B)  # makespan: what is left of it is idle
    _near(parts["compute_s"], [M * (F + B), M * SLOW * (F + B), M * (F + B)])
    _near(parts["imbalance_idle_s"], [idle - compute - (P - 1) * mean for compute in parts["compute_s"]])
    _near(parts["exposed_communication_s"], [0.0] * P)
    _near(parts["host_gap_s"], [0.0] * P)


def test_a_slow_link_is_named_with_its_size(explained):
    found = explained["link"]
    _near(found.parts["exposed_communication_s"], [2 * LINK_S] * P)  # through the forwards, and through the backwards
    _near(found.where["exposed_communication_s"], [0.0, LINK_S, LINK_S])
    _near([found.links[1, 2], found.links[2, 1]], [LINK_S] * 2)
    _near(found.parts["imbalance_idle_s"], [0.0] * P)
    _near(found.parts["host_gap_s"], [0.0] * P)


def test_a_slow_host_is_named_with_its_size(explained):
    found = explained["host"]
    _near(found.parts["host_gap_s"], [2 * M * HOST_S] * P)  # before each of its actions
    _near(found.where["host_gap_s"], [0.0, 2 * M * HOST_S, 0.0])
    _near(found.parts["imbalance_idle_s"], [0.0] * P)
    _near(found.parts["exposed_communication_s"], [0.0] * P)


# --- what a rank gathers ---


def _two_pipelines(rank: int, world: int, folder: str) -> dict:
    """Ranks 0 and 2 are one pipeline, 1 and 3 its replica."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    engine = EmulatedEngine(make_schedule("gpipe", 2, 2), _hardware(), rank=rank // 2, group=groups[rank % 2])
    config = resolved("parallel=pp2_dp2", "train.log_every=1", "train.trace=[1]", "train.steps=1")
    recorder = SimpleNamespace(run_dir=Path(folder)) if rank == 0 else None
    tracer = Tracer(config, engine, Ranks(rank, world, rank, torch.device("cpu")), recorder, 0)
    engine.clock.begin()
    engine.flush()
    return tracer.after_step(1, engine.clock.end())


def test_rank_0_s_pipeline_is_explained_beside_its_replicas(tmp_path):
    figures, *others = run_ranks(_two_pipelines, 4, str(tmp_path))
    assert others == [{}] * 3
    assert figures["time"]["compute_s"] == pytest.approx([2 * (F + B)] * 2, rel=0.2)
    about = json.loads((tmp_path / "timeline.json").read_text())["otherData"]
    assert about["ranks"] == [0, 2] and "[0, 2] of all 4" in about["note"]


@pytest.mark.parametrize("engine", ["single", "fairscale"])
def test_engines_of_one_process(engine, tmp_path):
    case = cases.config(engine=engine, stages=1 if engine == "single" else 2, chunks=2, blocks=2)
    case.train.log_every, case.train.trace, case.train.steps = 1, [1], 1
    built = build_engine(case, rank=0, device=torch.device("cpu"))
    tracer = Tracer(case, built, Ranks(0, 1, 0, torch.device("cpu")), SimpleNamespace(run_dir=tmp_path), 0)
    try:
        built.clock.begin()
        built.step(Batch(*cases.tokens(4)), 1.0)
        measured = built.clock.end()
        figures = tracer.after_step(1, measured)
        note = tracer.close()
    finally:
        built.close()
    document = json.loads((tmp_path / "timeline.json").read_text())
    _check_trace(document, 1)
    names = [event["name"] for event in document["traceEvents"] if event["ph"] == "X"]
    if engine == "single":
        assert names == ["F 0", "B 0", "F 1", "B 1"] and note is None
        assert sum(ranks[0] for ranks in figures["time"].values()) == pytest.approx(measured.end_s - measured.begin_s)
        assert figures["bubble_fraction_ideal"] == 0.0 and abs(figures["time"]["schedule_idle_s"][0]) < 1e-9
    else:
        assert names == ["flush"] and "no bubble is measured" in note
        assert set(figures) == {"data_wait_s"}, "what cannot be known is not written"


@pytest.mark.parametrize("ends", [None, RuntimeError("a rank died")])
def test_a_long_list_of_steps_is_written_a_few_times_and_is_there_however_the_run_ends(ends, tmp_path, monkeypatch):
    case = cases.config(engine="single", stages=1, chunks=1, blocks=1)
    case.train.log_every, case.train.trace, case.train.steps = 1, list(range(1, 101)), 100
    built = build_engine(case, rank=0, device=torch.device("cpu"))
    step = RankStep(0.0, 2.0, [Timing(Action(0, "F", 0), 0.0, 1.0), Timing(Action(0, "B", 0), 1.0, 2.0)], [])
    monkeypatch.setattr(Tracer, "_draw", lambda self: None)
    path, sizes = tmp_path / "timeline.json", []

    def steps_there() -> int:
        return len(
            {event["args"]["step"] for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"}
        )

    with (
        contextlib.suppress(RuntimeError),
        Tracer(case, built, Ranks(0, 1, 0, torch.device("cpu")), SimpleNamespace(run_dir=tmp_path), 0) as tracer,
    ):
        for number in range(1, 101):
            tracer.after_step(number, step)
            sizes.append(path.stat().st_size)
            assert 2 * steps_there() > number  # what a kill would leave
            if ends is not None and number == 77:
                raise ends
    assert steps_there() == (100 if ends is None else 77)
    assert len(set(sizes)) == (8 if ends is None else 7)  # 1, 2, 4 … 64, and 100
    assert list(tmp_path.iterdir()) == [path]


# --- the trace ---


def _planned(name: str = "1f1b", latency: float = 0.1) -> tuple:
    schedule = make_schedule(name, 2, 4)
    timeline = simulate(schedule, forward=1.0, backward=2.0, transfer_latency_s=latency)
    return schedule, timeline, picture.planned_step(schedule, timeline, 0.5, 0.25)


def _check_trace(document: dict, ranks: int) -> None:
    """Against the Trace Event Format: complete events that do not overlap on a row, and flows that bind to slices."""
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    for event in slices:
        assert {"name", "cat", "pid", "tid", "ts", "dur", "args"} <= set(event) and event["dur"] >= 0
        assert event["args"]["step"] >= 1 and event["tid"] in range(ranks)
    for rank in range(ranks):
        row = sorted((event["ts"], event["dur"]) for event in slices if event["tid"] == rank)
        for (start, length), (following, _) in zip(row, row[1:], strict=False):
            assert start + length <= following + 0.002, "slices of a row overlap"
    named = [e["args"]["name"] for e in document["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"]
    assert named == [f"rank {rank}" for rank in range(ranks)]
    flows: dict[str, list[dict]] = {}
    for event in document["traceEvents"]:
        if event["ph"] in "sf":
            flows.setdefault(event["id"], []).append(event)
            around = [e for e in slices if e["tid"] == event["tid"] and e["ts"] <= event["ts"] <= e["ts"] + e["dur"]]
            assert any(e["cat"] in "FBI" for e in around), "an arrow that touches no action"
    for ends in flows.values():
        start, finish = sorted(ends, key=lambda event: event["ph"] == "f")
        assert (start["ph"], finish["ph"], finish["bp"]) == ("s", "f", "e")
        assert start["ts"] <= finish["ts"] and start["tid"] != finish["tid"]


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_v"])
def test_the_trace_has_every_action_what_it_waited_for_and_an_arrow_for_each_message(name):
    schedule, _, steps = _planned(name)
    document = trace.document(trace.names("a run", 2) + trace.events(7, schedule, steps, 0.0), {})
    assert json.loads(json.dumps(document)) == document
    _check_trace(document, 2)
    found = [e for e in document["traceEvents"] if e["ph"] == "X"]
    actions = [(e["tid"], e["args"]["stage"], e["name"]) for e in found if e["cat"] in "FBIW"]
    expected = [(r, a.stage, f"{a.kind} {a.microbatch}") for r, row in enumerate(schedule.actions) for a in row]
    assert sorted(actions) == sorted(expected)
    crossing = [
        a
        for row in schedule.actions
        for a in row
        for other in [a.stage + (1 if a.kind == "F" else -1)]
        if a.kind != "W" and 0 <= other < schedule.num_stages and schedule.rank_of[other] != schedule.rank_of[a.stage]
    ]
    assert sum(e["ph"] == "s" for e in document["traceEvents"]) == len(crossing)
    waited = next(e for e in found if e["name"] == "wait F 0")
    assert (waited["ts"], waited["dur"], waited["args"]["from_rank"]) == (0.0, 1e6, 0)
    received = next(e for e in found if e["name"] == "receive F 0")
    assert (received["ts"], received["dur"]) == (1e6, pytest.approx(1e5)), "from the end of F 0 on rank 0"


def test_the_picture_draws_both_on_one_scale(tmp_path):
    from PIL import Image

    schedule, timeline, planned = _planned(latency=0.0)
    measured = [rank.scaled(2.0) for rank in planned]  # twice as slow as predicted
    picture.draw(tmp_path / "p.png", schedule, measured, planned, title="t", notes=["n"])
    image = Image.open(tmp_path / "p.png").convert("RGB")
    rows = [y for y in range(image.height) if image.getpixel((picture._LEFT + 3, y)) == COLOURS["F"]]
    bars = [y for y in rows if y - 1 not in rows]
    assert len(bars) == 3  # rank 0's F 0 measured, predicted, and the legend
    wide = []
    for y in bars[:2]:
        x = picture._LEFT
        while image.getpixel((x, y + 1)) == COLOURS["F"]:
            x += 1
        wide.append(x - picture._LEFT)
    # rank 0 runs F 0, F 1, then waits: two bars of 2 and 1 units that touch, a pixel between them
    unit = picture._WIDTH / (2 * (timeline.makespan + 0.75))
    assert wide == pytest.approx([2 * unit, unit], abs=2)


# --- which steps, which notes ---


def test_steps_that_are_kept():
    assert kept_steps(3, 0, 100) == {3, 4, 5}  # after two of warm-up
    assert kept_steps(3, 40, 100) == {43, 44, 45}  # of a run that goes on
    assert kept_steps(3, 0, 4) == {2, 3, 4} and kept_steps(3, 0, 2) == {1, 2} and kept_steps(0, 0, 9) == set()
    assert kept_steps([10, 20], 0, 15) == {10, 20}


@pytest.mark.parametrize("value", ["-1", "[0]", "yes", "1.5", "[1,two]"])
def test_what_is_no_choice_of_steps_is_refused(value):
    from conf.check import check_values

    with pytest.raises(ValueError, match="train.trace="):
        check_values(resolved(f"train.trace={value}"))


def test_more_ranks_than_cores_are_told(monkeypatch):
    monkeypatch.setattr("training.timeline.num_cores", lambda: 2)
    assert crowded(resolved("parallel=pp2")) is None
    assert "4 ranks share 2 cores" in crowded(resolved("parallel=pp4"))
    assert crowded(resolved("parallel=pp4", "hardware=a100_80gb")) is None


def test_parts_of_a_run_still_sum_to_a_step():
    record = lambda idle, where: {  # noqa: E731
        "time": {"compute_s": [1.0, 2.0], "schedule_idle_s": [idle, idle / 3]},
        "where": {"host_gap_s": [where, 0.0]},
    }
    steps = [record(idle, idle) for idle in (0.1, 0.7, 0.2, 0.3, 50.0, 0.4, 0.2, 0.0)]
    found = spent.typical(steps)
    assert found["time"]["schedule_idle_s"] == pytest.approx([0.275, 0.275 / 3])  # 0.2, 0.2, 0.3, 0.4
    assert found["where"]["host_gap_s"] == pytest.approx([0.275, 0.0])
    assert spent.typical([*steps, {"time": {"compute_s": [1.0]}}]) == {"time": {"compute_s": [1.0]}}


def test_ranks_of_rank_0_s_pipeline_keep_their_numbers():
    time = {name: [0.0, 0.0] for name in PARTS} | {"compute_s": [1.0, 2.0]}
    assert "on rank 1\n" in spent.table({"time": time})
    text = spent.table({"time": time, "peak_memory_bytes": [1, 1, 1, 1]})
    assert "on rank 2 (pipeline rank 1)" in text


# --- a run ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("run")
    done = run(*TRAIN, *SMALL, "train.steps=4", "train.accumulate=2", "train.trace=2", "parallel.chunks=2", cwd=cwd)
    assert done.returncode == 0, done.stderr
    (path,) = (cwd / "experiments" / "runs").iterdir()
    (path / "stdout").write_text(done.stdout)
    return path


def test_a_run_s_logged_steps_sum_to_the_step(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "time" in record]
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    for step in steps:
        assert tuple(step["time"]) == PARTS and all(len(ranks) == 2 for ranks in step["time"].values())
        assert sum(ranks[0] for ranks in step["time"].values()) == pytest.approx(step["step_time_s"], rel=0.01)
        assert step["bubble_fraction_ideal"] == pytest.approx(1 / 3)  # (p - 1) / (m + p - 1)
        assert 0 < step["bubble_fraction"] < 1 and 0 <= step["data_wait_s"] < step["step_time_s"]


def test_a_run_s_result_and_console_say_where_the_time_went(folder):
    result = json.loads((folder / "result.json").read_text())
    error = result["predicted"]["bubble_fraction"] / result["bubble_fraction"] - 1
    assert result["error"]["bubble_fraction"] == pytest.approx(error)
    assert tuple(result["time"]) == PARTS and set(result["where"]) == {"exposed_communication_s", "host_gap_s"}
    shown = (folder / "stdout").read_text()
    assert "exposed communication" in shown
    line = next(line for line in shown.splitlines() if line.startswith("bubble_fraction:"))
    assert line.startswith(f"bubble_fraction: {result['bubble_fraction']:.3f} measured, 0.333 ideal")
    assert line.endswith(f"{result['predicted']['bubble_fraction']:.3f} predicted")


def test_a_run_s_timeline(folder):
    document = json.loads((folder / "timeline.json").read_text())
    _check_trace(document, 2)
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert {event["args"]["step"] for event in slices} == {3, 4}
    kinds = {event["cat"] for event in slices}
    assert {"F", "B", "send", "receive", "wait", "reduce", "optimizer", "data"} <= kinds
    forwards = {e["name"] for e in slices if e["cat"] == "F"}
    assert forwards == {"F 0", "F 1", "F 2", "F 3"}, "micro-batches of both flushes"
    assert document["otherData"]["clocks"]["shared"] is True and "uncertainty_s" in document["otherData"]["clocks"]
    assert (folder / "timeline.png").stat().st_size > 5000
