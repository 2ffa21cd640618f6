"""Application of the configured techniques to a run that is being built."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import Enum
from typing import Any

from runner.core.errors import ConfigError
from runner.core.interfaces.technique import (
    NotNeeded,
    RunBuilder,
    Technique,
    TechniqueStatus,
    is_complete_technique,
)
from runner.core.preserved_state import NotRestorable
from runner.core.schemas.optimization import Optimization

log = logging.getLogger("runner")

EXTRA_KEY = "optimization.extra"
NamedTechniques = list[tuple[str, Technique]]


def apply_techniques(
    config: Optimization,
    builder: RunBuilder,
    instances: Mapping[str, Technique],
    resolve: Callable[[str, str], Any],
) -> tuple[NamedTechniques, list[TechniqueStatus]]:
    """Apply techniques in order; return those applied, by name, and the status of all others.

    `instances` has techniques of `optimization.extra` that the caller made; `resolve` resolves the
    class name of any other. Raises ConfigError under `optimization.strict` if one cannot engage.
    """
    applied: NamedTechniques = []
    not_applied: list[TechniqueStatus] = []
    extra = [(t.rpartition(".")[2], _build_extra(t, instances, resolve)) for t in config.extra]
    for name, technique in [*config.techniques(), *extra]:
        if not technique.enabled:
            not_applied.append(TechniqueStatus(name, False, False, "not requested"))
            continue
        status, reason = "not applicable", technique.unavailable(builder.device)
        if reason is None:
            reason = builder.unsupported_reason(name)
        try:
            if reason is None:
                status, reason = "skipped", technique.apply(builder)
        except NotRestorable as error:
            reason = f"it cannot call the model before training: {error}"
        if reason is None:
            applied.append((name, technique))
        else:
            not_applied.append(TechniqueStatus(name, True, False, reason, status=status))
    unmet = [x for x in not_applied if x.requested and not isinstance(x.reason, NotNeeded)]
    if config.strict and unmet:
        raise _strict_error(unmet)
    return applied, not_applied


def warn_unused_settings(config: Optimization) -> None:
    """Log a warning for each setting of a technique that is off, as it has no effect."""
    for name, technique in config.techniques():
        default = type(technique)()
        for key in (field.name for field in fields(technique) if not technique.enabled):
            value = getattr(technique, key)
            if value != getattr(default, key):
                text = value.value if isinstance(value, Enum) else value
                setting, on = f"{name}.{key}={text}", f"optimization.{name}.enabled=true"
                log.warning("optimization.%s has no effect: %s switches it on", setting, on)


def _build_extra(
    target: str, instances: Mapping[str, Technique], resolve: Callable[[str, str], Any]
) -> Technique:
    """Return a user's technique, wrapped so that its effect is measured."""
    technique = instances.get(target)
    if technique is None:
        from runner.core.security.registry import construct

        factory = resolve(target, EXTRA_KEY)
        if not isinstance(factory, type) or is_complete_technique(factory):
            technique = construct(factory, {"enabled": True}, {}, EXTRA_KEY)
    if not isinstance(technique, Technique):
        fix = "inherit from runner.Technique and define apply and engaged"
        raise ConfigError(EXTRA_KEY, f"{target} is not a Technique", fix)
    if technique.enabled and not type(technique).__module__.startswith("runner."):
        from runner.core.techniques.fingerprint import MeasuredTechnique

        return MeasuredTechnique(True, technique=technique)
    return technique


def _strict_error(rows: list[TechniqueStatus]) -> ConfigError:
    first, *more = rows
    reason = first.reason + "".join(f"; nor can {row.name}: {row.reason}" for row in more)
    off = " ".join(f"optimization.{row.name}.enabled=false" for row in rows)
    fix = f"set {off}, or optimization.strict=false"
    return ConfigError(f"optimization.{first.name}", f"cannot engage: {reason}", fix)
