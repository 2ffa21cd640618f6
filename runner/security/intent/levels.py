"""The `security` group of a composed config, held against what was typed."""

from __future__ import annotations

import math
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runner.errors import ConfigError, SecurityError
from runner.security.config import SecurityConfig, SecurityLevel
from runner.security.intent.steady import below

LEVELS = list(SecurityLevel)  # from the least to the most


def check_security(config: DictConfig, typed: SecurityConfig) -> None:
    """A file may raise the level and lower a limit, and nothing else."""
    if "security" not in config:
        return
    tree: Any = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    found = tree["security"]
    if not isinstance(found, dict):
        raise SecurityError("security: is refused: it is no group of settings")
    for where, value in below(found, ("security",)):
        if isinstance(value, str) and "${" in value:
            key = ".".join(map(str, where))
            raise SecurityError(f"{key}: {value} is refused: it stands for another value")
    level = str(found.get("level"))
    if level not in SecurityLevel.__members__:
        raise ConfigError("security.level", f"{level!r} is none of off, standard, strict")
    if LEVELS.index(SecurityLevel[level]) < LEVELS.index(typed.level):
        raise _not_from_a_file("security.level", level, "lower the level")
    for name, value in vars(typed).items():
        given = found.get(name)
        if isinstance(value, list):
            more = [one for one in given or () if one not in value]
            if more:
                raise _not_from_a_file(
                    f"security.{name}", f"[{','.join(map(str, more))}]", "allow more"
                )
    for name, limit in vars(typed.limits).items():
        given = (found.get("limits") or {}).get(name)
        if (given if given is not None else math.inf) > (limit if limit is not None else math.inf):
            raise _not_from_a_file(f"security.limits.{name}", given, "raise a limit")


def _not_from_a_file(key: str, value: object, what: str) -> SecurityError:
    return SecurityError(
        f"{key}: {value} is refused: a config file cannot {what}; "
        f"if you mean it, type {key}={value}"
    )


def check_within(inner: SecurityConfig, typed: SecurityConfig) -> None:
    """What overrides say that are put together later on: no more than was typed, or than nothing.

    They may leave out what was typed, as those of a config do that is composed to be looked into.
    """
    least = min(LEVELS.index(typed.level), LEVELS.index(SecurityLevel.standard))
    if LEVELS.index(inner.level) < least:
        raise _not_from_a_file("security.level", inner.level.name, "lower the level")
    for name, value in vars(inner).items():
        if isinstance(value, list) and (more := [v for v in value if v not in vars(typed)[name]]):
            raise _not_from_a_file(f"security.{name}", f"[{','.join(more)}]", "allow more")
