"""The table of runs: which columns differ, --where, --sort, as text and as CSV."""

from __future__ import annotations

import csv
import difflib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from comparing.runs import Run, number

# no part of what is compared: bookkeeping, and what follows from other keys (a list of layers from stages and model)
NO_COLUMN = re.compile(
    r"resume|resume_sweep|preflight|profile|hardware\.sources\..*|train\.(log_every|keep_checkpoints|validate_every)"
    r"|train\.(checkpoint_every|max_minutes|stall_timeout_s|max_restarts|validate_sequences)|parallel\.name"
)
# the terminal's figures, where a run has them: heading, and how a value is shown
SHOWN: dict[str, tuple[str, Callable[[float], str]]] = {
    "loss": ("loss", lambda v: f"{v:.4f}"),
    "validation_loss": ("val. loss", lambda v: f"{v:.4f}"),
    "evaluation.loss": ("held-out loss", lambda v: f"{v:.4f}"),
    "evaluation.perplexity": ("perplexity", lambda v: f"{v:,.4f}" if v < 1e6 else f"{v:.4g}"),
    "evaluation.bits_per_byte": ("bits/byte", lambda v: f"{v:.4f}"),
    "tokens_per_s": ("tokens/s", lambda v: f"{v:,.0f}"),
    "step_time_s": ("step time", lambda v: f"{v:.3f} s" if v < 100 else f"{v:.1f} s"),
    "mfu": ("mfu", lambda v: f"{v:.3f}"),
    "bubble_fraction": ("bubble", lambda v: f"{v:.1%}"),
    "bubble_fraction_ideal": ("ideal", lambda v: f"{v:.1%}"),
    "peak_memory_bytes": ("peak memory", lambda v: gib(v)),
    "cost_usd": ("cost", lambda v: f"${v:,.2f}"),
    "error.step_time_s": ("predicted", lambda v: f"{v:+.1%}"),
}
VAGUE = ("enabled", "path", "kind", "name")  # last parts of keys that say nothing without their group
_OPERATORS = ("!=", "<=", ">=", "=", "<", ">")


