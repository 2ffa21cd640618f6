"""Detection of misspelled groups, options and keys by the schema and file names alone.

Nothing is composed and Hydra is not imported, so that this is fast. Uncertain cases, such as groups
in the user's own folders, are left to `diagnosis`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, get_args, get_type_hints

from runner.core.config.groups import (
    GROUP_ALIASES,
    MIN_SIMILARITY,
    USER_CLASS_GROUPS,
    group_options,
)
from runner.core.config.run_config import RunConfig
from runner.core.errors import ConfigError
from runner.core.format import nearest

# other words are left to Hydra's grammar
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*)=([\w.+-]+)")
VALUE_PATTERNS = {
    int: r"[+-]?\d+",
    float: r"[+-]?\d*\.?\d+(e[+-]?\d+)?",
    bool: "true|false",
    str: ".+",
}


def find_typo(overrides: Sequence[str]) -> ConfigError | None:
    """Return the error about a name that does not exist, if the intended one is certain."""
    if any("searchpath" in text for text in overrides):
        return None
    groups = group_options()
    words = [match.groups() for match in map(ASSIGNMENT.fullmatch, overrides) if match]
    for key, value in words:
        if value in groups.get(key, [value]):
            continue
        if suggestion := _nearest_option(groups, key, value):
            existing = f"use one of {', '.join(groups[key])}"
            fix = f"did you mean {key}={suggestion}? {existing}"
            return ConfigError(key, f"no option {value!r}", fix)
    return next(filter(None, (_key_typo(groups, key, value) for key, value in words)), None)


def _nearest_option(groups: Mapping[str, Mapping[str, str]], group: str, value: str) -> str:
    """Return the option or the most similar one; "" if it may be another program's name."""
    from runner.core.config import aliases

    if value in groups[group]:
        return value
    if group in (*USER_CLASS_GROUPS, "optimizer") or value.casefold() in aliases.OPTION_ALIASES.get(
        group, {}
    ):
        return ""
    return nearest(value, groups[group]) or ""


def _key_typo(groups: Mapping[str, Mapping[str, str]], key: str, value: str) -> ConfigError | None:
    parts = key.split(".")
    i, names = _first_unknown_part(parts, groups)
    if i == len(parts):
        return None
    from runner.core.config import aliases

    if parts[-1].casefold() in aliases.VALUE_ALIASES or aliases.find_replacement(key):
        return None
    nearest_name = nearest(parts[i], names, MIN_SIMILARITY) or ""
    suggested_parts = [*parts[:i], nearest_name, *parts[i + 1 :]]
    path = ".".join(parts[:i])
    if suggested_parts == [nearest_name] and nearest_name in groups:
        option = _nearest_option(groups, nearest_name, value)
    else:
        option = value if nearest_name and _accepts(suggested_parts, value) else ""
    if not option:
        return None
    fix = f"did you mean {'.'.join(suggested_parts)}={option}?"
    if i:
        return ConfigError(
            key, f"no key {parts[i]!r} in {path}", f"{fix} use one of {', '.join(names)}"
        )
    return ConfigError(key, f"no config group or key {parts[i]!r}", fix)


def _first_unknown_part(parts: Sequence[str], groups: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Return the index of the first part of a key that does not exist, and the names allowed."""
    node: Any = RunConfig
    for i, part in enumerate(parts):
        names = list(_field_types(node))
        if part not in names and (i or part not in {*groups, *GROUP_ALIASES, "hydra"}):
            return i, names if i else [*names, *groups]
        node = _field_types(node).get(part)
        if part in USER_CLASS_GROUPS or not is_dataclass(node):  # their keys depend on the option
            break
    return len(parts), []


def _accepts(parts: Sequence[str], value: str) -> bool:
    """Whether a key exists and the typed value has its type."""
    node: Any = RunConfig
    for part in parts:
        node = _field_types(node).get(part)
    if isinstance(node, type) and issubclass(node, Enum):
        return value in node.__members__
    pattern = VALUE_PATTERNS.get(node)
    return pattern is not None and re.fullmatch(pattern, value, re.IGNORECASE) is not None


@cache
def _field_types(schema: Any) -> dict[str, Any]:
    """Return the keys of a schema and their types, `X` for `X | None`."""
    if not is_dataclass(schema):
        return {}
    hints = get_type_hints(schema)
    kinds = {name: [t for t in get_args(hint) if t is not NoneType] for name, hint in hints.items()}
    return {
        name: kinds[name][0] if NoneType in get_args(hint) and len(kinds[name]) == 1 else hint
        for name, hint in hints.items()
    }
