"""What a value refers to must come to the same whenever it is asked for.

A config is checked before Hydra has numbered the job and named its folder. A reference that could
be one thing until then and another one afterwards would be checked for the first and used as the
second: so what is called or written to refers to keys by their names, and asks for nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from runner.errors import SecurityError
from runner.security.intent.expansion import RESOLVER, key_of, spans

RESOLVERS = ("now", "oc.env", "runner.home", "runner.id", "runner.name", "runner.once")
"""What answers the same in any state of a run, or text that no folder was ever hidden in."""
NAMES = ("data._target_", "data.kind", "model._target_", "model.kind", "job.kind")
"""What `runner.name` is made of."""


class Steady:
    """The values of one config; each is looked into once."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self.seen: set[tuple[str, ...]] = set()

    def check(self, *keys: str) -> None:
        """Raise SecurityError where what these keys come to hangs on when it is asked for."""
        todo = [tuple(key.split(".")) for key in keys]
        while todo:
            path = todo.pop()
            if path not in self.seen:
                self.seen.add(path)
                for where, value in self._below(path):
                    if isinstance(value, str) and "${" in value:
                        todo += _referred(value, tuple(map(str, where)))

    def _below(self, path: tuple[str, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """The values there; where the way leads through a reference, that one."""
        value = self.tree
        for depth, part in enumerate(path):
            if isinstance(value, dict):
                value = {str(key): inner for key, inner in value.items()}.get(part)
            elif isinstance(value, list):
                value = value[int(part)] if part.isdigit() and int(part) < len(value) else None
            else:
                path = path[:depth]
                break
        yield from below(value, path)


def _referred(text: str, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for start, end in spans(text, path):
        inner = text[start:end]
        resolver = RESOLVER.match(inner)
        if resolver is None and "${" not in inner and ":" not in inner:
            yield key_of(inner, path)
        elif resolver is None or resolver[1] not in RESOLVERS:
            raise SecurityError(
                f"{'.'.join(path)}: {text} is refused: what it comes to can change after it was "
                "checked; write the value, or refer to a key by its name: ${key}"
            )
        elif resolver[1] == "runner.name":
            yield from (tuple(key.split(".")) for key in NAMES)


def below(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value that is no mapping or list, with the keys on the way to it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from below(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from below(inner, (*path, number))
    else:
        yield path, value
