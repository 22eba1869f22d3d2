"""The page: one HTML file that holds its figures, data and plotly's script, and asks no network for anything."""

from __future__ import annotations

import html
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from comparing import panels
from comparing.markup import cell, table
from comparing.runs import Run
from comparing.table import SHOWN, differing, short_names, show_figure, show_status, text_of
from conf import words

TEMPLATE = Path(__file__).with_name("page.html")


@dataclass
class Section:
    """A part of the page: HTML in which `<div class=plot id=ID>` stand for `figures`."""

    id: str
    title: str
    body: str
    figures: dict[str, dict] = field(default_factory=dict)


def render(runs: Sequence[Run], title: str) -> str:
    """The page's HTML. Needs plotly for its script: ImportError says so."""
    sections = [_table(runs)]
    trained = [run for run in runs if not run.evaluates]
    for make in panels.PANELS:
        found = make(trained)
        if found is not None:
            sections.append(Section(*found))
    counts = Counter(run.status for run in runs)
    told = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    summary = f"{words.count(len(runs), 'run')}: {told}. Made {time.strftime('%Y-%m-%d %H:%M')} by python compare.py."
    figures = {key: figure for section in sections for key, figure in section.figures.items()}
    parts = {
        "title": html.escape(title),
        "summary": html.escape(summary),
        "links": "".join(f'<a href="#part-{s.id}">{html.escape(s.title)}</a>' for s in sections),
        "sections": "\n".join(
            f'<section id="part-{s.id}"><h2>{html.escape(s.title)}</h2>{s.body}</section>' for s in sections
        ),
        "figures": json.dumps(figures, separators=(",", ":")).replace("</", "<\\/"),
        "plotly": plotly_script(),
    }
    text = TEMPLATE.read_text()
    for key, value in parts.items():  # plotly last: it must not be searched for placeholders
        text = text.replace("{{" + key + "}}", value)
    return text


def plotly_script() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError("the page needs plotly: pip install -r requirements.txt") from error
    return get_plotlyjs()


def _table(runs: Sequence[Run]) -> Section:
    """All runs with what differs, sortable; then why some did not end well."""
    keys = differing(runs)
    names = short_names(keys, [run.config for run in runs])
    figures = [key for key in SHOWN if any(key in run.figures for run in runs)]
    head = [*(names[key] for key in keys), "status", *(SHOWN[key][0] for key in figures), "run"]
    rows = []
    for run in runs:
        cells = [cell(text_of(run.config[key]) if key in run.config else "") for key in keys]
        cells.append(_status(run))
        cells += [cell(show_figure(run, key), run.figures.get(key)) for key in figures]
        rows.append([*cells, cell(run.name)])
    body = table(head, rows, "sorts")
    notes = [run for run in runs if run.note and run.status not in ("completed", "stopped")]
    if notes:
        told = [[_status(run), cell(run.name), cell(run.note, kind="note")] for run in notes]
        body += "<h3>Not completed</h3>" + table(["status", "run", "why"], told)
    return Section("runs", "Runs", "<p>Only the columns that differ. Click a heading to sort.</p>" + body)


def _status(run: Run) -> str:
    return cell(show_status(run).replace("_", " "), kind=run.status)
