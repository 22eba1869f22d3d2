"""The run folder: what readers other than this project (json, TensorBoard) find in it, for every ending."""

import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from composing import resolved
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams import metadata as hparams_tags

from conf.schema import RootConfig, to_dict
from training.record import Recorder, finish_failed, hparams, read_result, summary, write_result


@pytest.fixture
def config() -> RootConfig:
    return resolved("train.steps=20")


def step(number: int, **figures) -> dict:
    figures = {"loss": 5.0 - number / 10, "step_time_s": 0.5, "tokens_per_s": 8192.0, **figures}
    return {"step": number, "memory_bytes": [100 + number, 200 - number], **figures}


def events(run_dir: Path) -> EventAccumulator:
    return EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()


def session(run_dir: Path) -> tuple[dict, int | None]:
    """The HParams of a run and the status of its session's end, as TensorBoard's own parser reads them."""
    content = events(run_dir).PluginTagToContent("hparams")
    start = hparams_tags.parse_session_start_info_plugin_data(content[hparams_tags.SESSION_START_INFO_TAG])
    values = {key: getattr(value, value.WhichOneof("kind")) for key, value in start.hparams.items()}
    end = content.get(hparams_tags.SESSION_END_INFO_TAG)
    return values, end and hparams_tags.parse_session_end_info_plugin_data(end).status


# --- metrics.jsonl and TensorBoard ---


def test_figures_reach_both_files(tmp_path, config):
    recorder = Recorder(tmp_path, config)
    for number in range(1, 6):
        recorder.step(step(number, gradient_norm=1.5, mfu=0.25))
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["step"] == number, "each line is on disk at once"
    recorder.validation(5, {"validation_loss": 4.0, "bits_per_byte": 5.77})
    recorder.finish("completed", {"split": [["embedding"], ["head"]]})
    seen = events(tmp_path)
    for tag, wanted in {
        "loss/train": [4.9, 4.8, 4.7, 4.6, 4.5],
        "optimizer/gradient_norm": [1.5] * 5,
        "throughput/mfu": [0.25] * 5,
        "memory/rank_0_bytes": [101, 102, 103, 104, 105],
        "memory/rank_1_bytes": [199, 198, 197, 196, 195],
    }.items():
        assert [point.value for point in seen.Scalars(tag)] == pytest.approx(wanted), tag
        assert [point.step for point in seen.Scalars(tag)] == [1, 2, 3, 4, 5]
    assert [point.value for point in seen.Scalars("loss/validation")] == [4.0]
    text = seen.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "global_batch: 32" in text


def test_the_same_curves_against_tokens_also_after_a_resume(tmp_path, config):
    tokens = 32 * 128  # train.global_batch x train.sequence
    recorder = Recorder(tmp_path, config)
    for number in (1, 2, 3):
        recorder.step(step(number))
    recorder.validation(3, {"validation_loss": 4.0, "bits_per_byte": 5.77})
    recorder.close()
    recorder = Recorder(tmp_path, config, done=2)
    recorder.step(step(3, loss=1.0))
    recorder.finish("completed")
    for tag, factor in (("loss/train", 1), ("over_tokens/loss/train", tokens)):
        points = [(point.step, point.value) for point in events(tmp_path).Scalars(tag)]
        assert points == [(factor, pytest.approx(4.9)), (2 * factor, pytest.approx(4.8)), (3 * factor, 1.0)], tag
    assert events(tmp_path).Scalars("over_tokens/loss/validation") == [], "of step 3, which was taken back"


def test_seconds_of_training_go_on_where_a_resumed_run_was(tmp_path, config):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step(1, elapsed_s=100.0)) + "\n")
    recorder = Recorder(tmp_path, config, done=1)
    recorder.step(step(2))
    recorder.close()
    assert 100.0 <= json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["elapsed_s"] < 130.0


def test_parts_of_a_step_by_rank_in_the_result_and_their_means_in_tensorboard(tmp_path, config):
    recorder = Recorder(tmp_path, config)
    for number, idle in ((1, 9.0), (2, 0.1), (3, 0.2), (4, 0.3)):  # the first is warm-up
        recorder.step(
            step(number, time={"compute_s": [1.0, 2.0], "schedule_idle_s": [idle, 0.0]}, bubble_fraction=idle)
        )
    result = recorder.finish("completed")
    assert result["time"] == {"compute_s": [1.0, 2.0], "schedule_idle_s": [pytest.approx(0.2), 0.0]}
    assert result["bubble_fraction"] == pytest.approx(0.2)
    seen = events(tmp_path)
    assert [point.value for point in seen.Scalars("time/compute_s")] == [1.5] * 4
    assert [point.value for point in seen.Scalars("bubble/fraction")] == pytest.approx([9.0, 0.1, 0.2, 0.3])


