"""Two runs side by side: what differs in configuration, figures, loss and timeline."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

from comparing.runs import Run, number
from comparing.table import SHOWN, gib, text_of
from comparing.timeline import describe, read_timeline
from conf.words import count

WIDEST = 40  # characters of a value in a column
ROUNDING = 1e-5  # of a loss: what float32 sums in another order come to
LOSSES = ("loss", "validation_loss", "perplexity", "bits_per_byte")
_SKIP = ("hardware.sources.",)
# figures of the table first, then whatever else both have; how they are shown
_SHOW: dict[str, Callable[[float], str]] = {key: show for key, (_, show) in SHOWN.items()}


def render(a: Run, b: Run) -> str:
    """Four short tables; a part without a difference says so."""
    parts = [f"A  {a.path}  {a.status}\nB  {b.path}  {b.status}"]
    parts += [_configuration(a, b), _figures(a, b), _loss(a, b), _timelines(a, b), _versions(a, b)]
    return "\n\n".join(parts)


def _align(rows: list[list[str]]) -> str:
    """Columns; what has a longer value than WIDEST stands below them, folded."""
    short = [row for row in rows if max(map(len, row[1:])) <= WIDEST]
    widths = [max(map(len, column)) for column in zip(*short, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in short]
    for row in rows:
        if row not in short:
            lines.append(row[0])
            for side, value in zip("AB", row[1:3], strict=True):
                if not value:
                    continue
                lines.append(textwrap.fill(value, 110, initial_indent=f"  {side}  ", subsequent_indent=" " * 5))
    return "\n".join(line.rstrip() for line in lines)


def _configuration(a: Run, b: Run) -> str:
    keys = [key for key in dict.fromkeys([*a.config, *b.config]) if not key.startswith(_SKIP)]
    rows = [["configuration", "A", "B"]]
    for key in keys:
        values = [text_of(run.config[key]) if key in run.config else "(no such key)" for run in (a, b)]
        if values[0] != values[1]:
            rows.append([key, *values])
    return _align(rows) if len(rows) > 1 else "configuration: the same"


def _figures(a: Run, b: Run) -> str:
    first, second = a.figures, b.figures
    keys = [key for key in dict.fromkeys([*SHOWN, *first, *second]) if key in first or key in second]
    rows = [["figure", "A", "B", "B / A"]]
    for key in keys:
        one, other = first.get(key), second.get(key)
        if one == other or key in ("status", "failure", "reason"):
            continue
        numbers = number(one), number(other)
        ratio = (
            "" if None in numbers or not numbers[0] or key.startswith("error.") else f"{numbers[1] / numbers[0]:.3f}"
        )
        if key.rpartition(".")[2] in LOSSES and None not in numbers and (gap := _relative(*numbers)) < ROUNDING:
            ratio = f"rounding ({gap:.1g})"
        rows.append([key, _shown(key, one), _shown(key, other), ratio])
    return _align(rows) if len(rows) > 1 else "figures: the same"


def _shown(key: str, value: object) -> str:
    if number(value) is None:
        return "" if value is None else str(value)
    if key.startswith("error."):
        return f"{value:+.1%}"
    if key.endswith("_bytes"):
        return gib(value)
    return _SHOW.get(key.removeprefix("predicted."), lambda v: f"{v:.6g}")(value)


def _loss(a: Run, b: Run) -> str:
    """How far apart the losses of the same steps are, among the steps that were read of both."""
    losses = [{step["step"]: number(step.get("loss")) for step in run.steps} for run in (a, b)]
    both = sorted(step for step in losses[0] if None not in (losses[0][step], losses[1].get(step)))
    if not both:
        return "loss: no step in common"
    gaps = {step: abs(losses[0][step] - losses[1][step]) for step in both}
    differ = [step for step in both if gaps[step] > 0]
    if not differ:
        return f"loss: the same bit for bit at all {count(len(both), 'step')} compared, up to step {both[-1]}"
    relative = {step: _relative(losses[0][step], losses[1][step]) for step in differ}
    beyond = [step for step in differ if relative[step] >= ROUNDING]
    if not beyond:
        worst = max(differ, key=relative.__getitem__)
        return (
            f"loss: the same but for rounding at all {count(len(both), 'step')} compared; "
            f"the largest difference is {relative[worst]:.1g} of it, at step {worst}"
        )
    worst, rounded = max(both, key=gaps.__getitem__), len(differ) - len(beyond)
    return (
        f"loss: {len(beyond)} of {count(len(both), 'step')} compared differ, the first is step {beyond[0]} "
        f"(by {gaps[beyond[0]]:.3g}); the largest difference is {gaps[worst]:.3g} at step {worst}"
        + (f"; {rounded} more by rounding" if rounded else "")
    )


def _relative(one: float, other: float) -> float:
    return abs(one - other) / (max(abs(one), abs(other)) or 1.0)


def _timelines(a: Run, b: Run) -> str:
    rows = [["timeline of a step", "A", "B"]]
    figures = []
    for run in (a, b):
        try:
            figures.append(describe(read_timeline(run.path)))
        except ValueError as error:
            return f"timeline: {error}"
    if not all(figures):
        missing = [name for name, found in zip("AB", figures, strict=True) if not found]
        return f"timeline: {' and '.join(missing)} has none" if len(missing) == 1 else "timeline: neither has one"
    for key in dict.fromkeys([*figures[0], *figures[1]]):
        rows.append([key, *(_timed(key, found.get(key)) for found in figures)])
    return _align(rows)


def _timed(key: str, value: float | None) -> str:
    if value is None:
        return ""
    if key.endswith("_s"):
        return f"{1e3 * value:.3f} ms"
    return f"{value:.1%}" if key.endswith("busy") else f"{value:g}"


def _versions(a: Run, b: Run) -> str:
    found = [run.result.get("versions") if isinstance(run.result.get("versions"), dict) else {} for run in (a, b)]
    rows = [["version", "A", "B"]]
    for key in dict.fromkeys([*found[0], *found[1]]):
        if found[0].get(key) != found[1].get(key):
            rows.append([key, str(found[0].get(key, "")), str(found[1].get(key, ""))])
    return _align(rows) if len(rows) > 1 else "versions: the same"
