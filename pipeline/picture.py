"""A measured step drawn above the predicted one, on one time axis, as PNG. Imports no torch."""

from __future__ import annotations

import math
import os

from pipeline.action import KINDS, Schedule
from pipeline.bubble import arrivals_of, ran_as, repeated, source_of
from pipeline.draw import COLOURS, palette
from pipeline.simulate import Timeline
from pipeline.spans import DATA, OPTIMIZER, REDUCE, RankStep, Span, Timing

_SCALE = 2  # pixels a point: sharp on dense screens
_WIDTH = 1160 * _SCALE  # of the time axis
_LEFT, _RIGHT, _TOP, _LINE = 64 * _SCALE, 24 * _SCALE, 40 * _SCALE, 18 * _SCALE
_IDLE, _GREY, _RECEIVE = (238, 238, 238), (90, 90, 90), (214, 64, 69)
_OTHERS = {DATA: (170, 170, 170), REDUCE: (146, 104, 182), OPTIMIZER: (120, 94, 74)}


def planned_step(schedule: Schedule, timeline: Timeline, reduction_s: float, optimizer_s: float) -> list[RankStep]:
    """A simulated step as if it had been measured: the flush from 0 on, then reduction and update on every rank."""
    begun: dict = {}
    for row, starts, ends in zip(schedule.actions, timeline.start, timeline.end, strict=True):
        begun |= {action: Timing(action, start, end) for action, start, end in zip(row, starts, ends, strict=True)}
    end = timeline.makespan
    spans = [Span(REDUCE, REDUCE, end, end + reduction_s)]
    spans.append(Span(OPTIMIZER, OPTIMIZER, end + reduction_s, end + reduction_s + optimizer_s))
    steps = []
    for row in schedule.actions:
        free = 0.0
        for action in row:
            timing, source = begun[action], source_of(action, begun)
            if source is not None and schedule.rank_of[source.stage] != schedule.rank_of[action.stage]:
                timing.wait_s, timing.arrived_s = free, timing.start_s
                begun[source].sent_s = begun[source].end_s
            free = timing.end_s
        steps.append(RankStep(0.0, spans[-1].end_s, [begun[action] for action in row], spans))
    return steps


def draw(
    path: str | os.PathLike,
    schedule: Schedule,
    measured: list[RankStep],
    planned: list[RankStep] | None,
    *,
    title: str,
    notes: list[str],
) -> None:
    """Writes the picture. planned: from `planned_step`; it is drawn from the measured step's first F on, in the same
    scale. notes: lines under the picture. OSError when it cannot be written."""
    from PIL import Image, ImageDraw, ImageFont

    font, large = ImageFont.load_default(12 * _SCALE), ImageFont.load_default(16 * _SCALE)
    origin = min(rank.begin_s for rank in measured)
    first = min(rank.timings[0].start_s for rank in measured) - origin
    panels = [("measured", measured, origin)]
    if planned is not None:
        panels.append(("predicted", planned, -first))
    longest = max(rank.end_s - zero for _, panel, zero in panels for rank in panel)
    height, gap = (22 if len(measured) <= 16 else 12) * _SCALE, 4 * _SCALE
    panel_height = _LINE + len(measured) * (height + gap)
    bottom = _TOP + len(panels) * panel_height
    size = (_LEFT + _WIDTH + _RIGHT, int(bottom + (len(notes) + 2.6) * _LINE))
    image = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(image)
    pen.text((_LEFT, _TOP / 2), title, fill="black", font=large, anchor="lm")
    pixels = _WIDTH / longest
    _axis(pen, font, longest, pixels, bottom)
    for index, (name, panel, zero) in enumerate(panels):
        top = _TOP + index * panel_height
        pen.text((_LEFT, top + _LINE / 2), name, fill="black", font=font, anchor="lm")
        for rank in range(len(panel)):
            y = top + _LINE + rank * (height + gap)
            pen.text((_LEFT - gap, y + height / 2), f"rank {rank}", fill="black", font=font, anchor="rm")
        _panel(pen, font, schedule, panel, zero, pixels, top + _LINE, height, gap)
    _legend(pen, font, schedule, bottom + 1.6 * _LINE)
    for line, note in enumerate(notes):
        pen.text((_LEFT, bottom + (line + 2.6) * _LINE), note, fill=_GREY, font=font, anchor="lm")
    image.save(path, format="PNG")


