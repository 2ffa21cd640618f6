"""Masking of secrets: values that a config read from the environment are shown by their names.

Log, summary, reports, TensorBoard, manifests and messages all use it. The values are only in the
memory of this process.
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

SHORTEST = 8  # characters; a shorter value could occur in ordinary words
LONG_NUMBER = 16  # digits; a shorter one may be a count
NUMBER = re.compile(r"[-+]?[\d.,_eE+-]+")
MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~!&])")  # as record.markdown escapes

_spellings: dict[str, str] = {}  # each spelling of each value -> its name
_pattern: re.Pattern[str] | None = None


def stands_for(name: str) -> str:
    """Return the interpolation `${oc.env:NAME}` that replaces a variable's value."""
    return f"${{oc.env:{name}}}"


def learn(name: str, value: str) -> None:
    """Add a value that `masked` replaces by its name from now on, unless it is too short."""
    global _pattern
    for piece in (value, value.strip(), *map(str.strip, value.splitlines())):
        least = LONG_NUMBER if NUMBER.fullmatch(piece) else SHORTEST
        if len(piece) >= least:
            for once in set(_spelled(piece)):  # twice: an error quotes it, and JSON the error
                _spellings.update(dict.fromkeys(_spelled(once), name))
    longest_first = sorted(_spellings, key=len, reverse=True)
    _pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _spelled(value: str) -> Iterator[str]:
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


def masked(text: str) -> str:
    """Return the text with each known value replaced by `${oc.env:NAME}`."""
    if _pattern is None:
        return text
    return _pattern.sub(lambda match: stands_for(_spellings[match[0]]), text)


def masked_all(value: T) -> T:
    """Return the value with all strings masked, at any depth of dicts, lists and dataclasses."""
    return value if _pattern is None else _walk(value)


def _walk(value: Any) -> Any:
    if isinstance(value, str):
        text = masked(value)
        return value if text == value else text
    if isinstance(value, dict):
        return {_walk(key): _walk(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_walk(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed = {name: _walk(item) for name, item in own.items()}
        return dataclasses.replace(value, **changed)
    return value


def known() -> Mapping[str, str]:
    """Return names by spellings of values, to be sent to a child process."""
    return dict(_spellings)


def adopt(spellings: Mapping[str, str]) -> None:
    """Mask the values that the parent process sent from `known`."""
    for value, name in spellings.items():
        learn(name, value)
