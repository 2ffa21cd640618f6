"""Detection of misspelled groups, options and keys by the schema and file names alone.

Nothing is composed and Hydra is not imported, so that this is fast. Uncertain cases, such as groups
in the user's own folders, are left to `diagnosis`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from functools import cache, partial
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

Groups = Mapping[str, Mapping[str, str]]
# other words are left to Hydra's grammar
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*)=([\w.+-]+)")
OPEN_GROUPS = (*USER_CLASS_GROUPS, "optimizer")  # a value may be another program's name
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
    typos = (find(groups, *word) for find in (_option_typo, _key_typo) for word in words)
    return next(filter(None, typos), None)


def _option_typo(groups: Groups, key: str, value: str) -> ConfigError | None:
    if value in groups.get(key, [value]) or key in OPEN_GROUPS:
        return None
    from runner.core.config.aliases import find_options

    if find_options(key, value, groups[key]) in groups[key]:
        return None
    from runner.core.config.suggestions import Suggester

    suggester = Suggester(groups, [], partial(_is_valid, groups))
    is_certain = suggester.first_composing(suggester.for_option(key, value))
    return suggester.option_error(key, value) if is_certain else None


def _key_typo(groups: Groups, key: str, value: str) -> ConfigError | None:
    parts = key.split(".")
    i, names = _first_unknown_part(parts, groups)
    if i == len(parts):
        return None
    from runner.core.config import aliases
    from runner.core.config.suggestions import Suggester, suggestion_error

    name = nearest(parts[i], names, MIN_SIMILARITY)
    is_foreign = parts[-1].casefold() in aliases.VALUE_ALIASES
    is_foreign = is_foreign or bool(aliases.find_replacement(key))
    if not name or is_foreign or (name in OPEN_GROUPS and value not in groups[name]):
        return None
    suggester = Suggester(groups, [], partial(_is_valid, groups))
    guesses = suggester.assign(".".join([*parts[:i], name, *parts[i + 1 :]]), value)
    if not (suggestion := suggester.first_composing(guesses)):
        return None
    problem, fallback = f"no config group or key {parts[i]!r}", ""
    if i:
        problem = f"no key {parts[i]!r} in {'.'.join(parts[:i])}"
        fallback = f"use one of {', '.join(names)}"
    return suggestion_error(key, problem, suggestion, fallback)


def _first_unknown_part(parts: Sequence[str], groups: Groups) -> tuple[int, list[str]]:
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


def _is_valid(groups: Groups, guess: Sequence[str]) -> bool:
    """Whether each override names an option, or an existing key with a value of its type."""
    for text in guess:
        key, _, value = text.partition("=")
        node: Any = RunConfig
        for part in () if key in groups else key.split("."):
            node = _field_types(node).get(part)
        if key in groups:
            valid = value in groups[key]
        elif isinstance(node, type) and issubclass(node, Enum):
            valid = value in node.__members__
        else:
            pattern = VALUE_PATTERNS.get(node)
            valid = pattern is not None and bool(re.fullmatch(pattern, value, re.IGNORECASE))
        if not valid:
            return False
    return True


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
