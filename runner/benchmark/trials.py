"""The arms that show what one technique is worth: the plain run with it, the level without it."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from runner.benchmark.arms import Arm
from runner.benchmark.result import Effect
from runner.config import RunConfig

AFTERWARDS = {"quantization": "is for inference: training never sees it"}


@dataclass(frozen=True)
class Trial:
    """One technique, and the two arms that show what it is worth."""

    name: str
    added: Arm
    removed: Arm


def planned(
    level: Arm, reference: Arm, summary: Mapping[str, Any]
) -> tuple[dict[str, Effect], list[Trial]]:
    """An effect for each technique asked for, in order of application, and what is to be tried."""
    effects: dict[str, Effect] = {}
    trials = []
    rows = {row["name"]: row for row in summary.get("techniques", [])}
    for name in _asked(level.config):
        row = rows.get(name, {})
        effects[name] = effect = Effect(name)
        if name in AFTERWARDS:
            effect.note = AFTERWARDS[name]
        elif not row.get("engaged"):
            effect.note = f"did not take hold in {level.name}: {row.get('reason') or 'not seen'}"
        elif _part(level.config, name) == _part(reference.config, name):
            effect.note = f"is in {reference.name} too"
        elif others := (row.get("evidence") or {}).get("part_of"):
            effect.note = f"did nothing of its own in {level.name}: part of {others}"
        else:
            trials.append(
                Trial(name, added(reference, level, name), removed(level, reference, name))
            )
    return effects, trials


def _asked(config: RunConfig) -> list[str]:
    own = [name for name, technique in config.optimization.techniques() if technique.enabled]
    return own + [target.rpartition(".")[2] for target in config.optimization.extra]


def added(reference: Arm, level: Arm, name: str) -> Arm:
    """The reference with that one technique as it is in the level."""
    return _with_part_of(reference, level, name, f"{reference.name} + {name}")


def removed(level: Arm, reference: Arm, name: str) -> Arm:
    """The level with that one technique as it is in the reference: mostly off."""
    return _with_part_of(level, reference, name, f"{level.name} - {name}")


def _with_part_of(arm: Arm, other: Arm, name: str, called: str) -> Arm:
    config = copy(arm.config)
    config.optimization = deepcopy(arm.config.optimization)
    config.optimization.level, config.optimization.strict = "custom", False
    wanted, had = _part(other.config, name), _part(arm.config, name)
    if isinstance(wanted, str | None):  # a technique of the user's own, by its class
        left = [t for t in config.optimization.extra if t.rpartition(".")[2] != name]
        config.optimization.extra = left + ([wanted] if wanted else [])
        typed = [f"optimization.extra=[{','.join(config.optimization.extra)}]"]
    else:
        setattr(config.optimization, name, deepcopy(wanted))
        typed = [
            f"optimization.{name}.{knob.name}={_typed(getattr(wanted, knob.name))}"
            for knob in fields(wanted)
            if had is None or getattr(wanted, knob.name) != getattr(had, knob.name)
        ]
    return Arm(called, config, [*arm.overrides, *typed])


def _part(config: RunConfig, name: str) -> Any:
    """A technique and its knobs; of one of the user's own its class's name, None if it is off."""
    for own, technique in config.optimization.techniques():
        if own == name:
            return technique
    named = [t for t in config.optimization.extra if t.rpartition(".")[2] == name]
    return named[0] if named else None


def _typed(value: Any) -> str:
    """As it would be typed."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value.value if isinstance(value, Enum) else value)
