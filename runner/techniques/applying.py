"""What is asked for is applied to a draft, in order; of the rest it is said why it is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from runner.errors import ConfigError
from runner.security.targets import construct
from runner.technique import Draft, Engagement, Technique
from runner.techniques.config import Optimization
from runner.untouched import NotRestorable

EXTRA = "optimization.extra"


def apply_techniques(
    asked: Optimization,
    draft: Draft,
    given: Mapping[str, Technique],
    look_up: Callable[[str, str], Any],
) -> tuple[list[tuple[str, Technique]], list[Engagement]]:
    """Those that were applied, by name, and a row for each of the others.

    `given` are those of `optimization.extra` that the caller has made; `look_up` finds the class of
    another by its name. ConfigError under `optimization.strict` for what cannot take hold.
    """
    applied: list[tuple[str, Technique]] = []
    others: list[Engagement] = []
    for name, technique in [*asked.techniques(), *_extra(asked, given, look_up)]:
        if not technique.enabled:
            others.append(Engagement(name, False, False, "not asked for"))
            continue
        status = "not applicable"
        try:
            reason = technique.unavailable(draft.device)
            if reason is None:
                status, reason = "skipped", technique.apply(draft)
        except NotRestorable as error:
            reason = f"it would call the model before training, and cannot: {error}"
        if reason is None:
            applied.append((name, technique))
        else:
            others.append(Engagement(name, True, False, reason, status=status))
    if asked.strict:
        _refuse([row for row in others if row.requested])
    return applied, others


def _extra(
    asked: Optimization, given: Mapping[str, Technique], look_up: Callable[[str, str], Any]
) -> list[tuple[str, Technique]]:
    """The user's own, after ours."""
    found: list[tuple[str, Technique]] = []
    for target in asked.extra:
        technique = given.get(target)
        if technique is None:
            technique = construct(look_up(target, EXTRA), {"enabled": True}, {}, EXTRA)
        if not isinstance(technique, Technique):
            raise ConfigError(EXTRA, f"{target} is no Technique", "inherit from runner.Technique")
        if technique.enabled and not type(technique).__module__.startswith("runner."):
            from runner.techniques.fingerprint import MeasuredTechnique

            technique = MeasuredTechnique(True, technique=technique)
        found.append((target.rpartition(".")[2], technique))
    return found


def _refuse(rows: list[Engagement]) -> None:
    """Say of all that cannot take hold why, at once."""
    if not rows:
        return
    first, *more = rows
    reason = first.reason + "".join(f"; nor can {row.name}: {row.reason}" for row in more)
    off = " ".join(f"optimization.{row.name}.enabled=false" for row in rows)
    raise ConfigError(
        f"optimization.{first.name}",
        f"cannot take hold: {reason}",
        f"set {off}, or optimization.strict=false",
    )
