"""What a model, a layout or a hardware is called: the name of its file, and what was typed over it. No torch."""

from __future__ import annotations

import math
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields
from functools import cache
from typing import Any

from conf.schema import HardwareConfig, ModelConfig, ParallelConfig
from conf.words import safe

# groups whose file's name stands in headings and in the names of folders and files
NAMED = {"model": ModelConfig, "parallel": ParallelConfig, "hardware": HardwareConfig}
# no change of what the file says: the name itself, where figures are from, and the list that a cut was found to be
NO_CHANGE = ("name", "sources", "balance")


def named(group: str, values: Any) -> str:
    """The file that a group's values are from, with what was typed over it: "pp2 with stages=8, schedule=gpipe"."""
    changes = changed(group, values)
    return f"{values.name} with {', '.join(changes)}" if changes else values.name


def file_name(*parts: tuple[str, Any]) -> str:
    """The same of several (group, values), as part of a file's name: "gpt_tiny_pp2_stages-8"; safe in any file system
    and, without an equals sign, to type in resume=; bounded in length."""
    return safe("_".join("_".join([values.name, *changed(group, values)]) for group, values in parts).replace("=", "-"))


def changed(group: str, values: Any) -> list[str]:
    """What a model, layout or hardware has otherwise than the file that it is named for: ["stages=8"].

    An open value (null) of the file that was filled is no change. Empty where no file in conf/ has this name.
    """
    found = []
    for key, written in _written(group, values.name).items():
        value = getattr(values, key)
        same = [written]
        if key == "vocabulary":  # a resolved one is padded
            same.append(math.ceil(written / values.vocabulary_multiple) * values.vocabulary_multiple)
        if value not in same:
            found.append(f"{key}={_text(value)}")
    return found


@cache
def _written(group: str, name: str) -> dict[str, Any]:
    """What the file NAME says, or leaves to the default, where that is a value."""
    from conf.resolve import group_file

    try:
        values = group_file(group, name)
    except ValueError:
        return {}
    defaults = {field.name: field.default for field in fields(NAMED[group]) if field.default is not NO_DEFAULT}
    stands = {key: value for key, value in (defaults | values).items() if value is not None and value != "???"}
    return {key: value for key, value in stands.items() if key not in NO_CHANGE}


def _text(value: Any) -> str:
    """As it is typed."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
