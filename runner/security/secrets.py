"""Which environment variables a config may read, and what is written in their place.

`${oc.env:NAME}` reads a variable only if `security.environment` names it, as it is typed: a file
that could say so for itself would need no leave. Its value is for the memory of the run alone.
What is written down, logged or shown has `${oc.env:NAME}` there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from runner.errors import ConfigError, RunnerError, SecurityError
from runner.masking import learn, masked, stands_for

KEY = "security.environment"
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
STANDS = re.compile(r"\$\{oc\.env:([A-Za-z_][A-Za-z0-9_]*)\}", re.ASCII)


@dataclass
class EnvironmentAccess:
    """Who may come through; `names` None: all, under security=off."""

    names: frozenset[str] | None = frozenset()
    shows: bool = False  # the config is only printed: with names in place of values
    reads: int = 0


_access: EnvironmentAccess | None = None
origin: dict[str, str] = {}  # values that were read, whatever their length, and their names


@contextmanager
def environment_access(
    names: Sequence[str] | None, shows: bool = False
) -> Iterator[EnvironmentAccess]:
    """While entered, a config reads the variables of these names, and no others; None: any.

    What a config is refused is raised as it is, a SecurityError, and not as OmegaConf wraps it.
    """
    global _access
    before, _access = _access, EnvironmentAccess(None if names is None else frozenset(names), shows)
    for name in names or ():
        if not NAME.fullmatch(name):
            _access = before
            raise ConfigError(KEY, f"{name!r} is no name of a variable", "letters, digits, _")
        if (value := os.environ.get(name)) is not None:
            learn(name, value)  # the user's own code may read it, too
    try:
        yield _access
    except OmegaConfBaseException as error:
        raise refusal_in(error) or error from None
    finally:
        _access = before


@contextmanager
def current_environment_access(names: Sequence[str]) -> Iterator[EnvironmentAccess]:
    """The access in force; outside of a run's config, one to these variables."""
    if _access is not None:
        yield _access
        return
    with environment_access(names) as made:
        yield made


def current() -> EnvironmentAccess | None:
    """The access in force."""
    return _access


def is_open_to(name: str) -> bool:
    """Whether a config may read that variable now."""
    return _access is not None and (_access.names is None or name in _access.names)


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


# -- what OmegaConf calls ----------------------------------------------------------------------


def install() -> None:
    """Stand in for OmegaConf's own resolvers; without an access they answer as those do."""
    for name, resolver in (("oc.env", _env), ("oc.decode", _decode), ("oc.create", _create)):
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def _env(name: Any, *default: Any, _node_: Any) -> Any:
    if _access is None:
        return oc.env(name, *default)
    where = _node_._get_full_key(None) or "config"
    where = "defaults" if where == "_dummy_" else where
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise SecurityError(f"{where}: {name!r} is refused: it is no name of a variable")
    if not is_open_to(name):
        raise _refusal(where, name)
    _access.reads += 1
    value = os.environ.get(name)
    if value is None:
        if default:
            return None if default[0] is None else str(default[0])
        raise ConfigError(where, f"the environment variable {name} is not set", f"set {name}")
    learn(name, value)
    origin[value] = name
    if _access.shows and _node_._metadata.ref_type in (Any, str):
        return stands_for(name)
    return value


def _decode(expr: Any, _parent_: Any, _node_: Any) -> Any:
    made = oc.decode(expr, _parent_=_parent_, _node_=_node_)
    _learn_parts(expr, made)
    return made


def _create(obj: Any, _parent_: Any) -> Any:
    made = oc.create(obj, _parent_=_parent_)
    _learn_parts(obj, made)
    return made


def _learn_parts(source: Any, made: Any) -> None:
    """A text that was taken apart: its parts are as secret as it was.

    A part may be spelled otherwise than it was there, so what is honest is told by what is around.
    """
    if isinstance(source, str) and _access is not None:
        for value, name in [(v, n) for v, n in origin.items() if v and v in source]:
            around = source.replace(value, "")
            for part in _leaves(made):
                if part not in around:
                    learn(name, part)
                    origin.setdefault(part, name)


def _leaves(value: Any) -> Iterator[str]:
    """Keys and values, at any depth; numbers as they are written."""
    if isinstance(value, DictConfig | ListConfig):
        value = OmegaConf.to_container(value, resolve=False)
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from (*_leaves(key), *_leaves(inner))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str | int | float) and str(value) and not isinstance(value, bool):
        yield str(value)


def _refusal(key: str, name: str) -> SecurityError:
    return SecurityError(
        f"{key}: ${{oc.env:{name}}} is refused: {KEY} does not name {name}; if the config may "
        f"read that variable, add {KEY}=[{name}] to the command line"
    )


def place(config: DictConfig, key: str) -> Path:
    """The folder that a key names.

    SecurityError where it would show a variable's value, ConfigError where it cannot be resolved.
    """
    try:
        found, told = resolved(config, key.split("."))
    except OmegaConfBaseException as error:
        if refused := refusal_in(error):
            raise refused from None
        raise ConfigError(str(error.full_key or key), str(error).partition("\n")[0]) from error
    if told is not None:
        raise shows(key, told)
    return Path(str(found))


def resolved(config: DictConfig, path: Sequence[Any]) -> tuple[Any, Any]:
    """What a key comes to; and where the environment has a part in that, what stands there."""
    before = _access.reads if _access is not None else 0
    found: Any = config
    for key in path:
        found = found[key]
    if _access is None or _access.reads == before:
        return found, None
    raw: Any = OmegaConf.to_container(config, resolve=False)
    for key in path:
        raw = raw[key] if isinstance(raw, dict | list) else "${…}"
    return found, raw


def shows(key: str, text: Any) -> SecurityError:
    """The refusal of a name, on disk, that what the environment holds would be part of."""
    return SecurityError(
        f"{key}: would show in the name of a folder or file what the environment holds ({text}); "
        f"type a name: name=…, or {key}=…"
    )


def readings(node: Any, path: str = "", within: bool = False) -> Iterator[tuple[str, Any]]:
    """Keys, and values, that the environment had a part in; below a node, resolved one by one.

    `within`: all of the node is what a variable was made into.
    """
    keys = range(len(node)) if isinstance(node, ListConfig) else list(node)
    for key in keys:
        where = f"{path}.{key}" if path else str(key)
        if _access is None or OmegaConf.is_missing(node, key):
            continue
        before = _access.reads
        value = node[key]
        read = within or _access.reads > before
        if isinstance(value, DictConfig | ListConfig):
            yield from readings(value, where, read)
        elif value is not None and read:
            yield where, value


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
    values = sorted((v for v in origin if v.strip()), key=len, reverse=True)
    words = [rf"(?<![A-Za-z0-9_]){re.escape(value)}(?![A-Za-z0-9_])" for value in values]
    pattern = "|".join([rf"\$\{{oc\.env:{NAME.pattern}\}}", *words])
    return re.sub(pattern, lambda at: stands_for(origin[at[0]]) if at[0] in origin else at[0],
                  masked(text))  # fmt: skip
