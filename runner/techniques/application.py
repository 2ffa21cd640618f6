"""Application of the configured techniques to a run that is being built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from runner.errors import ConfigError
from runner.models.preserved_state import NotRestorable
from runner.techniques.base import RunBuilder, Technique, TechniqueStatus
from runner.techniques.config import Optimization

EXTRA = "optimization.extra"
Named = list[tuple[str, Technique]]


def apply_techniques(
    asked: Optimization,
    draft: RunBuilder,
    given: Mapping[str, Technique],
    look_up: Callable[[str, str], Any],
) -> tuple[Named, list[TechniqueStatus]]:
    """Apply techniques in order; return those applied, by name, and the status of all others.

    `given` are instances of `optimization.extra` made by the caller; `look_up` resolves the class
    name of any other. Raises ConfigError under `optimization.strict` if one cannot engage.
    """
    applied: Named = []
    others: list[TechniqueStatus] = []
    extra = [(target.rpartition(".")[2], _extra(target, given, look_up)) for target in asked.extra]
    for name, technique in [*asked.techniques(), *extra]:
        if not technique.enabled:
            others.append(TechniqueStatus(name, False, False, "not requested"))
            continue
        status, reason = "not applicable", technique.unavailable(draft.device)
        if draft.world is not None and reason is None:
            reason = draft.world.refuses(name)
        try:
            if reason is None:
                status, reason = "skipped", technique.apply(draft)
        except NotRestorable as error:
            reason = f"it cannot call the model before training: {error}"
        if reason is None:
            applied.append((name, technique))
        else:
            others.append(TechniqueStatus(name, True, False, reason, status=status))
    refused = [row for row in others if row.requested]
    if asked.strict and refused:
        raise _refusal(refused)
    return applied, others


def _extra(
    target: str, given: Mapping[str, Technique], look_up: Callable[[str, str], Any]
) -> Technique:
    """Return a user's technique, wrapped so that its effect is measured."""
    technique = given.get(target)
    if technique is None:
        from runner.security.registry import construct

        technique = construct(look_up(target, EXTRA), {"enabled": True}, {}, EXTRA)
    if not isinstance(technique, Technique):
        raise ConfigError(EXTRA, f"{target} is not a Technique", "inherit from runner.Technique")
    if technique.enabled and not type(technique).__module__.startswith("runner."):
        from runner.techniques.fingerprint import MeasuredTechnique

        return MeasuredTechnique(True, technique=technique)
    return technique


def _refusal(rows: list[TechniqueStatus]) -> ConfigError:
    """Return one error with the reasons of all techniques that cannot engage."""
    first, *more = rows
    reason = first.reason + "".join(f"; nor can {row.name}: {row.reason}" for row in more)
    off = " ".join(f"optimization.{row.name}.enabled=false" for row in rows)
    return ConfigError(
        f"optimization.{first.name}",
        f"cannot engage: {reason}",
        f"set {off}, or optimization.strict=false",
    )
