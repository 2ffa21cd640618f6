"""Masking of secrets: values that a config read from the environment are replaced by their names.

Used for all text output: log, summary, reports, TensorBoard, manifests, messages. The values are
kept only in the memory of this process.
"""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

T = TypeVar("T")

MIN_SECRET_LENGTH = 8  # characters; a shorter value may be part of ordinary words
MIN_SECRET_DIGITS = 16  # digits; a shorter one may be a count
REFERENCE = re.compile(r"\$\{oc\.env:([A-Za-z_][A-Za-z0-9_]*)\}", re.ASCII)
NUMBER = re.compile(r"[-+]?[\d.,_eE+-]+")
MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~!&])")  # signs that are escaped in it

_variable_by_text: dict[str, str] = {}  # variable name by each spelling of its value
_pattern: re.Pattern[str] | None = None


def reference_to(name: str) -> str:
    """Return the interpolation that replaces a variable's value."""
    return f"${{oc.env:{name}}}"


def add_secret(name: str, value: str) -> None:
    """Make `mask_secrets` replace this value from now on, unless it is too short."""
    for piece in (value, value.strip(), *map(str.strip, value.splitlines())):
        min_length = MIN_SECRET_DIGITS if NUMBER.fullmatch(piece) else MIN_SECRET_LENGTH
        if len(piece) >= min_length:
            for encoded in set(_encodings(piece)):  # twice: an error may quote it within JSON
                _variable_by_text.update(dict.fromkeys(_encodings(encoded), name))
    _update_pattern()


def _update_pattern() -> None:
    global _pattern
    longest_first = sorted(_variable_by_text, key=len, reverse=True)
    _pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _encodings(value: str) -> Iterator[str]:
    """Yield the value as written in JSON, Python, HTML, Markdown, shells, URLs and our log."""
    yield value
    yield " ".join(value.split())
    yield json.dumps(value)[1:-1]
    yield json.dumps(value, ensure_ascii=False)[1:-1]
    yield repr(value)[1:-1]
    yield value.encode("unicode_escape", "surrogatepass").decode()
    yield html.escape(value)
    yield html.escape(value, quote=False)
    yield MARKDOWN.sub(r"\\\1", value)
    yield shlex.quote(value).strip("'")
    yield quote(value, safe="", errors="replace")
    yield quote(value, errors="replace")


def mask_secrets(text: str) -> str:
    """Return `text` with each learned value replaced by `${oc.env:NAME}`."""
    if _pattern is None:
        return text
    return _pattern.sub(lambda match: reference_to(_variable_by_text[match[0]]), text)


def mask_nested(value: T) -> T:
    """Return the value with all strings masked, at any depth of dicts, lists and dataclasses."""
    return value if _pattern is None else _mask_tree(value)


def _mask_tree(value: Any) -> Any:
    if isinstance(value, str):
        text = mask_secrets(value)
        return value if text == value else text
    if isinstance(value, dict):
        return {_mask_tree(key): _mask_tree(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mask_tree(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed = {name: _mask_tree(item) for name, item in fields.items()}
        return dataclasses.replace(value, **changed)
    return value


def known_secrets() -> Mapping[str, str]:
    """Return variable names by spelling of their values, to pass to a child process by pipe."""
    return dict(_variable_by_text)


def add_secrets(spellings: Mapping[str, str]) -> None:
    """Mask the values that the parent process masks."""
    _variable_by_text.update(spellings)
    _update_pattern()
