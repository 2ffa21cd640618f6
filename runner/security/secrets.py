"""Which environment variables a config may read, and what is written in their place.

`${oc.env:NAME}` reads a variable only if `security.environment` names it, as it is typed: a file
that could say so for itself would need no leave. Its value is for the memory of the run alone.
What is written down, logged or shown has `${oc.env:NAME}` there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from runner.errors import ConfigError, RunnerError, SecurityError
from runner.masking import adopt, known, learn, masked, stands_for
from runner.record.storage import read_record, replace_text

KEY = "security.environment"
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
REFERENCE = re.compile(r"\$\{oc\.env:([A-Za-z_][A-Za-z0-9_]*)\}", re.ASCII)
ARGUMENTS = re.compile(r"\w+\.(arguments|options)", re.ASCII)  # keys whose value goes to a call


@dataclass
class EnvironmentAccess:
    """Which variables a config may read; `names` None: all, under security=off."""

    names: frozenset[str] | None = frozenset()
    shows: bool = False  # the config is only printed: with names in place of values
    reads: int = 0


_access: EnvironmentAccess | None = None
_values: dict[str, str] = {}  # values that a config read, whatever their length, and their names
_shown: dict[str, tuple[str, str]] = {}  # by key: the text of such a value, and what is written


@contextmanager
def environment_access(names: Sequence[str] | None, shows: bool = False) -> Iterator[None]:
    """While entered, a config reads the variables of these names, and no others; None: any.

    What a config is refused is raised as it is, a SecurityError, and not as OmegaConf wraps it.
    """
    global _access
    for name in names or ():
        if not NAME.fullmatch(name):
            raise ConfigError(KEY, f"{name!r} is no name of a variable", "letters, digits, _")
        if (value := os.environ.get(name)) is not None:
            learn(name, value)  # the user's own code may read it, too
    before, _access = _access, EnvironmentAccess(None if names is None else frozenset(names), shows)
    try:
        yield
    except OmegaConfBaseException as error:
        raise refusal_in(error) or error from None
    finally:
        _access = before


@contextmanager
def current_environment_access(names: Sequence[str]) -> Iterator[None]:
    """The access in force; outside of a run's config, one to these variables."""
    if _access is not None:
        yield
        return
    with environment_access(names):
        yield


def permitted() -> list[str] | None:
    """The names that may be read now; None: any."""
    if _access is None:
        return []
    return None if _access.names is None else sorted(_access.names)


def refusal_in(error: BaseException) -> SecurityError | ConfigError | None:
    """The refusal of this access, if that is what the error is about."""
    seen: set[int] = set()
    inner: BaseException | None = error
    while inner is not None and id(inner) not in seen:
        if isinstance(inner, SecurityError | ConfigError):
            return inner
        seen.add(id(inner))
        inner = inner.__cause__ or inner.__context__
    return None


# -- reading -----------------------------------------------------------------------------------


def install() -> None:
    """Stand in for OmegaConf's own resolvers; without an access they answer as those do."""
    for name, resolver in (("oc.env", _env), ("oc.decode", _decode), ("oc.create", _create)):
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def _env(name: Any, *default: Any, _node_: Any) -> Any:
    if _access is None:
        return oc.env(name, *default)
    key = (_node_._get_full_key(None) or "config").replace("_dummy_", "defaults")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise SecurityError(f"{key}: {name!r} is refused: it is no name of a variable")
    if _access.names is not None and name not in _access.names:
        raise SecurityError(
            f"{key}: {stands_for(name)} is refused: {KEY} does not name {name}; if the config may "
            f"read that variable, add {KEY}=[{name}] to the command line"
        )
    _access.reads += 1
    value = os.environ.get(name)
    if value is None:
        if default:
            return None if default[0] is None else str(default[0])
        raise ConfigError(key, f"the environment variable {name} is not set", f"set {name}")
    learn(name, value)
    _values[value] = name
    if _access.shows and _node_._metadata.ref_type in (Any, str):
        return stands_for(name)
    return value


def _decode(expr: Any, _parent_: Any, _node_: Any) -> Any:
    _check_whole(expr, "oc.decode", _node_)
    return oc.decode(expr, _parent_=_parent_, _node_=_node_)


def _create(obj: Any, _parent_: Any, _node_: Any) -> Any:
    _check_whole(obj, "oc.create", _node_)
    return oc.create(obj, _parent_=_parent_)


def _check_whole(source: Any, resolver: str, node: Any) -> None:
    """Refuse to take a value apart: its parts would be as secret, and spelled in other ways."""
    if _access is not None:
        for value, name in _values.items():
            if value and value in str(source):
                raise SecurityError(
                    f"{node._get_full_key(None)}: {resolver} of {stands_for(name)} is refused: a "
                    "variable's value is not taken apart; use one variable for each value"
                )


