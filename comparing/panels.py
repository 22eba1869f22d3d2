"""The page's panels. Each takes the runs and gives (id, title, HTML, figures by id), or None where it has nothing."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence

from comparing import figures as draw
from comparing import study
from comparing.markup import cell, plot, table
from comparing.runs import Run, number
from comparing.table import gib
from comparing.timeline import describe, read_timeline

MOST_SERIES, MOST_CURVES, MOST_BARS, MOST_TIMELINES = 8, 40, 30, 4  # what a reader can still tell apart
Panel = tuple[str, str, str, dict[str, dict]]


def _looks(runs: Sequence[Run]) -> dict[str, draw.Look]:
    """By folder: the name is what tells a run from the others; one colour a schedule, or a run where all have one."""
    keys = [key for key in study.telling(runs, ()) if key != "name"]
    labels = [study.label(run, keys) if keys else run.name for run in runs]
    names = [
        label if labels.count(label) == 1 else f"{label} ({run.name})" for label, run in zip(labels, runs, strict=True)
    ]
    schedules = [str(run.config.get("parallel.schedule")) for run in runs]
    groups = schedules if len(set(schedules)) > 1 else names
    order = list(dict.fromkeys(groups))
    colours = [draw.COLOURS[order.index(group) % len(draw.COLOURS)] for group in groups]
    made = zip(runs, names, groups, colours, strict=True)
    return {str(run.path): draw.Look(name, group, colour) for run, name, group, colour in made}


# --- heat maps ---


def heat_maps(runs: Sequence[Run]) -> Panel | None:
    gridded = [run for run in runs if all(run.config.get(key) for key in study.GRID)]
    groups = {name: group for name, group in study.series(gridded).items() if len({draw._cell(r) for r in group}) > 1}
    if not groups:
        return None
    shown = dict(sorted(groups.items(), key=lambda item: -len(item[1]))[:MOST_SERIES])
    metrics = {  # title: value of a cell, its text, its colours
        "tokens/s": (draw.median_of("tokens_per_s"), _speed_text, draw.MORE_IS_BETTER),
        "bubble: measured / in theory": (_bubble, _bubble_text, draw.MORE_IS_WORSE),
        "peak memory of the fullest rank": (_memory, _memory_text, draw.MORE_IS_WORSE),
    }
    body, made = "", {}
    for row, (name, group) in enumerate(shown.items()):
        wide = len({run.config["parallel.chunks"] for run in group}) > 6
        body += f'<h3>{html.escape(name)}</h3><div class="{"stack" if wide else "grid"}">'
        for column, (title, (value, text, colours)) in enumerate(metrics.items()):
            key = f"heat-{row}-{column}"
            limits = draw.limits_of(list(shown.values()), value)
            made[key] = draw.heat_map(group, value, text, limits, colours=colours)
            body += f"<div><p>{html.escape(title)}</p>{plot(key)}</div>"
        body += "</div>"
    left = len(groups) - len(shown)
    note = f" {left} smaller series are left out here: --where chooses." if left else ""
    intro = (
        "One row of maps for each series; one colour scale for all of them. Grey cells are runs that gave no figure, "
        f"with what became of them.{note}"
    )
    return "maps", "Chunks × stages", f"<p>{intro}</p>{body}", made


def _speed_text(runs: Sequence[Run]) -> str:
    return f"{study.typical(runs, 'tokens_per_s'):,.0f}"


def _memory(runs: Sequence[Run]) -> float | None:
    """Measured; the planner's where it was not: emulated runs hold nothing."""
    measured = study.typical(runs, "peak_memory_bytes")
    return study.typical(runs, "predicted.peak_memory_bytes") if measured is None else measured


def _memory_text(runs: Sequence[Run]) -> str:
    word = "<br>planned" if study.typical(runs, "peak_memory_bytes") is None else ""
    return gib(_memory(runs)).replace(" ", "<br>") + word


def _bubble(runs: Sequence[Run]) -> float | None:
    measured = study.typical(runs, "bubble_fraction")
    return study.typical(runs, "bubble_fraction_ideal") if measured is None else measured


def _bubble_text(runs: Sequence[Run]) -> str:
    measured, ideal = (study.typical(runs, key) for key in ("bubble_fraction", "bubble_fraction_ideal"))
    return "<br>/ ".join("–" if value is None else f"{value:.1%}" for value in (measured, ideal))


# --- the crossover ---


