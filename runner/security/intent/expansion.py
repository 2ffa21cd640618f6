"""What a composed config would grow to if its references were followed; nothing is followed.

Ten lines that each refer ten times to the line before make ten thousand million values. What each
key comes to is added up once, from below, so that counting takes as long as the config is short.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from runner.errors import SecurityError
from runner.security.intent import bounds

RESOLVER = re.compile(r"\s*([A-Za-z_][\w.]*)\s*:", re.ASCII)
FOLLOWS = {"oc.select", "oc.dict.values", "oc.deprecated"}  # their argument is a key
REWRITES = {"oc.create", "oc.decode"}  # their argument may become references
KEY_PART = re.compile(r"[^.\[\]]+")


class Size(NamedTuple):
    """Values and the characters of their text."""

    values: int
    text: int


def check_expansion(config: DictConfig) -> None:
    """Raise SecurityError where following the references would take too much, or never end."""
    tree = OmegaConf.to_container(config, resolve=False)
    size = _Counter(tree).size((), tree)
    if size.values > bounds.EXPANDED or size.text > bounds.EXPANDED_TEXT:
        raise _too_large("config", size)


class _Counter:
    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self.known: dict[tuple[str, ...], Size | None] = {}

    def size(self, path: tuple[str, ...], value: Any) -> Size:
        if path in self.known:
            found = self.known[path]
            if found is None:
                raise SecurityError(
                    f"{'.'.join(path) or 'config'}: refers to itself, and would never end; "
                    "write a value"
                )
            return found
        if len(path) > bounds.DEPTH:
            raise SecurityError(f"{'.'.join(path[:4])}.…: is nested too deep; make it flat")
        self.known[path] = None
        values, text = 1, 0
        for inner in self._parts(path, value):
            values, text = values + inner.values, text + inner.text
        found = self.known[path] = Size(values, text)
        if values > bounds.EXPANDED or text > bounds.EXPANDED_TEXT:
            raise _too_large(".".join(path), found)
        return found

    def _parts(self, path: tuple[str, ...], value: Any) -> Iterator[Size]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield self.size((*path, str(key)), inner)
        elif isinstance(value, list):
            for number, inner in enumerate(value):
                yield self.size((*path, str(number)), inner)
        elif isinstance(value, str):
            yield Size(0, len(value))
            if "${" in value:
                for target in references(value, path):
                    yield self._at(target)

    def _at(self, path: tuple[str, ...]) -> Size:
        """What is there, or as much of the way as there is: no part is larger than the whole."""
        value = self.tree
        for depth, part in enumerate(path):
            if isinstance(value, dict):
                named = {str(key): inner for key, inner in value.items()}
                if part not in named:
                    return Size(0, 0)
                value = named[part]
            elif isinstance(value, list):
                if not part.isdigit() or int(part) >= len(value):
                    return Size(0, 0)
                value = value[int(part)]
            else:
                return self.size(path[:depth], value)
        return self.size(path, value)


def references(text: str, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The keys that a value refers to; where a key is put together, all that it could be."""
    found = []
    for start, end in spans(text, path):
        inner = text[start:end]
        resolver = RESOLVER.match(inner)
        if resolver is None:
            found.append(key_of(inner, path))
        elif resolver[1] in FOLLOWS:
            found.append(key_of(inner[resolver.end() :].split(",")[0], path))
        elif resolver[1] == "hydra":
            found.append(("hydra", *key_of(inner[resolver.end() :], ())))
        elif resolver[1] in REWRITES and _rewrites(inner[resolver.end() :]):
            raise SecurityError(
                f"{'.'.join(path)}: ${{{resolver[1]}:…}} is refused: what it makes of other keys "
                "cannot be known beforehand; write the value itself"
            )
    return found


def _rewrites(argument: str) -> bool:
    rest = re.sub(r"\$\{oc\.env:[\w.,' -]*\}", "", argument)
    return "${" in rest or "\\$" in rest


def spans(text: str, path: tuple[str, ...]) -> list[tuple[int, int]]:
    """Where the inside of each `${…}` begins and ends, those within others too."""
    found, opened, i = [], [], 0
    while i < len(text):
        if text.startswith("${", i):
            opened.append(i + 2)
            if len(opened) > bounds.NESTED:
                raise SecurityError(f"{'.'.join(path)}: has too many ${{ within one another")
            i += 2
            continue
        if text[i] == "{" and opened:
            opened.append(-1)
        elif text[i] == "}" and opened:
            start = opened.pop()
            if start >= 0:
                found.append((start, i))
        i += 1
    found += [(start, len(text)) for start in opened if start >= 0]
    if len(found) > bounds.REFERENCES:
        raise SecurityError(f"{'.'.join(path)}: has {len(found)} references in one value")
    return found


def key_of(text: str, path: tuple[str, ...]) -> tuple[str, ...]:
    """The key that a reference at `path` leads to, as far as it is written out."""
    literal = text.partition("${")[0].strip().strip("'\"")
    dots = len(literal) - len(literal.lstrip("."))
    base = path[: len(path) - dots] if dots else ()
    parts = tuple(part.strip() for part in KEY_PART.findall(literal[dots:]))
    if "${" in text and literal and literal[-1] not in ".[":
        parts = parts[:-1]  # `${name${x}}`: any of its neighbours
    return (*base, *parts)


def _too_large(key: str, size: Size) -> SecurityError:
    return SecurityError(
        f"{key}: would grow to {size.values} values and {size.text} characters once its references "
        f"are followed, more than {bounds.EXPANDED} and {bounds.EXPANDED_TEXT}; "
        "write it without them"
    )
