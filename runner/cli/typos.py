"""Misspelled groups, options and keys, recognised by the schema and the names of files alone.

Nothing is composed and Hydra is not imported, so that the answer comes at once. What is not sure
here, as of groups in folders of the user's own, is left for `diagnosis`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, get_args, get_type_hints

from runner.config import RunConfig
from runner.errors import ConfigError
from runner.format import nearest
from runner.overrides.groups import ALIASES, FOREIGN, SURE, options

WORD = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*)=([\w.+-]+)")  # the rest is read by Hydra's grammar
VALUES = {int: r"[+-]?\d+", float: r"[+-]?\d*\.?\d+(e[+-]?\d+)?", bool: "true|false", str: ".+"}


def find_typo(overrides: Sequence[str]) -> ConfigError | None:
    """The error about a word that names what does not exist, where what was meant is sure."""
    if any("searchpath" in text for text in overrides):
        return None
    groups = options()
    words = [match.groups() for match in map(WORD.fullmatch, overrides) if match]
    for key, value in words:
        if value in groups.get(key, [value]):
            continue
        if meant := _option(groups, key, value):
            existing = f"there are {', '.join(groups[key])}"
            fix = f"did you mean {key}={meant}? {existing}"
            return ConfigError(key, f"no option {value!r}", fix)
    return next(filter(None, (_wrong_key(groups, key, value) for key, value in words)), None)


def _option(groups: Mapping[str, Mapping[str, str]], group: str, value: str) -> str:
    """That option, or the one that is most like it; "" where other programs name one so."""
    from runner.overrides import aliases

    if value in groups[group]:
        return value
    if group in (*FOREIGN, "optimizer") or value.casefold() in aliases.OPTIONS.get(group, {}):
        return ""
    return nearest(value, groups[group]) or ""


def _wrong_key(groups: Mapping[str, Mapping[str, str]], key: str, value: str) -> ConfigError | None:
    parts = key.split(".")
    i, names = _depth(parts, groups)
    if i == len(parts):
        return None
    from runner.overrides import aliases

    if parts[-1].casefold() in aliases.VALUES or aliases.replacement(key):
        return None
    near = nearest(parts[i], names, SURE) or ""
    meant = [*parts[:i], near, *parts[i + 1 :]]
    path = ".".join(parts[:i])
    if meant == [near] and near in groups:
        option = _option(groups, near, value)
    else:
        option = value if near and _takes(meant, value) else ""
    if not option:
        return None
    fix = f"did you mean {'.'.join(meant)}={option}?"
    if i:
        return ConfigError(
            key, f"no key {parts[i]!r} in {path}", f"{fix} there are {', '.join(names)}"
        )
    return ConfigError(key, f"no config group or key {parts[i]!r}", fix)


def _depth(parts: Sequence[str], groups: Mapping[str, Any]) -> tuple[int, list[str]]:
    """How many parts of a key exist, as far as is known, and the names that may follow."""
    node: Any = RunConfig
    for i, part in enumerate(parts):
        names = list(_fields(node))
        if part not in names and (i or part not in {*groups, *ALIASES, "hydra"}):
            return i, names if i else [*names, *groups]
        node = _fields(node).get(part)
        if part in FOREIGN or not is_dataclass(node):  # theirs depend on the option
            break
    return len(parts), []


def _takes(parts: Sequence[str], value: str) -> bool:
    """Whether a key exists and a value typed for it is one of its kind."""
    node: Any = RunConfig
    for part in parts:
        node = _fields(node).get(part)
    if isinstance(node, type) and issubclass(node, Enum):
        return value in node.__members__
    return node in VALUES and re.fullmatch(VALUES[node], value, re.IGNORECASE) is not None


@cache
def _fields(schema: Any) -> dict[str, Any]:
    """The keys of a schema and their types, without the None that a type allows."""
    if not is_dataclass(schema):
        return {}
    hints = get_type_hints(schema)
    kinds = {name: [t for t in get_args(hint) if t is not NoneType] for name, hint in hints.items()}
    return {
        name: kinds[name][0] if NoneType in get_args(hint) and len(kinds[name]) == 1 else hint
        for name, hint in hints.items()
    }
