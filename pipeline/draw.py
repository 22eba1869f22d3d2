"""Schedules drawn on a time axis, as text and as PNG; the command `python -m pipeline.schedule`. No torch."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from pipeline.schedule import KINDS, SCHEDULES, Schedule, make_schedule
from pipeline.simulate import Timeline, simulate

_UNITS = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}  # durations that are drawn

_USAGE = """\
python -m pipeline.schedule NAME stages=P [chunks=M] [interleave=V] [--png FILE]
draws a schedule with F = 1, B = 2, I = W = 1 and transfers that take no time.
  NAME        one of those below, path/to/file.py:function, or a grid: path/to/grid.txt
  stages      pipeline ranks, p
  chunks      micro-batches, m (default 4 x stages)
  interleave  model stages a rank, v (default: the schedule's own)
  --png FILE  draws it as a picture as well
What is printed is itself a grid that can be edited and run."""

_PIXELS = 12_000  # width of the longest picture

# Red, green, blue of each kind; a rank's later model stages are drawn lighter.
COLOURS = {"F": (86, 139, 219), "B": (92, 171, 108), "I": (84, 178, 178), "W": (228, 166, 75)}


def text(schedule: Schedule, timeline: Timeline, *, colours: bool = False) -> str:
    """The grid: a row a rank, a column a unit of time, `.` idle. Needs whole-number times, as drawn by the command."""
    width = max(len(str(action)) for row in schedule.actions for action in row) + 1
    label = len(f"rank {schedule.stages - 1}: ")
    ticks = "".join(str(t).ljust(5 * width) for t in range(0, timeline.makespan + 1, 5))
    painted = palette(schedule)
    lines = ["# time".ljust(label) + ticks.rstrip()]
    for rank, row in enumerate(schedule.actions):
        cells, now = [], 0
        for action, start, end in zip(row, timeline.start[rank], timeline.end[rank], strict=True):
            cells += [".".ljust(width)] * (start - now)
            cell = str(action).ljust((end - start) * width - 1)
            cells.append((_paint(painted[action.stage, action.kind], cell) if colours else cell) + " ")
            now = end
        cells += [".".ljust(width)] * (timeline.makespan - now)
        lines.append((f"rank {rank}: ".ljust(label) + "".join(cells)).rstrip())
    return "\n".join(lines)


def figures(schedule: Schedule, timeline: Timeline) -> list[str]:
    """The lines under the grid."""
    unit = "" if schedule.interleave == 1 else f" (of 1/{schedule.interleave} of a rank's layers each)"
    return [
        f"bubble_fraction  {timeline.bubble_fraction:.4f}  idle / makespan ({timeline.makespan}), mean over ranks",
        f"bubble_in_span   {timeline.bubble_in_span:.4f}  idle between a rank's own first and last action / that span",
        f"bubble_overhead  {timeline.bubble_overhead:.4f}  idle / work",
        f"held_microbatches {' '.join(map(str, timeline.peak_held))}  at the peak of each rank{unit}",
    ]


def _paint(colour: tuple[int, int, int], cell: str) -> str:
    red, green, blue = colour
    return f"\033[30;48;2;{red};{green};{blue}m{cell}\033[0m"


def palette(schedule: Schedule) -> dict[tuple[int, str], tuple[int, int, int]]:
    """Red, green, blue of each (stage, kind)."""
    palette = {}
    for stage, rank in enumerate(schedule.rank_of):
        earlier = schedule.rank_of[:stage].count(rank)  # the rank's own stages before this one
        white = 0.55 * earlier / max(1, schedule.interleave - 1)
        for kind, colour in COLOURS.items():
            palette[stage, kind] = tuple(round(c + (255 - c) * white) for c in colour)
    return palette


def png(schedule: Schedule, timeline: Timeline, path: str) -> None:
    """Writes the picture: a row a rank, micro-batches as numbers where they fit.

    ValueError for a schedule too long for a picture, OSError when it cannot be written.
    """
    if timeline.makespan > _PIXELS:
        raise ValueError(f"a picture holds {_PIXELS} units of time, not {timeline.makespan}: draw fewer chunks")
    from PIL import Image, ImageDraw, ImageFont  # only here: the text needs no library

    scale = 2  # pixels a point: sharp on dense screens
    unit = min(30 * scale, _PIXELS // timeline.makespan)  # width of a unit of time
    height, gap, left, top, line = (points * scale for points in (28, 5, 74, 44, 18))
    font, title = ImageFont.load_default(12 * scale), ImageFont.load_default(16 * scale)
    notes = figures(schedule, timeline)
    bottom = top + schedule.stages * (height + gap)
    width = left + timeline.makespan * unit
    image = Image.new("RGB", (max(width + 16 * scale, 640 * scale), bottom + (len(notes) + 2) * line), "white")
    draw = ImageDraw.Draw(image)
    draw.text((left, top / 2), f"{schedule.name}   {_numbers(schedule)}", fill="black", font=title, anchor="lm")
    painted = palette(schedule)
    numbered = draw.textlength(str(schedule.chunks), font=font) < unit - scale
    for rank, row in enumerate(schedule.actions):
        y = top + rank * (height + gap)
        draw.text((left - gap, y + height / 2), f"rank {rank}", fill="black", font=font, anchor="rm")
        draw.rectangle((left, y, width - 1, y + height), fill=(238, 238, 238))
        for action, start, end in zip(row, timeline.start[rank], timeline.end[rank], strict=True):
            box = (left + start * unit, y, left + end * unit - min(scale, unit // 2) - 1, y + height)
            draw.rectangle(box, fill=painted[action.stage, action.kind])
            if numbered:
                middle = ((box[0] + box[2]) / 2, y + height / 2)
                draw.text(middle, str(action.microbatch), fill="black", font=font, anchor="mm")
    x, y = left, bottom + line / 2
    kinds = {action.kind for row in schedule.actions for action in row}
    for kind in (kind for kind in KINDS if kind in kinds):
        draw.rectangle((x, y - 5 * scale, x + 10 * scale, y + 5 * scale), fill=COLOURS[kind])
        draw.text((x + 14 * scale, y), f"{kind} {KINDS[kind]}", fill="black", font=font, anchor="lm")
        x += 24 * scale + draw.textlength(f"{kind} {KINDS[kind]}", font=font)
    if schedule.interleave > 1:
        draw.text((x, y), "lighter: later stages of the rank", fill="black", font=font, anchor="lm")
    for note in notes:
        y += line
        draw.text((left, y), note, fill=(70, 70, 70), font=font, anchor="lm")
    image.save(path, format="PNG")


def _numbers(schedule: Schedule) -> str:
    return f"stages={schedule.stages} chunks={schedule.chunks} interleave={schedule.interleave}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _parse(argv: list[str]) -> tuple[str, dict[str, int], str | None]:
    """The schedule's name, its numbers, and the picture's file."""
    parser = _Parser(add_help=False)
    parser.add_argument("name")
    parser.add_argument("numbers", nargs="*")
    parser.add_argument("--png")
    arguments = parser.parse_intermixed_args(argv)
    numbers = {}
    for item in arguments.numbers:
        key, _, value = item.partition("=")
        if key not in ("stages", "chunks", "interleave") or not value.isdecimal():
            raise ValueError(f"{item!r} is not understood: write stages=P, chunks=M or interleave=V, whole numbers")
        numbers[key] = int(value)
    if "stages" not in numbers:
        raise ValueError(f"stages is missing: python -m pipeline.schedule {arguments.name} stages=4 chunks=8")
    numbers.setdefault("chunks", 4 * numbers["stages"])
    return arguments.name, numbers, arguments.png


def main(argv: list[str]) -> int:
    """`python -m pipeline.schedule`: the exit code, 2 for what the user got wrong."""
    if not argv or {"-h", "--help"} & set(argv):
        lines = [f"  {name:<17} {function.__doc__.splitlines()[0]}" for name, function in SCHEDULES.items()]
        return _print([_USAGE, "", "schedules:", *lines])
    try:
        name, numbers, picture = _parse(argv)
        schedule = make_schedule(name, **numbers)
        timeline = simulate(schedule, **_UNITS)
        if picture is not None:
            png(schedule, timeline, picture)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    grid = text(schedule, timeline, colours=colours)
    return _print([f"# {schedule.name} {_numbers(schedule)}", grid, *(f"# {f}" for f in figures(schedule, timeline))])


def _print(lines: list[str]) -> int:
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:  # `| head` has seen enough; what is left must not fail again when Python flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