def _panel(pen, font, schedule: Schedule, ranks: list[RankStep], zero: float, pixels: float, top, height, gap) -> None:
    """The bars of each rank; `zero` is where the axis begins."""
    painted = palette(schedule)
    flushes = len(ranks[0].timings) // len(schedule.actions[0])
    ran, arrivals = ran_as(schedule, ranks), arrivals_of(ranks)
    numbered = str(schedule.chunks * flushes - 1)
    for rank, (row, measured) in enumerate(zip(repeated(schedule, flushes).actions, ranks, strict=True)):
        y = top + rank * (height + gap)

        def bar(start: float, end: float, colour, y=y, inset=0) -> tuple[int, int]:
            left, right = (round(_LEFT + (time - zero) * pixels) for time in (start, end))
            if right > left:  # neighbours are told apart by a gap, where there is room for one
                last = right - (_SCALE if right - left > 4 * _SCALE else 1)
                pen.rectangle((left, y + inset, last, y + height - inset), fill=colour)
            return left, right

        bar(measured.begin_s, measured.end_s, _IDLE)
        for span in measured.spans:
            begun = span.start_s if span.kind != REDUCE else min(arrivals[span.label], span.end_s)
            if span.kind in _OTHERS:
                bar(begun, span.end_s, _OTHERS[span.kind])
        for action in row:
            timing, source = ran[action][1], source_of(action, ran)
            if timing.wait_s is not None:
                sent = ran[source][1].sent_s
                bar(min(max(timing.wait_s, sent), timing.arrived_s), timing.arrived_s, _RECEIVE, inset=height // 3)
            left, right = bar(timing.start_s, timing.end_s, painted[action.stage, action.kind])
            if pen.textlength(numbered, font=font) + 2 * _SCALE < right - left and height > font.size:
                middle = ((left + right) / 2, y + height / 2)
                pen.text(middle, str(action.microbatch), fill="black", font=font, anchor="mm")


def _axis(pen, font, longest: float, pixels: float, y: float) -> None:
    """Ticks at 1, 2 or 5 times a power of ten, at most a dozen."""
    power = 10.0 ** math.floor(math.log10(longest / 12))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if longest / (power * factor) <= 12)
    unit, shown = ("s", 1.0) if longest >= 2 else ("ms", 1e3)
    for tick in range(int(longest / step) + 1):
        x = _LEFT + tick * step * pixels
        pen.line((x, _TOP, x, y), fill=(200, 200, 200))
        pen.text((x, y + _LINE / 2), f"{tick * step * shown:g} {unit}", fill=_GREY, font=font, anchor="mm")


def _legend(pen, font, schedule: Schedule, y: float) -> None:
    kinds = {action.kind for row in schedule.actions for action in row}
    entries = [(COLOURS[kind], f"{kind} {KINDS[kind].split(' (')[0]}") for kind in KINDS if kind in kinds]
    entries.append((_RECEIVE, "message under way"))
    entries += [(colour, name) for name, colour in _OTHERS.items()] + [(_IDLE, "idle")]
    if schedule.interleave > 1:
        entries.append(("white", "lighter: later stages of the rank"))
    x = _LEFT
    for colour, text in entries:
        pen.rectangle((x, y - 5 * _SCALE, x + 10 * _SCALE, y + 5 * _SCALE), fill=colour)
        pen.text((x + 14 * _SCALE, y), text, fill="black", font=font, anchor="lm")
        x += 28 * _SCALE + pen.textlength(text, font=font)