def test_timeline_plan_and_layout_reach_tensorboard(tmp_path, config):
    Image.new("RGB", (30, 20), "red").save(tmp_path / "timeline.png")
    plan = {"config": to_dict(config), "predicted": {"step_time_s": 0.125}, "devices": 2, "run": {"steps": 20}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    recorder = Recorder(tmp_path, config)
    recorder.step(step(1))
    recorder.finish("completed")
    seen = events(tmp_path)
    (picture,) = seen.Images("timeline")
    assert (picture.width, picture.height) == (30, 20)
    assert Image.open(io.BytesIO(picture.encoded_image_string)).getpixel((5, 5)) == (255, 0, 0)
    assert "step_time_s: 0.125" in seen.Tensors("plan/text_summary")[0].tensor_proto.string_val[0].decode()
    layout = layout_pb2.Layout.FromString(seen.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    charts = [pattern for category in layout.category for chart in category.chart for pattern in chart.multiline.tag]
    assert [category.title for category in layout.category] == ["loss", "throughput", "bubble", "memory"]
    assert any(re.match(pattern, "loss/train") for pattern in charts)
    assert any(re.match(pattern, "memory/rank_1_bytes") for pattern in charts)


def test_one_run_in_tensorboard_and_one_folder(tmp_path, config):
    recorder = Recorder(tmp_path, config)
    recorder.step(step(1))
    recorder.finish("completed")
    assert not [path for path in tmp_path.iterdir() if path.is_dir()], "add_hparams would have made a second run"


def test_a_loss_that_is_not_finite_stays_json(tmp_path, config):
    recorder = Recorder(tmp_path, config)
    recorder.step(step(1, loss=math.nan, gradient_norm=math.inf))
    recorder.finish("completed")

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (line["loss"], line["gradient_norm"]) == ("nan", "inf")
    assert math.isnan(float(json.loads((tmp_path / "result.json").read_text(), parse_constant=refuse)["loss"]))


# --- HParams ---


@pytest.mark.parametrize("status, shown", [("completed", api_pb2.STATUS_SUCCESS), ("failed", api_pb2.STATUS_FAILURE)])
def test_hparams_session(status, shown, tmp_path, config):
    recorder = Recorder(tmp_path, config)
    assert session(tmp_path)[1] is None, "running"
    recorder.finish(status)
    values, end = session(tmp_path)
    assert end == shown
    assert values["parallel.chunks"] == 8 and values["model.name"] == "gpt_tiny" and values["model.tied"] == "true"
    assert 20 <= len(values) <= 35
    assert all(isinstance(value, (str, float)) for value in values.values())


def test_every_hparam_is_there_for_every_value(config):
    config.optimizer.clip_norm = None
    config.parallel.balance = [4, 4]
    columns = hparams(config)
    assert columns["optimizer.clip_norm"] == "null" and columns["parallel.balance"] == "[4, 4]"


@pytest.mark.parametrize("begun", [True, False])
def test_a_failure_written_by_the_parent(begun, tmp_path, config):
    (tmp_path / "resolved.json").write_text(json.dumps(to_dict(config)))
    if begun:  # and then killed
        recorder = Recorder(tmp_path, config)
        recorder.step(step(1))
        recorder.close()
    result = finish_failed(tmp_path, "failed", failure="rank 1 failed: ValueError: x")
    assert result["failure"] == "rank 1 failed: ValueError: x" and result["steps"] == int(begun)
    values, end = session(tmp_path)
    assert end == api_pb2.STATUS_FAILURE and values["parallel.chunks"] == 8


# --- result.json ---


def test_the_result_of_a_run(tmp_path, config):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- parallel.stages=2\n- name='a, b'\n")
    recorder = Recorder(tmp_path, config)
    for number in range(1, 21):  # the first two are warm-up
        recorder.step(step(number, step_time_s=9.0 if number <= 2 else number / 100, tokens_per_s=number))
    recorder.validation(20, {"validation_loss": 3.0, "bits_per_byte": 4.3})
    result = recorder.finish("stopped", {"reason": "signal", "mfu": None})
    assert result == read_result(tmp_path)
    assert (result["status"], result["reason"], result["steps"], result["loss"]) == ("stopped", "signal", 20, 3.0)
    assert (result["validation_loss"], result["bits_per_byte"]) == (3.0, 4.3)
    assert result["step_time_s"] == pytest.approx(0.115) and result["tokens_per_s"] == 11.5
    assert result["peak_memory_bytes"] == [120, 199]
    assert result["overrides"] == ["parallel.stages=2", "name='a, b'"]
    assert {"python", "torch", "hydra-core"} <= set(result["versions"])
    assert "mfu" not in result, "no nulls"
    assert sorted(path.name for path in tmp_path.glob("result*")) == ["result.json"]


def test_figures_of_speed_are_of_the_newest_start_alone(tmp_path, config):
    """A run that went on in another layout: medians and memory do not mix the two."""
    first = Recorder(tmp_path, config)
    for number in range(1, 11):
        first.step(step(number, step_time_s=9.0, bubble_fraction=0.5, memory_bytes=[500, 600]))
    first.close()
    again = Recorder(tmp_path, config, done=10)
    for number in range(11, 15):
        again.step(step(number, step_time_s=1.0, bubble_fraction=0.0, memory_bytes=[100, 100]))
    result = again.finish("completed")
    assert (result["step_time_s"], result["bubble_fraction"], result["peak_memory_bytes"]) == (1.0, 0.0, [100, 100])
    assert result["steps"] == 14


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step(1)) + "\n" + json.dumps(step(2))[:20])
    assert summary(tmp_path)["steps"] == 1


def test_a_run_without_a_step_has_a_result(tmp_path):
    assert write_result(tmp_path, {"status": "invalid", "failure": "x"})["steps"] == 0
    assert read_result(tmp_path / "not there") is None


def test_results_are_read_and_written_without_torch(tmp_path):
    code = (
        "import sys; from training.record import finish_failed, read_result; "
        f"finish_failed({str(tmp_path)!r}, 'failed'); print(read_result({str(tmp_path)!r})['status']); "
        "assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True) == "failed\n"
