"""What is written of a config that read the environment: `${oc.env:NAME}` where its value was."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from runner.masking import adopt, known, masked, stands_for
from runner.record.storage import read_record, replace_text
from runner.security.secrets import STANDS, current, origin, readings

_shown: dict[str, tuple[str, str]] = {}  # by key: a value from the environment, and what is shown


def note(config: DictConfig) -> None:
    """Remember which keys of a composed config hold what the environment said."""
    if current() is not None and origin:
        for where, value in readings(config):
            text = _text(value)
            _shown[where] = (text, _hidden(text))


def _text(value: Any) -> str:
    return value.name if isinstance(value, Enum) else str(value)


def _hidden(text: str) -> str:
    """Every value that was read is out of it, however short; all of it, where it was converted."""
    found = text
    for value in sorted(origin, key=len, reverse=True):
        if value and value in found and "${oc.env:" not in value:
            found = stands_for(origin[value]) if value == found else _replaced(found, value)
    if found == text:  # a number or a flag, which is written in another way than it was read
        names = sorted(n for v, n in origin.items() if v.strip().casefold() == text.casefold())
        found = stands_for(names[0]) if names else masked(text)
    return found


def _replaced(text: str, value: str) -> str:
    """Not within what stands for another value already."""
    kept = re.split(f"({STANDS.pattern.replace('(', '(?:')})", text)
    name = stands_for(origin[value])
    return "".join(p if STANDS.fullmatch(p) else p.replace(value, name) for p in kept)


def unresolved(tree: Any, path: str = "") -> Any:
    """A config as plain dicts and lists, with `${oc.env:NAME}` where it has that variable's value.

    What is written of a config is made of this.
    """
    if not _shown:
        return tree
    if isinstance(tree, Mapping):
        below = f"{path}." if path else ""
        return {key: unresolved(item, f"{below}{key}") for key, item in tree.items()}
    if isinstance(tree, list):
        return [unresolved(item, f"{path}.{i}") for i, item in enumerate(tree)]
    value, shown = _shown.get(path, ("", ""))
    if path in _shown and tree is not None and _text(tree) == value:
        return shown
    return masked(tree) if isinstance(tree, str) else tree


def mask_saved(folder: Path) -> None:
    """Hydra saves configs unresolved, but for the little that it works out itself."""
    for path in folder.glob("*.yaml") if known() else ():
        text = read_record(path).decode("utf-8", "replace")
        if masked(text) != text:
            replace_text(path, text)


def shared_state() -> dict[str, Any]:
    """What a process of ours needs to know to hide the same; it goes through a pipe."""
    return {"known": known(), "shown": dict(_shown), "origin": dict(origin)}


def take(found: Mapping[str, Any]) -> None:
    """Hide what the parent of this process does."""
    adopt(found["known"])
    _shown.update(found["shown"])
    origin.update(found["origin"])
