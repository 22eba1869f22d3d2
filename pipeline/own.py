"""A user's own schedule: a function in a Python file, or a grid in a text file."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

from pipeline.action import Action


def is_own(name: str) -> bool:
    """Whether a schedule's name is a place: path/to/file.py:function or a text file."""
    return ".py:" in name or name.endswith(".txt") or Path(name).is_file()


def load(name: str, stages: int, chunks: int, interleave: int | None) -> tuple[list[list[Action]], int]:
    """The actions of each rank and the interleave. None = the function's default for it, or what the grid shows.

    `path/to/file.py:function` calls function(stages, chunks, interleave), which gives one list a rank of Action or
    text ("2F0"); another name is a text file: a line a rank, cells separated by blanks, `.` idle, a line that begins
    with # a comment, `rank 0:` in front of a line allowed. ValueError: nothing there, or not what was asked for.
    """
    if ".py:" in name:
        path, _, function = name.rpartition(":")
        rows = _from_function(name, path, function, stages, chunks, interleave)
    else:
        rows = _from_text(name)
    if len(rows) != stages:
        raise ValueError(f"{name} has {len(rows)} rows, one a rank, but stages={stages}: they must be equal")
    actions = [action for row in rows for action in row]
    if not actions:
        raise ValueError(f"{name} has no action at all")
    num_microbatches = max(action.microbatch for action in actions) + 1
    if num_microbatches != chunks:
        runs = f"{name} runs micro-batches 0 to {num_microbatches - 1}"
        raise ValueError(f"{runs}, but chunks={chunks}: set chunks={num_microbatches}")
    num_stages = max(action.stage for action in actions) + 1
    if num_stages % stages or interleave not in (None, num_stages // stages):
        asked = f"stages={stages}" + ("" if interleave is None else f" and interleave={interleave}")
        raise ValueError(f"{name} runs {num_stages} model stages, but {asked}: it must run stages x interleave of them")
    return rows, num_stages // stages


def _from_function(
    name: str, path: str, function: str, stages: int, chunks: int, interleave: int | None
) -> list[list[Action]]:
    if not Path(path).is_file():
        raise ValueError(f"{name}: there is no file {path} in {Path.cwd()}")
    spec = importlib.util.spec_from_file_location(f"own_schedule_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path} does not load: {type(error).__name__}: {error}") from error
    make = getattr(module, function, None)
    if not inspect.isfunction(make):
        has = ", ".join(key for key, _ in inspect.getmembers(module, inspect.isfunction)) or "none"
        raise ValueError(f"{path} has no function {function!r}: it has {has}")
    if interleave is None:
        default = getattr(inspect.signature(make).parameters.get("interleave"), "default", inspect.Parameter.empty)
        interleave = default if isinstance(default, int) else 1
    try:
        rows = make(stages, chunks, interleave)
    except ValueError:
        raise  # its own words for what does not fit
    except Exception as error:
        call = f"{function}({stages}, {chunks}, {interleave})"
        raise ValueError(f"{path}: {call} raises {type(error).__name__}: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError(f"{name} gives {type(rows).__name__}, not a list with a list of actions for each rank")
    return [
        [_cell(f"{name}, rank {rank}", cell) for cell in row if cell is not None and cell != "."]
        for rank, row in enumerate(rows)
    ]


def _from_text(path: str) -> list[list[Action]]:
    if not Path(path).is_file():
        raise ValueError(f"there is no schedule file {path} in {Path.cwd()}")
    rows: list[list[Action]] = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        label, cells = re.fullmatch(r"(?:\s*rank\s+(\d+)\s*:)?(.*)", line).groups()
        if label is not None and int(label) != len(rows):
            raise ValueError(f"{path}, line {number}: rank {label} stands where rank {len(rows)} is expected")
        rows.append([_cell(f"{path}, line {number}", cell) for cell in cells.split() if cell != "."])
    return rows


def _cell(place: str, cell: Action | str) -> Action:
    try:
        return Action.parse(str(cell))
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
