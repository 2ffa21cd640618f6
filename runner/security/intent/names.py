"""Names of what Hydra itself calls: its plugins and callbacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper

from runner.errors import SecurityError
from runner.security.intent import registry
from runner.security.targets import EVERYTHING, permit, resolve

FACTORIES = ("class", "()")
NAMED = ("custom_search_space",)  # keys of plugins whose value is called


def installed(kind: type | None = None) -> set[str]:
    """Launchers and sweepers that Hydra found, and ours; the current folder is none of it."""
    kinds = (kind,) if kind is not None else (Launcher, Sweeper)
    found = {one for each in kinds for one in Plugins.instance().discover(each)}
    names = {f"{one.__module__}.{one.__name__}" for one in found}
    return names | {registry.LAUNCHER} if Launcher in kinds else names


def check_any(target: str, key: str, trusted: Sequence[str]) -> None:
    """Raise SecurityError for a name that is good for nothing at all."""
    known = registry.CALLBACKS | registry.LOGGING | registry.SAMPLERS
    if target not in known and target not in installed():
        permit(target, key, list(trusted))


def check_plugin(node: Any, key: str, kind: type, trusted: Sequence[str]) -> None:
    """`hydra.launcher` and `hydra.sweeper`: one that is installed, handed what is allowed."""
    if EVERYTHING in trusted or not isinstance(node, dict):
        return
    target = node.get("_target_")
    if not isinstance(target, str) or target not in installed(kind):
        raise SecurityError(
            f"{key}._target_: {target} is refused: it is no {kind.__name__.lower()} that is "
            "installed as a plugin of Hydra; install it, and choose it by its group: "
            f"{key.replace('.', '/')}=…"
        )
    for where, value in valued(node, key, ("_target_", *NAMED)):
        if where != f"{key}._target_" and value is not None and value not in (*registry.SAMPLERS,):
            permit(str(value), where, list(trusted))


def check_callbacks(node: Any, trusted: Sequence[str]) -> None:
    """`hydra.callbacks`: classes of trusted packages, looked at here before Hydra makes them."""
    for where, value in valued(node, "hydra.callbacks", ("_target_",)):
        if value in (*registry.CALLBACKS,) or EVERYTHING in trusted:
            continue
        root = permit(str(value), where, list(trusted))
        if root in trusted:
            resolve(str(value), where, list(trusted))


def leaves(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Every value that is no mapping or list, by its dotted key."""
    if isinstance(node, dict):
        for name, inner in node.items():
            yield from leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for number, inner in enumerate(node):
            yield from leaves(inner, f"{key}.{number}")
    else:
        yield key, node


def valued(node: Any, key: str, words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The values of keys of these names, at any depth."""
    if isinstance(node, dict):
        for name, inner in node.items():
            if name in words:
                yield f"{key}.{name}", inner
            yield from valued(inner, f"{key}.{name}", words)
    elif isinstance(node, list):
        for number, inner in enumerate(node):
            yield from valued(inner, f"{key}.{number}", words)
