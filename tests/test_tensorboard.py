"""`tensorboard --logdir experiments` on real runs, read in a real browser as a person would read it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from browser import Browser, needs_browser
from commands import SMALL, TRAIN, start

from training.record import read_result

pytestmark = needs_browser
PAGE_TEXT = """(() => {
  const silent = ["STYLE", "SCRIPT", "TEMPLATE"];
  const walk = node => node.nodeType === 3 ? node.textContent : silent.includes(node.nodeName) ? ""
    : [node.shadowRoot, ...node.childNodes].filter(Boolean).map(walk).join(" ");
  return walk(document.body).replace(/\\s+/g, " ");
})()"""


@pytest.fixture(scope="module")
def experiments(tmp_path_factory) -> Path:
    """A run that completed, one that failed, one that its time limit stopped; two engines; all by train.py."""
    cwd = tmp_path_factory.mktemp("tensorboard")
    wanted = {
        "completed": ["parallel=single", "parallel.chunks=2"],
        "failed": ["parallel=single", "optimizer.learning_rate=1e30", "train.steps=4"],
        "stopped": ["parallel=pp2", "train.max_minutes=1e-6", "train.steps=40"],
    }
    started = {
        status: start(*TRAIN, *SMALL, *typed, f"hydra.run.dir=experiments/tiny/{status}", cwd=cwd)
        for status, typed in wanted.items()
    }
    for status, process in started.items():
        _, errors = process.communicate(timeout=240)
        result = read_result(cwd / "experiments" / "tiny" / status)
        assert result is not None and result["status"] == status, errors
    return cwd / "experiments"


@pytest.fixture(scope="module")
def url(experiments):
    """The address it prints; the port is the only flag, so that two tests do not meet."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", "experiments", "--port", "0"]
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, cwd=experiments.parent, **pipes) as process:
        try:
            said = ""
            while not (found := re.search(r"http://localhost:\d+/", said)):
                line = process.stderr.readline()
                assert line, said
                said += line
            yield found[0]
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def browser():
    with Browser() as opened:
        yield opened


def text_of(browser: Browser, url: str, tab: str, *wanted: str) -> str:
    """All that a tab shows, once it shows what is wanted."""
    browser.open("about:blank#", width=1366)
    browser.open(f"{url}#{tab}", width=1366)
    for word in wanted:
        browser.wait(f"{PAGE_TEXT}.includes({json.dumps(word)})", seconds=90)
    return browser.evaluate(PAGE_TEXT)


def ask(browser: Browser, url: str, path: str, body: dict | None = None) -> dict:
    """What TensorBoard's own pages ask its server for."""
    options = {} if body is None else {"method": "POST", "body": json.dumps(body)}
    return json.loads(browser.evaluate(f"fetch({json.dumps(url + path)}, {json.dumps(options)}).then(r => r.text())"))


def test_scalars_have_one_tag_scheme_for_every_engine_by_step_and_by_token(browser, url):
    text_of(browser, url, "timeseries", "tiny/completed", "over_tokens", "throughput")
    assert browser.errors == []
    tags = {run: set(found) for run, found in ask(browser, url, "data/plugin/scalars/tags").items()}
    assert set(tags) == {"tiny/completed", "tiny/failed", "tiny/stopped"}
    single, torch = tags["tiny/completed"], tags["tiny/stopped"]
    only = {tag for tag in single ^ torch if not tag.startswith(("predicted", "prediction_error"))}
    assert only == {"memory/rank_1_bytes"}, "two ranks against one"
    points = {
        tag: ask(browser, url, f"data/plugin/scalars/scalars?run=tiny/completed&tag={tag}")
        for tag in ("loss/train", "over_tokens/loss/train")
    }
    assert [step for _, step, _ in points["loss/train"]] == [1, 2]
    assert [step for _, step, _ in points["over_tokens/loss/train"]] == [8 * 16, 2 * 8 * 16]
    assert [value for *_, value in points["loss/train"]] == [value for *_, value in points["over_tokens/loss/train"]]


def test_hparams_has_a_row_a_run_with_its_values_and_status(browser, url, experiments):
    shown = text_of(browser, url, "hparams", "tiny/completed", "tiny/failed", "tiny/stopped")
    assert "parallel.chunks" in shown and "train.global_batch" in shown
    assert browser.errors == []
    body = {
        "experimentName": "",
        "allowedStatuses": [f"STATUS_{word}" for word in ("UNKNOWN", "SUCCESS", "FAILURE", "RUNNING")],
    }
    body |= {"colParams": [{"metric": {"tag": "loss/train", "group": ""}, "includeInResult": True}], "startIndex": 0}
    groups = ask(browser, url, "data/plugin/hparams/session_groups", body | {"sliceSize": 10})["sessionGroups"]
    sessions = {group["sessions"][0]["name"]: group for group in groups}
    assert len(groups) == 3 and all(len(group["sessions"]) == 1 for group in groups), "no second run for any"
    status = {name: group["sessions"][0]["status"] for name, group in sessions.items()}
    assert status == {
        "tiny/completed": "STATUS_SUCCESS", "tiny/failed": "STATUS_FAILURE", "tiny/stopped": "STATUS_SUCCESS",
    }  # fmt: skip
    for name, group in sessions.items():
        config = json.loads((experiments / name / "resolved.json").read_text())
        for column, value in group["hparams"].items():
            part, _, key = column.partition(".")
            wanted = config[part][key]
            if wanted is None or isinstance(wanted, bool):
                wanted = "null" if wanted is None else str(wanted).lower()
            assert value == wanted or value == str(wanted), column
    metrics = {metric["name"]["tag"]: metric["value"] for metric in sessions["tiny/completed"]["metricValues"]}
    assert metrics["loss/train"] == pytest.approx(read_result(experiments / "tiny" / "completed")["loss"])


def test_custom_scalars_are_laid_out(browser, url):
    shown = text_of(browser, url, "custom_scalars", "measured and theory")
    titles = ["by step", "by tokens", "tokens/s", "measured and theory", "parts of a step", "peak of each stage's rank"]
    assert [shown.index(title) for title in titles] == sorted(shown.index(title) for title in titles)
    assert browser.errors == []


def test_config_and_plan_as_text_and_the_timeline_as_a_picture(browser, url):
    shown = text_of(browser, url, "text", "config/text_summary", "plan/text_summary")
    assert "global_batch: 8" in shown and "step_time_s:" in shown
    runs = ask(browser, url, "data/plugin/images/tags")
    assert "timeline" in runs["tiny/completed"]
    text_of(browser, url, "images", "tag: timeline")
    pictures = """(() => {
      const walk = node => (node.nodeName === "IMG" && node.naturalWidth > 100 ? 1 : 0)
        + [node.shadowRoot, ...node.childNodes].filter(Boolean).map(walk).reduce((a, b) => a + b, 0);
      return walk(document.body);
    })()"""
    assert browser.wait(pictures, seconds=60) >= 1
    assert browser.errors == []