def gib(count: float) -> str:
    """A number of bytes for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


# --- columns ---


def differing(runs: Sequence[Run]) -> list[str]:
    """Config keys that do not have one value in all of these runs, in the order of the configuration.

    A key that some runs do not have (an older version's) counts as differing only among those that have it.
    """
    keys = dict.fromkeys(key for run in runs for key in run.config)
    typed = {override.partition("=")[0].lstrip("+~") for run in runs for override in run.overrides}
    found = []
    for key in keys:
        chosen = key == "parallel.balance" or (key.startswith("hardware.") and key != "hardware.name")
        if NO_COLUMN.fullmatch(key) or (chosen and key not in typed):
            continue
        if len({text_of(run.config[key]) for run in runs if key in run.config}) > 1:
            found.append(key)
    named = [key for key in found if key in ("model.name", "data.name", "optimizer.name")]
    return [key for key in found if not any(_of_group(key, name) and follows(runs, key, name) for name in named)]


def _of_group(key: str, name: str) -> bool:
    return key != name and key.partition(".")[0] == name.partition(".")[0]


def follows(runs: Sequence[Run], key: str, name: str) -> bool:
    """Whether the value of `name` says the value of `key` in every run."""
    values: dict[str, set[str]] = {}
    for run in runs:
        if key in run.config and name in run.config:
            values.setdefault(text_of(run.config[name]), set()).add(text_of(run.config[key]))
    return all(len(found) == 1 for found in values.values())


def short_names(keys: Sequence[str], configs: Iterable[Mapping[str, Any]] = ()) -> dict[str, str]:
    """Keys by their last part, where it is not VAGUE and no other key of these configurations ends so:
    {"parallel.stages": "stages", "emulate.enabled": "emulate.enabled"}.

    The layout's keep it ("schedule", not "parallel.schedule") unless another of `keys` ends so too: they are what is
    compared.
    """
    known = Counter(key.rpartition(".")[2] for key in dict.fromkeys(key for config in configs for key in config))
    shown = Counter(key.rpartition(".")[2] for key in keys)
    names = {}
    for key in keys:
        group, _, last = key.rpartition(".")
        clear = last not in VAGUE and (known[last] <= 1 or group == "parallel")
        names[key] = last if clear and shown[last] == 1 else key
    return names


def value_of(run: Run, key: str) -> Any:
    """A config value, a figure, `status` or `run` (the folder's name); None where the run has none."""
    if key in ("status", "run"):
        return run.status if key == "status" else run.name
    return run.config[key] if key in run.config else run.figures.get(key)


def known_keys(runs: Sequence[Run]) -> list[str]:
    keys = [key for run in runs for key in (*run.config, *run.figures)]
    return list(dict.fromkeys(["status", "run", *keys]))


def find_key(runs: Sequence[Run], typed: str) -> str:
    """The key itself, or by its last part where one key has it ("stages"); where several have, as in the headings of
    `short_names`, the layout's unless another of them differs between these runs. ValueError names what was probably
    meant."""
    keys = known_keys(runs)
    if typed in keys:
        return typed
    by_end = [key for key in keys if key.rpartition(".")[2] == typed]
    clear = by_end
    if len(by_end) > 1:
        others = [key for key in by_end if not key.startswith("parallel.")]
        clear = [] if set(others) & set(differing(runs)) else [key for key in by_end if key not in others]
    if len(clear) == 1:
        return clear[0]
    if by_end:
        raise ValueError(f"{typed} is the last part of several keys, type one of them whole: {', '.join(by_end)}")
    close = _close(typed, keys)
    known = "the keys are those of a run's resolved.json (parallel.chunks, or chunks) and result.json"
    advice = f"did you mean {', '.join(close)}?" if close else known
    raise ValueError(f"{typed} is no configuration key and no figure of these runs; {advice}")


def _close(typed: str, keys: Sequence[str]) -> list[str]:
    """Up to three keys that are spelt like this, whole or by their last part."""
    spelt: dict[str, list[str]] = {}
    for key in keys:
        for name in {key, key.rpartition(".")[2]}:
            spelt.setdefault(name, []).append(key)
    names = difflib.get_close_matches(typed, list(spelt), 3, cutoff=0.7)
    return list(dict.fromkeys(key for name in names for key in spelt[name]))[:3]


def text_of(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value).replace(", ", ",")


# --- where and sort ---


def where(runs: Sequence[Run], conditions: Sequence[str]) -> list[Run]:
    """The runs that meet every condition: KEY=VALUE (VALUE,VALUE for any of them), !=, <, <=, >, >=.

    ValueError for what is no condition, an unknown key, or when no run is left.
    """
    kept = list(runs)
    for condition in conditions:
        operator = next((o for o in _OPERATORS if o in condition), None)
        key, _, wanted = condition.partition(operator or "=")
        if operator is None or not key:
            raise ValueError(f"--where {condition} is no condition: KEY=VALUE, or with != < <= > >=")
        key = find_key(runs, key.strip())
        left = [run for run in kept if _meets(value_of(run, key), operator, wanted.strip(), condition)]
        if not left:
            ordered = sorted((value_of(run, key) for run in kept), key=_order)
            values = list(dict.fromkeys(map(text_of, ordered)))
            more = ", …" if len(values) > 10 else ""
            raise ValueError(f"--where {condition} leaves no run; {key} is {', '.join(values[:10])}{more}")
        kept = left
    return kept


def _order(value: Any) -> tuple[bool, float, str]:
    """Numbers by their size, then all else by its text."""
    size = number(value)
    return size is None, size or 0.0, text_of(value)


def _meets(value: Any, operator: str, wanted: str, condition: str) -> bool:
    if operator in ("=", "!="):
        same = any(_same(value, one) for one in [wanted, *wanted.split(",")])
        return same == (operator == "=")
    try:
        bound = float(wanted)
    except ValueError:
        raise ValueError(f"--where {condition}: {wanted} is no number to compare with") from None
    value = number(value)
    if value is None:
        return False
    return {"<": value < bound, "<=": value <= bound, ">": value > bound, ">=": value >= bound}[operator]


def _same(value: Any, wanted: str) -> bool:
    if number(value) is not None:
        try:
            return float(wanted) == value
        except ValueError:
            return False
    return text_of(value) == wanted.replace(", ", ",")


def sort(runs: Sequence[Run], key: str, reverse: bool = False) -> list[Run]:
    """By a config key or figure, smallest first; runs without a value come last. ValueError for an unknown key."""
    key = find_key(runs, key)
    have = [run for run in runs if value_of(run, key) is not None]
    numbers = all(number(value_of(run, key)) is not None for run in have)
    have.sort(key=lambda run: value_of(run, key) if numbers else text_of(value_of(run, key)), reverse=reverse)
    return have + [run for run in runs if value_of(run, key) is None]


# --- text ---


def render(runs: Sequence[Run], extra: dict[str, Sequence[str]] | None = None) -> str:
    """A line a run: the differing config values, status, figures, the folder's name. extra: heading -> cells, first."""
    keys = differing(runs)
    names = short_names(keys, [run.config for run in runs])
    columns = [[heading, *cells] for heading, cells in (extra or {}).items()]
    columns += [[names[key], *(text_of(r.config[key]) if key in r.config else "" for r in runs)] for key in keys]
    columns.append(["status", *(show_status(run) for run in runs)])
    for key, (heading, _) in SHOWN.items():
        cells = [show_figure(run, key) for run in runs]
        if any(cells) and (key != "bubble_fraction_ideal" or set(cells) != {"0.0%"}):
            columns.append([heading, *cells])
    columns.append(["run", *(run.name for run in runs)])
    rows = zip(*(_aligned(column) for column in columns), strict=True)
    lines = ["  ".join(row).rstrip() for row in rows]
    return "\n".join([*lines, *_notes(runs)])


def show_status(run: Run) -> str:
    """The status, marked where the hardware was not there."""
    return f"{run.status} (emulated)" if run.result.get("emulated") else run.status


def show_figure(run: Run, key: str) -> str:
    """A figure for people, "" where the run has none; "nan" stays a word."""
    value = run.figures.get(key)
    if isinstance(value, str):
        return value
    return "" if value is None else SHOWN[key][1](value)


def _aligned(column: list[str]) -> list[str]:
    width = max(map(len, column))
    right = all(re.match(r"[-+$]?\d|nan|inf|$", cell) for cell in column[1:]) and column[0] != "run"
    return [cell.rjust(width) if right else cell.ljust(width) for cell in column]


def _notes(runs: Sequence[Run]) -> list[str]:
    """What is to say of runs that did not complete, one a line."""
    told = [f"{run.status}: {run.name}: {run.note}" for run in runs if run.note and run.status != "stopped"]
    return ["", *told] if told else []


# --- CSV ---


def to_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as CSV with every key that occurs, in the order of first sight; None as an empty cell."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return buffer.getvalue()


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (list, dict, bool)) else value


# what a row says of its run even where all runs agree
ALWAYS = (
    "model.name parallel.engine parallel.schedule parallel.stages parallel.chunks parallel.interleave "
    "train.global_batch train.sequence train.seed hardware.name"
).split()


def csv_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """results.csv: a row a run: folder, status, note, config (differing keys and ALWAYS), figures, figures a rank."""
    keys = list(dict.fromkeys([*differing(runs), *ALWAYS]))
    had = dict.fromkeys(key for run in runs for key in run.figures)
    figures = list(dict.fromkeys([*(key for key in SHOWN if key in had or not key.startswith("evaluation.")), *had]))
    rows = []
    for run in runs:
        row = {"run": run.name, "folder": run.path.as_posix(), "status": run.status, "note": run.note}
        row |= {key: run.config.get(key) for key in keys}
        row |= {key: run.figures.get(key) for key in figures if key != "status"}
        for key in ("peak_memory_bytes", "peak_resident_bytes"):
            values = run.result.get(key)
            row |= {f"{key}.rank_{i}": v for i, v in enumerate(values if isinstance(values, list) else [])}
        rows.append(row)
    return rows
