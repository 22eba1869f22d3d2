"""The page's figures as plotly's JSON (data and layout): plain dicts, so that plotly itself need not be imported.

Colours of text, grid and background come from the page (comparing/page.html), which knows light from dark.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from comparing.runs import Run, number
from comparing.study import GRID, Contest, elapsed, group_by, tokens, typical
from comparing.timeline import KINDS, Bar

COLOURS = ("#3f83c8", "#dd7a33", "#35a06a", "#c5558f", "#8b72d6", "#b39a1e", "#d0505c", "#3fa0a6")
KIND_COLOURS = {"F": "#568bdb", "B": "#5cab6c", "I": "#54b2b2", "W": "#e4a64b"}  # as pipeline/draw.py
# light enough under dark text everywhere, in a dark page too
MORE_IS_BETTER = [[0, "#fdf3cf"], [0.5, "#a9dbb4"], [1, "#56b6c4"]]
MORE_IS_WORSE = [[0, "#e4f2e4"], [0.5, "#f7dc98"], [1, "#f09a6c"]]
GREY = [[0, "#b9bec6"], [1, "#b9bec6"]]
WINNERS = ("#9cc7f0", "#f3bd94", "#9fd8b4", "#e8b0cd", "#c9bcf0", "#e3d48a", "#f0a6ac", "#9ed6da")
INK = "#14202b"
_SHORT = {"out_of_memory": "no memory", "completed": "no figure", "stopped": "no figure"}

LEGEND = {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom"}

Figure = dict  # {"data": [...], "layout": {...}}


@dataclass(frozen=True)
class Look:
    """How a run is drawn: its own name, and the name and colour that it shares with runs of its kind."""

    name: str
    group: str
    colour: str


def _figure(data: list[dict], x: str, y: str, **layout: object) -> Figure:
    base = {"xaxis": {"title": {"text": x}, "automargin": True}, "yaxis": {"title": {"text": y}, "automargin": True}}
    for axis in ("xaxis", "yaxis"):
        base[axis] |= layout.pop(axis, {})
    return {"data": data, "layout": base | layout}


# --- chunks x stages ---


def heat_map(
    runs: Sequence[Run],
    value: Callable[[list[Run]], float | None],
    text: Callable[[list[Run]], str],
    limits: tuple[float, float],
    *,
    colours: list = MORE_IS_BETTER,
) -> Figure:
    """Stages upwards, chunks to the right; a cell without a value shows the status of the run that was to give it."""
    cells = group_by(runs, lambda run: tuple(run.config.get(key) for key in GRID))
    ys, xs = ([str(v) for v in sorted({cell[i] for cell in cells}, key=_numeric)] for i in (0, 1))
    z = [[None] * len(xs) for _ in ys]
    words = [[""] * len(xs) for _ in ys]
    bad, why = [list(row) for row in z], [list(row) for row in words]
    for cell, group in cells.items():
        row, column = ys.index(str(cell[0])), xs.index(str(cell[1]))
        good = [run for run in group if run.ended_well]
        found = value(good) if good else None
        if found is None:
            status = (good or group)[-1].status
            bad[row][column], why[row][column] = 1, _SHORT.get(status, status)
        else:
            z[row][column], words[row][column] = found, text(good)
    shared = {"type": "heatmap", "x": xs, "y": ys, "texttemplate": "%{text}", "xgap": 2, "ygap": 2, "showscale": False}
    shared["textfont"] = {"color": INK}
    shared["hovertemplate"] = "stages %{y}, chunks %{x}: %{text}<extra></extra>"
    low, high = limits
    shown = {"z": z, "text": words, "colorscale": colours, "zmin": low, "zmax": high}
    greyed = {"z": bad, "text": why, "colorscale": GREY, "zmin": 0, "zmax": 1}
    axis = {"type": "category", "showgrid": False}
    height = 130 + 56 * len(ys)
    return _figure([shared | shown, shared | greyed], "chunks", "stages", xaxis=axis, yaxis=axis, height=height)


def _numeric(value: object) -> tuple:
    return (not isinstance(value, int), value if isinstance(value, int) else 0, str(value))


def limits_of(groups: Sequence[Sequence[Run]], value: Callable[[list[Run]], float | None]) -> tuple[float, float]:
    """One scale for all series: the smallest and largest value of any cell."""
    values = []
    for runs in groups:
        for cell in group_by([run for run in runs if run.ended_well], _cell).values():
            found = value(cell)
            if found is not None:
                values.append(found)
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if high > low else (low - 0.5 * abs(low) - 1e-9, high + 0.5 * abs(high) + 1e-9)


def _cell(run: Run) -> tuple:
    return tuple(run.config.get(key) for key in GRID)


def winners(contests: Sequence[Contest]) -> Figure:
    """Who is fastest for each stages and chunks, and by how much ahead of the next."""
    ys = [str(v) for v in sorted({c.stages for c in contests})]
    xs = [str(v) for v in sorted({c.chunks for c in contests})]
    names = sorted({c.entries[0]["schedule"] for c in contests})
    z = [[None] * len(xs) for _ in ys]
    text = [[""] * len(xs) for _ in ys]
    for c in contests:
        row, column, winner = ys.index(str(c.stages)), xs.index(str(c.chunks)), c.entries[0]
        z[row][column] = names.index(winner["schedule"])
        text[row][column] = f"{winner['schedule'].replace(' ', '<br>')}<br>{winner['gain']:+.1%}"
    count = len(names)
    steps = [[(i + side) / count, WINNERS[i % len(WINNERS)]] for i in range(count) for side in (0, 1)]
    trace = {"type": "heatmap", "x": xs, "y": ys, "z": z, "text": text, "texttemplate": "%{text}", "showscale": False}
    trace |= {"colorscale": steps, "zmin": -0.5, "zmax": count - 0.5, "xgap": 2, "ygap": 2}
    trace |= {"hovertemplate": "stages %{y}, chunks %{x}: %{text}<extra></extra>", "textfont": {"color": INK}}
    axis = {"type": "category", "showgrid": False}
    return _figure([trace], "chunks", "stages", xaxis=axis, yaxis=axis, height=130 + 70 * len(ys))


# --- curves and points ---


def loss_curves(runs: Sequence[Run], looks: dict[str, Look]) -> Figure:
    """Training loss as lines, validation as circles; `meta` has each trace's x as steps, tokens and minutes."""
    data, sets = [], {"step": [], "tokens": [], "minutes": []}
    shown: set[str] = set()
    for run in runs:
        look = looks[str(run.path)]
        steps = [step["step"] for step in run.steps]
        spent, seen = [round(seconds / 60, 4) for seconds in elapsed(run)], tokens(run)
        line = {"type": "scatter", "mode": "lines", "name": look.group, "legendgroup": look.group}
        line |= {"line": {"color": look.colour, "width": 1.6}, "showlegend": look.group not in shown}
        line["hovertemplate"] = f"{look.name}<br>%{{x}}: %{{y:.4f}}<extra></extra>"
        shown.add(look.group)
        data.append(line | {"x": steps, "y": [_rounded(step.get("loss")) for step in run.steps]})
        _add(sets, steps, seen, spent)
        points = [
            v for v in run.validations if v["step"] in set(steps) and number(v.get("validation_loss")) is not None
        ]
        if points:
            at = [steps.index(v["step"]) for v in points]
            circles = {"mode": "markers", "showlegend": False}
            circles["marker"] = {"symbol": "circle-open", "size": 7, "color": look.colour}
            values = [_rounded(v["validation_loss"]) for v in points]
            data.append(line | circles | {"x": [steps[i] for i in at], "y": values})
            _add(sets, *([values[i] for i in at] for values in (steps, seen, spent)))
    return _figure(
        data,
        "step",
        "loss, nats a token",
        meta={"x": sets},
        height=420 + 20 * len(shown),
        hovermode="closest",
        showlegend=1 < len(shown) <= 12,
        legend=LEGEND,
    )