def crossover(runs: Sequence[Run]) -> Panel | None:
    found = study.contests(runs)
    if not found:
        return None
    works = study.group_by(found, lambda contest: contest.work)
    body, made = "", {}
    for index, (work, group) in enumerate(list(works.items())[:MOST_SERIES]):
        key = f"winners-{index}"
        made[key] = draw.winners(group)
        body += (f"<h3>{html.escape(work)}</h3>" if work else "") + plot(key)
    head = ["stages", "chunks", "fastest", "tokens/s", "against", "faster by", "bubble theory", "planner", "equal loss"]
    several = len(works) > 1
    rows = [_duel(contest, entry, several) for contest in found for entry in contest.entries[1:]]
    intro = (
        "The fastest schedule for each stages and chunks, and how far ahead of the next. In the table: tokens/s of the "
        "fastest against each other one; what their ideal bubbles promise, (1 − bubble) / (1 − bubble) − 1; what the "
        "planner predicted; and how much sooner the fastest reached the loss that all of them reach."
    )
    return (
        "crossover",
        "Where each schedule wins",
        f"<p>{intro}</p>{body}{table([*head, *['work'] * several], rows)}",
        made,
    )


def _duel(contest: study.Contest, entry: dict, with_work: bool) -> list[str]:
    """The fastest of a contest against another one: the cells of a row."""
    first = contest.entries[0]
    gains = [entry[key] for key in ("gain", "theory_gain", "predicted_gain", "gain_at_equal_loss")]
    return [
        *(cell(str(value), value) for value in (contest.stages, contest.chunks)),
        cell(first["schedule"]),
        cell(f"{first['tokens_per_s']:,.0f}", first["tokens_per_s"]),
        cell(entry["schedule"]),
        *(cell(_percent(gain), gain) for gain in gains),
        *([cell(contest.work)] if with_work else []),
    ]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}"


# --- loss, prediction, time ---


def loss(runs: Sequence[Run]) -> Panel | None:
    have = [run for run in runs if sum(number(step.get("loss")) is not None for step in run.steps) > 1]
    if not have:
        return None
    shown = _evenly(have, MOST_CURVES)
    note = f" {len(shown)} of {len(have)} runs are drawn; curves.csv has all." if len(shown) < len(have) else ""
    buttons = "".join(
        f'<button data-figure="loss" data-set="{name}" aria-pressed="{str(name == "step").lower()}">{name}</button>'
        for name in ("step", "tokens", "minutes")
    )
    body = (
        f"<p>Training loss as a line, validation as circles.{note}</p><div class=choice>{buttons}</div>{plot('loss')}"
    )
    return "loss", "Loss", body, {"loss": draw.loss_curves(shown, _looks(shown))}


