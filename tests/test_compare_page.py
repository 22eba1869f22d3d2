"""compare.py's page in a real browser: laptop and phone, light and dark; its figures as plotly itself reads them."""

from __future__ import annotations

import csv
import html
import io
import re
from pathlib import Path

import pytest
import run_folders
from browser import Browser, needs_browser
from PIL import Image

from comparing import front, page, panels
from comparing import runs as reading


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """The page of the made-up study, with every panel."""
    folder = run_folders.study(tmp_path_factory.mktemp("page") / "schedules")
    front.write(reading.read_all(reading.find([folder])), folder, "schedules <b>&</b> co.")
    return folder


@pytest.fixture(scope="module")
def browser():
    with Browser() as opened:
        yield opened


def show(browser: Browser, written: Path, **view: object) -> None:
    browser.errors.clear()
    browser.requests.clear()
    browser.open(f"file://{written / 'compare.html'}", **view)
    browser.wait("document.documentElement.dataset.drawn === 'yes'", seconds=60)


@needs_browser
@pytest.mark.parametrize("width, dark", [(1366, False), (1366, True), (390, False), (390, True)])
def test_the_page_is_whole_at_every_width_and_colour_scheme(width, dark, browser, written, tmp_path):
    show(browser, written, width=width, dark=dark)
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == [], "it needs no network"
    assert browser.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out to the right"
    plots = browser.evaluate("document.querySelectorAll('.plot').length")
    assert plots >= 22 and browser.evaluate("document.querySelectorAll('.plot .plot-container').length") == plots
    too_wide = (
        "[...document.querySelectorAll('.plot')].filter(p => p.querySelector('.main-svg').clientWidth > p.clientWidth)"
    )
    assert browser.evaluate(f"{too_wide}.length") == 0
    headings = browser.evaluate("[...document.querySelectorAll('h2')].map(h => h.textContent)")
    assert headings == [
        "Runs", "Chunks × stages", "Where each schedule wins", "Loss", "Predicted against measured", "Bubble",
        "Timelines", "Micro-batch size",
    ]  # fmt: skip
    browser.screenshot(tmp_path / "page.png", whole=False)
    seen = Image.open(io.BytesIO((tmp_path / "page.png").read_bytes())).convert("L")
    assert seen.width == width
    assert (seen.getpixel((2, 2)) < 60) == dark, "the background"
    dark_text = browser.evaluate("getComputedStyle(document.querySelector('.plot .xtick text')).fill")
    channels = [int(value) for value in re.findall(r"\d+", dark_text)[:3]]
    assert (sum(channels) > 3 * 128) == dark, "ticks can be read on it"


@needs_browser
def test_what_the_reader_clicks(browser, written):
    show(browser, written, width=1366)
    x = "document.querySelector('#loss .xtitle').textContent + ' ' + figures.loss.data[0].x.at(-1)"
    assert browser.evaluate(x) == "step 40"
    browser.evaluate("document.querySelector('[data-set=tokens]').click()")
    assert browser.evaluate(x) == f"tokens {40 * 32 * 128}"
    cells = "[...document.querySelectorAll('.sorts tbody tr')].map(row => row.cells[COLUMN].dataset.v)"
    times = f"{cells}.filter(Boolean).map(Number)"
    column = browser.evaluate(
        "[...document.querySelectorAll('.sorts th')].findIndex(h => h.textContent === 'step time')"
    )
    times = times.replace("COLUMN", str(column))
    before = browser.evaluate(times)
    browser.evaluate(f"document.querySelectorAll('.sorts th')[{column}].click()")
    assert browser.evaluate(times) == sorted(before) != before
    browser.evaluate(f"document.querySelectorAll('.sorts th')[{column}].click()")
    assert browser.evaluate(times) == sorted(before, reverse=True)
    assert browser.evaluate("document.querySelector('h1').textContent") == "schedules <b>&</b> co.", "escaped"
    assert browser.errors == []


def test_every_figure_is_one_that_plotly_accepts(written):
    graph_objects = pytest.importorskip("plotly.graph_objects")
    runs, count = reading.read_all(reading.find([written])), 0
    for make in panels.PANELS:
        for figure in make(runs)[3].values():
            graph_objects.Figure(figure)  # raises for a property that there is not
            count += 1
    assert count >= 22


def test_the_numbers_on_the_page_are_those_of_the_csv(written):
    runs = reading.read_all(reading.find([written]))
    maps = panels.heat_maps(runs)[3]
    with open(written / "results.csv") as file:
        rows = {(r["parallel.schedule"], r["parallel.stages"], r["parallel.chunks"]): r for r in csv.DictReader(file)}
    order = [name for name in dict.fromkeys(key[0] for key in rows)]
    drawn = 0
    for index, schedule in enumerate(order):
        good, bad = maps[f"heat-{index}-0"]["data"]
        for y, stages in enumerate(good["y"]):
            for x, chunks in enumerate(good["x"]):
                row = rows[schedule, stages, chunks]
                if row["tokens_per_s"]:
                    assert good["z"][y][x] == pytest.approx(float(row["tokens_per_s"]))
                else:
                    assert good["z"][y][x] is None
                    assert bad["text"][y][x] == {"failed": "failed", "out_of_memory": "no memory"}[row["status"]]
                drawn += 1
    assert drawn == 24


def test_timelines_are_the_last_whole_step_on_one_scale(written):
    runs = reading.read_all(reading.find([written]))
    figures = panels.timelines(runs)[3]
    assert len(figures) == 4
    assert len({tuple(figure["layout"]["xaxis"]["range"]) for figure in figures.values()}) == 1
    bars = figures["timeline-0"]["data"][0]  # gpipe, 4 stages: rank r runs its forwards from r x 10 ms on
    assert bars["name"] == "forward" and bars["text"][:8] == [f"0F{m}" for m in range(8)]
    assert [base for base, rank in zip(bars["base"], bars["y"], strict=True) if rank == "rank 2"] == [
        20.0 + 10.0 * m for m in range(8)
    ]


def test_a_page_of_runs_without_a_figure_says_so(tmp_path):
    (tmp_path / "a" / ".hydra").mkdir(parents=True)
    text = page.render(reading.read_all(reading.find([tmp_path])), "x")
    assert "No run has a timeline.json" in text and "unfinished" in text and html.escape("no configuration") in text


def test_timelines_of_the_same_stages_and_chunks_stand_side_by_side(tmp_path):
    layouts = [
        ("gpipe", 2, 4, 0.1),
        ("gpipe", 4, 8, 0.5),
        ("1f1b", 4, 8, 0.4),
        ("1f1b", 2, 4, 0.2),
        ("1f1b", 2, 8, 0.1),
    ]
    layouts += [("zb_h1", 4, 8, 0.6)]
    for schedule, stages, chunks, seconds in layouts:
        layout = {"schedule": schedule, "stages": stages, "chunks": chunks, "step_time_s": seconds, "timeline": True}
        run_folders.write_run(tmp_path / f"{schedule}_{stages}_{chunks}", **layout)
    body = panels.timelines(reading.read_all(reading.find([tmp_path])))[2]
    titles = set(re.findall("<h3>(.*?)</h3>", body))
    assert {f"{name} stages=4 chunks=8" for name in ("gpipe", "1f1b", "zb_h1")} < titles and len(titles) == 4