# -- folders -----------------------------------------------------------------------------------


def place(config: DictConfig, key: str) -> Path:
    """The folder that a key names.

    SecurityError where it would show a variable's value, ConfigError where it cannot be resolved.
    """
    before = _access.reads if _access is not None else 0
    try:
        value: Any = config
        for part in key.split("."):
            value = value[part]
    except OmegaConfBaseException as error:
        if refused := refusal_in(error):
            raise refused from None
        raise ConfigError(str(error.full_key or key), str(error).partition("\n")[0]) from error
    if _access is not None and _access.reads > before:
        raise SecurityError(
            f"{key}: would show in the name of a folder or file what the environment holds; "
            f"type a name: name=…, or {key}=…"
        )
    return Path(str(value))


# -- writing -----------------------------------------------------------------------------------


def note(config: DictConfig) -> None:
    """Remember which keys of a composed config hold a value of the environment."""
    if _access is not None and _values:
        _note(config, "", _access)


def _note(node: Any, path: str, access: EnvironmentAccess) -> None:
    for key in range(len(node)) if isinstance(node, ListConfig) else list(node):
        if OmegaConf.is_missing(node, key):
            continue
        before, below = access.reads, f"{path}.{key}" if path else str(key)
        value = node[key]
        if isinstance(value, DictConfig | ListConfig):
            _note(value, below, access)
        elif value is not None and access.reads > before:
            text = _text(value)
            _shown[below] = (text, _hide(text))


def _text(value: Any) -> str:
    return value.name if isinstance(value, Enum) else str(value)


def _hide(text: str) -> str:
    """Every value that was read is out of it, however short."""
    parts = "|".join(re.escape(v) for v in sorted(_values, key=len, reverse=True) if v)
    hidden = re.sub(parts, lambda match: stands_for(_values[match[0]]), text)
    if hidden == text:  # a number or a flag, which is written in another way than it was read
        names = sorted(n for v, n in _values.items() if v.strip().casefold() == text.casefold())
        hidden = stands_for(names[0]) if names else masked(text)
    return hidden


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
    return {"known": known(), "shown": dict(_shown), "values": dict(_values)}


def adopt_state(state: Mapping[str, Any]) -> None:
    """Hide what the parent of this process does."""
    adopt(state["known"])
    _shown.update(state["shown"])
    _values.update(state["values"])


def check_plain(value: Any, key: str = "", may_read: Collection[str] | None = ()) -> None:
    """Raise SecurityError where a recorded config has a value to resolve or code as a name.

    Names of arguments are identifiers; a mapping that is itself an argument may have any keys,
    unless its `_target_` makes it a call.
    `${oc.env:NAME}` stands there for what was not to be written; it may be read where NAME is in
    `may_read` (None: any).
    """
    if isinstance(value, Mapping | list | tuple):
        is_call = isinstance(value, Mapping) and ("_target_" in value or ARGUMENTS.fullmatch(key))
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, inner in items:
            if is_call and not str(name).isidentifier():
                raise SecurityError(f"{key}: {name!r} is refused: a name must be an identifier")
            below = f"{key}.{name}" if key else str(name)
            check_plain(name, key, ())
            check_plain(inner, below, may_read)
    elif isinstance(value, str) and "${" in REFERENCE.sub("", value):  # could be anything
        raise SecurityError(f"{key}: {value!r} is refused: it stands for another value")
    elif isinstance(value, str) and may_read is not None:
        for name in REFERENCE.findall(value):
            if name not in may_read:
                raise SecurityError(
                    f"{key}: {value!r} is refused: it stands for a variable's value; if it may be "
                    f"read, add security.environment=[{name}]"
                )


@contextmanager
def redact_errors() -> Iterator[None]:
    """An error that is raised within quotes no value that was read, however short that is."""
    try:
        yield
    except RunnerError as error:
        error.args = (named(str(error)),)
        raise


def named(text: str) -> str:
    """An error's text with `${oc.env:NAME}` for each word in it that is a value that was read."""
    values = sorted((v for v in _values if v.strip()), key=len, reverse=True)
    words = [rf"(?<![A-Za-z0-9_]){re.escape(value)}(?![A-Za-z0-9_])" for value in values]
    pattern = "|".join([REFERENCE.pattern, *words])
    return re.sub(
        pattern,
        lambda match: stands_for(_values[match[0]]) if match[0] in _values else match[0],
        masked(text),
    )