def _add(sets: dict[str, list], steps: list, seen: list, minutes: list) -> None:
    for key, values in (("step", steps), ("tokens", seen), ("minutes", minutes)):
        sets[key].append(values)


def _rounded(value: object) -> float | None:
    value = number(value)
    return None if value is None else float(f"{value:.6g}")


def against(points: Sequence[tuple[float, float, Look]], x: str, y: str) -> Figure:
    """Points (x, y) with their looks, and the dotted diagonal on which both are equal."""
    low = min(min(point[:2]) for point in points)
    high = max(max(point[:2]) for point in points)
    diagonal = {"type": "scatter", "mode": "lines", "x": [low, high], "y": [low, high], "hoverinfo": "skip"}
    data = [diagonal | {"line": {"dash": "dot", "color": "#8a8f98", "width": 1.5}, "showlegend": False}]
    groups = group_by(points, lambda point: point[2].group)
    for group, own in groups.items():
        dots = {"type": "scatter", "mode": "markers", "name": group, "text": [look.name for _, _, look in own]}
        dots |= {"x": [_rounded(p[0]) for p in own], "y": [_rounded(p[1]) for p in own]}
        dots["marker"] = {"size": 9, "color": own[0][2].colour, "opacity": 0.85}
        dots["cliponaxis"] = False
        data.append(dots | {"hovertemplate": "%{text}<br>%{x:.4g} → %{y:.4g}<extra></extra>"})
    axis = {"type": "log"} if low > 0 and high / low > 30 else {"range": [0, 1.08 * high]}
    legend = 1 < len(groups) <= 12
    height = 340 + (40 if legend else 0)
    return _figure(
        data,
        x,
        y,
        xaxis=axis,
        yaxis=axis,
        showlegend=legend,
        legend=LEGEND,
        height=height,
        hovermode="closest",
    )


