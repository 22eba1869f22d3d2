"""The few HTML pieces that the page and its panels are made of."""

from __future__ import annotations

import html
from collections.abc import Sequence

from comparing.runs import number


def cell(text: str, value: object = None, kind: str = "") -> str:
    """A table cell; with a number in `value` flush right, and sorted by it. kind: a class of comparing/page.html."""
    if number(value) is not None:
        return f'<td class="number" data-v="{value!r}">{html.escape(text)}</td>'
    return f'<td class="{html.escape(kind)}">{html.escape(text)}</td>' if kind else f"<td>{html.escape(text)}</td>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """A table that scrolls by itself where it is too wide; rows of `cell`s."""
    heading = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    lines = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    start = f'<div class="scroll" tabindex="0"><table class="{kind}">'
    return f"{start}<thead><tr>{heading}</tr></thead><tbody>{lines}</tbody></table></div>"


def plot(name: str) -> str:
    """Where the page's script draws the figure of this name."""
    return f'<div class="plot" id="{name}"></div>'
