"""A config that a program has changed since it was composed, checked as one that was typed."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import fields, is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from runner.composing import no_such_key
from runner.config import NOT_OF_THE_RUN, RunConfig
from runner.errors import ConfigError, UsageError
from runner.overrides.diagnosis import translated


def rechecked(config: RunConfig, made: Collection[str] = ()) -> RunConfig:
    """The same config, every check passed again: what was set on it by hand has met none.

    Techniques in `made` are the caller's own objects; nobody is to be trusted for their names. Not
    asked is what a job needs of its config: the runs that it makes have less than it was told.
    Raises ConfigError and SecurityError, and UsageError for what is no config.
    """
    if not isinstance(config, RunConfig):
        raise UsageError(
            f"build: the config is a {type(config).__name__}; give what compose([…]) returns"
        )
    values = _values(config, "", config)
    optimization = values["optimization"]
    named = [name for name in optimization.extra if name not in made]
    jobs = {name: type(values[name])() for name in NOT_OF_THE_RUN if name != "security"}
    foreseen = {**jobs, "optimization": replace(optimization, extra=named)}
    found = RunConfig(**(values | foreseen))
    for name in foreseen:
        setattr(found, name, values[name])
    return found


def _values(part: Any, prefix: str, config: RunConfig) -> dict[str, Any]:
    """What the fields of a part of `config` hold, made anew."""
    hints = _hints(part.__class__)
    for name in vars(part):
        if name not in hints:
            raise no_such_key(f"{prefix}{name}", [f"{prefix}{known}" for known in hints])
    values = {}
    for name, hint in hints.items():
        value: Any = _of_python(getattr(part, name))
        if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, hint):
            value = value.__class__(**_values(value, f"{prefix}{name}.", config))
        elif not _fits(value, hint):
            value = _converted(value, f"{prefix}{name}", config)
        values[name] = value
    return values


def _of_python(value: Any) -> Any:
    """Numbers and arrays of numpy and torch as Python has them, at any depth."""
    if isinstance(value, np.generic | np.ndarray | Tensor):
        return value.tolist()
    if type(value) is dict:
        return {key: _of_python(item) for key, item in value.items()}
    return [_of_python(item) for item in value] if type(value) in (list, tuple) else value


@cache
def _hints(kind: type) -> dict[str, Any]:
    found = get_type_hints(kind)
    return {field.name: found[field.name] for field in fields(kind)}


def _fits(value: Any, hint: Any) -> bool:
    """Whether the value is of that very type, so that there is nothing to convert or refuse."""
    kind = get_origin(hint)
    if kind is UnionType:
        return any(_fits(value, one) for one in get_args(hint))
    if kind is list:
        (item,) = get_args(hint)
        return type(value) is list and all(_fits(one, item) for one in value)
    if kind is dict:
        return type(value) is dict and _plain(value)
    if hint is Any:
        return _plain(value)
    return type(value) is (NoneType if hint is None else hint) and value != MISSING


def _plain(value: Any) -> bool:
    """Whether it is what a free argument can be."""
    if type(value) is dict:
        return all(type(key) is str and _plain(item) for key, item in value.items())
    if type(value) is list:
        return all(map(_plain, value))
    return value is None or (type(value) in (bool, int, float, str) and value != MISSING)


def _converted(value: Any, key: str, config: RunConfig) -> Any:
    """What the value becomes on the command line; ConfigError where it is none for the key."""
    schema = OmegaConf.structured(RunConfig)
    for group in ("data", "model"):
        if is_dataclass(option := getattr(config, group)):
            schema[group] = OmegaConf.structured(type(option))
    if isinstance(value, str) and value == MISSING:
        raise ConfigError(key, "has no value", f"give one: {key}=…")
    try:
        OmegaConf.update(schema, key, _literal(value), merge=False)
        found = OmegaConf.select(schema, key)
        return OmegaConf.to_object(found) if OmegaConf.is_config(found) else found
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise translated(error) from error


def _literal(value: Any) -> Any:
    """Texts as values that are not to be resolved once more."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)
    if isinstance(value, dict):
        return {key: _literal(item) for key, item in value.items()}
    return [_literal(item) for item in value] if isinstance(value, list | tuple) else value
