"""How things are said to people: counts, large numbers, names of files, names that are unknown. No torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import get_type_hints

NAME_LENGTH = 120  # characters of a folder's name that values may take
LARGE = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))


# --- numbers ---


def count(number: int, noun: str) -> str:
    """ "1 stage", "8 micro-batches", "4,096 tokens"."""
    return f"{number:,} {plural(number, noun)}"


def plural(number: float, noun: str) -> str:
    """The noun alone: "stage" of 1, "stages" of 0 and 2, "processes", "batches", "entries"."""
    if number == 1:
        return noun
    if noun.endswith("ry"):
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "ch", "sh")) else f"{noun}s"


def significant(value: float, digits: int = 3) -> str:
    """So many significant digits, never as a power of ten where the number is large: "0.0259", "23.6", "1,310"."""
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 10**digits else f"{value:.{digits}g}"


def large(value: float) -> str:
    """ "983,040", "104.9 billion": words from ten million on."""
    if abs(value) < 1e7:
        return f"{value:,.0f}"
    unit, word = next(pair for pair in LARGE if float(f"{abs(value):.4g}") >= pair[0])
    return f"{significant(value / unit, 4)} {word}"


# --- names ---


def safe(text: str) -> str:
    """Text as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9.=+_-]+", "-", text)[:NAME_LENGTH].strip("_-")


def unknown_option(group: str, option: str, known: Iterable[str]) -> str:
    """Says what a group's files are, and which one was probably meant; +experiment= as it is typed."""
    typed, known = f"{'+' * (group == 'experiment')}{group}=", sorted(known)
    close = difflib.get_close_matches(option, known, 1)
    meant = f". Did you mean {typed}{close[0]}? Known" if close else "; known"
    return f"{typed}{option} is unknown{meant} are {', '.join(known)}"


def unknown_key(full_key: str, schema: type) -> str:
    """Says what the group's keys are, and which one was probably meant; at the root also one of a group ("stages")."""
    group, dot, key = full_key.rpartition(".")
    known = [field.name for field in fields(schema)]
    close = [f"{group}{dot}{name}" for name in difflib.get_close_matches(key, known, 1)]
    close = close or ([] if group else _in_groups(key, schema))
    meant = f" Did you mean {' or '.join(close)}?" if close else ""
    where = f" in {group}" if group else ""
    return f"{full_key} is no key of the configuration.{meant} Known{where} are {', '.join(known)}"


def _in_groups(key: str, schema: type) -> Sequence[str]:
    groups = {name: part for name, part in get_type_hints(schema).items() if is_dataclass(part)}
    return [f"{group}.{key}" for group, part in groups.items() if key in {field.name for field in fields(part)}]