def _evenly(runs: Sequence[Run], most: int) -> list[Run]:
    return list(runs) if len(runs) <= most else [runs[i * len(runs) // most] for i in range(most)]


def prediction(runs: Sequence[Run]) -> Panel | None:
    good, body, made = [run for run in runs if run.ended_well], "", {}
    looks = _looks(runs)
    kinds = {
        "step_time_s": ("step time, s", 1.0),
        "bubble_fraction": ("bubble_fraction", 1.0),
        "peak_memory_bytes": ("peak memory, GiB", 2.0**30),
    }
    for key, (title, unit) in kinds.items():
        pairs = [(run, number(run.figures.get(f"predicted.{key}")), number(run.figures.get(key))) for run in good]
        points = [(p / unit, m / unit, looks[str(run.path)]) for run, p, m in pairs if p is not None and m is not None]
        if points:
            made[f"predicted-{key}"] = draw.against(points, f"predicted {title}", f"measured {title}")
            body += f"<div>{plot(f'predicted-{key}')}</div>"
    if not made:
        return None
    intro = "A point a run, written before its first step and measured at its end; on the dotted line both are equal."
    return "predicted", "Predicted against measured", f"<p>{intro}</p><div class=grid>{body}</div>", made


def bubble(runs: Sequence[Run]) -> Panel | None:
    """Measured bubble against theory, and where a step's time goes."""
    good, body, made = [run for run in runs if run.ended_well], "", {}
    looks = _looks(runs)
    for key, title in (("bubble_fraction_ideal", "ideal"), ("bubble_fraction_simulated", "simulated")):
        pairs = [(run, number(run.figures.get(key)), number(run.figures.get("bubble_fraction"))) for run in good]
        points = [(t, m, looks[str(run.path)]) for run, t, m in pairs if None not in (t, m)]
        if points:
            made[f"bubble-{title}"] = draw.against(points, f"{title} bubble_fraction", "measured bubble_fraction")
            body += f"<div>{plot(f'bubble-{title}')}</div>"
    body = f"<div class=grid>{body}</div>"
    timed = [run for run in good if any(key.startswith("time.") for key in run.figures)]
    if timed:
        shown = _evenly(timed, MOST_BARS)
        made["time"] = draw.time_parts(shown, looks)
        body += "<h3>Where a step's time goes</h3>" + plot("time")
    if not made:
        return "bubble", "Bubble", "<p>No run has a measured bubble (bubble_fraction in its result.json).</p>", {}
    intro = "Ideal: every stage takes the same time and transfers none. Simulated: the schedule with measured times."
    return "bubble", "Bubble", f"<p>{intro}</p>{body}", made


# --- timelines ---


def _most_telling(runs: Sequence[Run]) -> list[Run]:
    """MOST_TIMELINES of them: the fastest of each schedule, in the cell of stages and chunks that most schedules ran,
    then the fastest others."""
    fastest = sorted(runs, key=lambda run: -(number(run.figures.get("tokens_per_s")) or 0))

    def first_of_each(group: Sequence[Run]) -> list[Run]:
        return [own[0] for own in study.group_by(group, lambda run: run.config.get("parallel.schedule")).values()]

    cells = study.group_by(fastest, lambda run: tuple(run.config.get(key) for key in study.GRID))
    first = max((first_of_each(group) for group in cells.values()), key=len)  # of equal ones the fastest
    return (first + [run for run in fastest if run not in first])[:MOST_TIMELINES]


def timelines(runs: Sequence[Run]) -> Panel | None:
    """One step of each of a few runs, side by side."""
    have = [run for run in runs if (run.path / "timeline.json").exists()]
    title = "Timelines"
    if not have:
        return "timelines", title, "<p>No run has a timeline.json.</p>", {}
    shown = _most_telling(have)
    chosen = [run for run in have if run in shown]
    looks, body, made, steps = _looks(have), "", {}, {}
    for run in chosen:
        try:
            steps[run.path] = read_timeline(run.path)
        except ValueError as error:
            body += f"<div><h3>{html.escape(looks[str(run.path)].name)}</h3><p>{html.escape(str(error))}</p></div>"
    span = max((describe(bars)["makespan_s"] for bars in steps.values() if bars), default=0.0)
    for index, (path, bars) in enumerate(steps.items()):
        body += f"<div><h3>{html.escape(looks[str(path)].name)}</h3>"
        if bars:
            made[f"timeline-{index}"] = draw.timeline(bars, span)
            body += plot(f"timeline-{index}")
        body += ("" if bars else "<p>timeline.json has no actions.</p>") + "</div>"
    left = len(have) - len(chosen)
    note = f" {left} more have one: --where chooses, timeline.json opens in Perfetto." if left else ""
    intro = f"One step each, on one time scale: a row a rank, a bar an action.{note}"
    return "timelines", title, f"<p>{intro}</p><div class=grid>{body}</div>", made


# --- micro-batches ---


def microbatches(runs: Sequence[Run]) -> Panel | None:
    rows = study.microbatch_rows(runs)
    if not rows:
        return None
    several = len({row["series"] for row in rows}) > 1
    head = [
        "micro-batch",
        "stages",
        "chunks",
        "chunks ≥ 4 × stages",
        "tokens/s",
        "of the best",
        "peak memory",
        "bubble",
        "ideal",
        *(["series"] if several else []),
    ]
    shown = []
    for row in rows:
        speed = cell(row["status"].replace("_", " "))
        if row["tokens_per_s"]:
            speed = cell(f"{row['tokens_per_s']:,.0f}", row["tokens_per_s"])
        counts = [cell(str(row[key]), row[key]) for key in ("micro_batch", "stages", "chunks")]
        rule = f'<td class="{"yes" if row["rule"] else "no"}">{"yes" if row["rule"] else "no"}</td>'
        fractions = [
            cell("" if row[k] is None else f"{row[k]:.1%}", row[k])
            for k in ("bubble_fraction", "bubble_fraction_ideal")
        ]
        best, memory = row["of_best"], row["peak_memory_bytes"] or row["predicted_peak_memory_bytes"]
        shown.append(
            [
                *counts,
                rule,
                speed,
                cell("" if best is None else f"{best:.0%}", best),
                cell(study.show_memory(row), memory),
                *fractions,
                *([cell(row["series"])] if several else []),
            ]
        )
    intro = (
        "The same global batch in fewer, larger micro-batches: the device works better, the bubble grows. The rule of "
        "thumb is chunks ≥ 4 × stages (GPipe, arXiv 1811.06965); hollow points break it."
    )
    made = {"microbatches": draw.microbatches(rows)} if any(row["tokens_per_s"] for row in rows) else {}
    drawn = plot("microbatches") if made else ""
    return "microbatches", "Micro-batch size", f"<p>{intro}</p>{drawn}{table(head, shown)}", made


PANELS: tuple[Callable[[Sequence[Run]], Panel | None], ...] = (
    heat_maps,
    crossover,
    loss,
    prediction,
    bubble,
    timelines,
    microbatches,
)