def time_parts(runs: Sequence[Run], looks: dict[str, Look]) -> Figure:
    """Where a step's time goes: a stacked bar a run, means over ranks."""
    parts = list(dict.fromkeys(key for run in runs for key in run.figures if key.startswith("time.")))
    labels = ["<br>".join(textwrap.wrap(looks[str(run.path)].name, 20)) for run in runs]
    data = []
    for index, part in enumerate(parts):
        name = part.removeprefix("time.").removesuffix("_s").replace("_", " ")
        values = [_rounded(run.figures.get(part)) for run in runs]
        look = {"type": "bar", "orientation": "h", "name": name, "marker": {"color": COLOURS[index % len(COLOURS)]}}
        data.append(look | {"x": values, "y": labels, "hovertemplate": "%{y}: %{x:.4g} s<extra>" + name + "</extra>"})
    axis = {"type": "category", "autorange": "reversed"}
    return _figure(
        data,
        "seconds a step",
        "",
        yaxis=axis,
        barmode="stack",
        legend=LEGEND | {"traceorder": "normal"},
        showlegend=True,
        height=190 + 44 * len(runs),
    )


def timeline(bars: Sequence[Bar], span: float) -> Figure:
    """One step: a row a rank, a bar an action; span: the longest of the steps side by side, so that lengths compare."""
    data = []
    for kind, name in KINDS.items():
        own = [bar for bar in bars if bar.kind == kind]
        if not own:
            continue
        trace = {"type": "bar", "orientation": "h", "name": name, "marker": {"color": KIND_COLOURS[kind]}}
        trace |= {"base": [_rounded(1e3 * b.start) for b in own], "x": [_rounded(1e3 * b.seconds) for b in own]}
        trace["y"] = [f"rank {b.rank}" for b in own]
        trace["text"] = [f"{b.stage}{b.kind}{b.microbatch}" for b in own]
        trace["textposition"] = "none"
        trace["hovertemplate"] = "%{text}: %{x:.3g} ms from %{base:.4g} ms<extra></extra>"
        data.append(trace)
    ranks = len({bar.rank for bar in bars})
    axis = {"type": "category", "autorange": "reversed"}
    width = {"range": [0, 1e3 * span]}
    return _figure(
        data,
        "milliseconds",
        "",
        xaxis=width,
        yaxis=axis,
        barmode="overlay",
        bargap=0.15,
        legend=LEGEND,
        showlegend=True,
        height=150 + 30 * ranks,
    )


def microbatches(rows: Sequence[dict]) -> Figure:
    """Tokens/s by micro-batch size, a line a series; hollow where chunks < 4 x stages."""
    data = []
    for index, (name, own) in enumerate(group_by(rows, lambda row: row["series"]).items()):
        own = [row for row in own if row["tokens_per_s"]]
        colour = COLOURS[index % len(COLOURS)]
        symbols = ["circle" if row["rule"] else "circle-open" for row in own]
        trace = {"type": "scatter", "mode": "lines+markers", "name": name or "tokens/s"}
        trace |= {"x": [str(row["micro_batch"]) for row in own], "y": [_rounded(row["tokens_per_s"]) for row in own]}
        trace |= {"marker": {"symbol": symbols, "size": 11, "color": colour}, "line": {"color": colour}}
        trace["text"] = [f"chunks {row['chunks']}, stages {row['stages']}" for row in own]
        trace["hovertemplate"] = "micro-batch %{x}: %{y:,.0f} tokens/s<br>%{text}<extra></extra>"
        data.append(trace)
    sizes = [str(size) for size in sorted({row["micro_batch"] for row in rows})]
    axis = {"type": "category", "categoryorder": "array", "categoryarray": sizes}
    return _figure(
        data,
        "micro-batch, sequences",
        "tokens/s",
        xaxis=axis,
        yaxis={"rangemode": "tozero"},
        showlegend=len(data) > 1,
        legend=LEGEND,
        height=380,
    )


def median_of(key: str) -> Callable[[list[Run]], float | None]:
    return lambda runs: typical(runs, key)
