"""Faults in what was typed, as Hydra and OmegaConf find them, in one line that says what would be right. No torch."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from typing import get_type_hints

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from conf.words import unknown_key, unknown_option

BAD_INPUT = (ValueError, HydraException, OmegaConfBaseException)
# in OmegaConf's words -> what a value must be
KINDS = {
    "converted to Integer": "a whole number",
    "converted to Float": "a number",
    "not a valid bool": "true or false",
    "to string": "text",
    "not a ListConfig": "a list, as in [a,b]",
    "to Dict": "keys with values, as in {a: b}",
    "not Optional": "a value, not null",
}
# in Hydra's words -> in ours
ADVICE = {
    r"Ambiguous value for argument '(.*?)'\n": r"\1 has several values: -m (--multirun) runs each of them, "
    r"[a,b] is one list, quotes make it one text",
    r"No match in the defaults list.*use \+(\S+)": r"\1 needs a plus: +\1",
    r"Multiple values for (\S+)\. To override": r"\1 has a value already: type \1=NAME without the plus",
    r"Config group override must be": "a group (model, parallel, …) takes the name of one of its files, not null",
    r"[Mm]issing mandatory value: (\S+)": r"\1 has no value: type \1=…",
    r"Could not delete from config\. '(.*?)' does not exist": r"~\1 takes away what is not there",
}


def one_line(error: BaseException) -> str:
    """The message of a ValueError as it is; Hydra's and OmegaConf's in our words, without their internals."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        path = error.missing_cfg_file
        group, _, option = path.rpartition("/") if path.startswith("hydra/") else path.partition("/")
        return unknown_option(group, option, error.options)
    if isinstance(error, OverrideParseException):
        return _unreadable(error)
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) and is_dataclass(cause.object_type):
        return unknown_key(cause.full_key, cause.object_type)
    if isinstance(cause, ValidationError):
        return _wrong_type(str(error).partition("Error merging override ")[2], cause)
    if isinstance(error, (HydraException, OmegaConfBaseException)) or "group override" in str(error):
        for pattern, advice in ADVICE.items():
            if found := re.search(pattern, f"{error}\n{cause}\n", re.DOTALL):
                return found.expand(advice)
    return _without_internals(f"{error}\n{cause if cause is not error else ''}")


def check_keys(values: DictConfig, schema: type) -> None:
    """`+parallel.typo=1`: Hydra and OmegaConf take any key after a plus, the dataclasses do not. ValueError."""
    _check_keys(OmegaConf.to_container(values), schema, "")


def _check_keys(values: dict, schema: type, group: str) -> None:
    types = get_type_hints(schema)
    for key, value in values.items():
        if key not in types:
            raise ValueError(unknown_key(f"{group}{key}", schema))
        if is_dataclass(types[key]) and isinstance(value, dict):
            _check_keys(value, types[key], f"{group}{key}.")


def _wrong_type(typed: str, error: ValidationError) -> str:
    """typed: the override, where it is known; a file of conf/experiment/ is none."""
    key, message = error.full_key, str(error).partition("\n")[0]
    schema = error.object_type
    if "is not a subclass of" in message and is_dataclass(schema):
        group = get_type_hints(schema)[error.key]
        known = ", ".join(field.name for field in fields(group))
        return f"{typed or key}: {key} is a group of keys, type one of them: {known}"
    kind = next((kind for words, kind in KINDS.items() if words in message), None)
    typed = typed or f"{key}={error.value}"
    if kind is None:
        return f"{typed}: {message}"
    return f"{typed} must be {kind}" if typed.startswith(f"{key}=") else f"{typed}: {key} must be {kind}"


def _unreadable(error: OverrideParseException) -> str:
    detail = "; ".join(line for line in str(error).splitlines() if not line.startswith(("Error parsing", "See https")))
    if "missing EQUAL" in detail:
        return f"{error.override} is no override: type KEY=VALUE"
    key, _, value = error.override.partition("=")
    advice = "type KEY=VALUE, or a list as [a,b]"
    if not set(value) & set("'\"[{("):
        advice = f"""text with such characters needs quotes within quotes: '{key}="{value}"'"""
    return f"{error.override} cannot be read ({detail}): {advice}"


def _without_internals(text: str) -> str:
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("Config search path"):
            break
        if line.startswith("\t"):  # one of the options that the line above announces
            lines[-1] += f"{' ' if lines[-1].endswith(':') else ', '}{line.strip()}"
        elif line.strip() and not line.strip().startswith(("full_key:", "reference_type=", "object_type=")):
            lines.append(line.strip())
    return "; ".join(lines)
