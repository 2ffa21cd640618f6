"""In what the arms of a benchmark train something else: what cannot be compared then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from runner.benchmark.arms import Arm
from runner.config import RunConfig
from runner.record.text import escape_control_chars

WORK: dict[str, Callable[[RunConfig], Any]] = {
    "model": lambda config: config.model,
    "objective": lambda config: config.objective,
    "optimizer": lambda config: config.optimizer,
    "stability": lambda config: config.stability,
    "seed": lambda config: config.seed,
    "batch size": lambda config: config.training.batch_size,
    "device.tf32": lambda config: config.device.tf32,
}
"""What is trained, whatever techniques are asked for: parity holds an arm against its own."""
LEVEL = "optimization level"
"""Of an arm that does other work and names no level: it has another one as well."""


def differing_batches(arms: Sequence[Arm]) -> str | None:
    """What to say where arms make steps of different sizes: their times are per sample."""
    sizes = {arm.name: arm.config.training.batch_size for arm in arms}
    if len(set(sizes.values())) < 2:
        return None
    listed = ", ".join(f"{escape_control_chars(name)} {size}" for name, size in sizes.items())
    return (
        f"steps are of different sizes ({listed} samples): times are compared per sample, and "
        "after as many samples a larger batch has made fewer updates, so losses are not alike"
    )


def other_work(arm: Arm, reference: Arm) -> list[str]:
    """In what the arm trains something else than the reference."""
    parts = [part for part, of in WORK.items() if of(arm.config) != of(reference.config)]
    return [*parts, LEVEL] if parts and _elsewhere(arm, reference) else parts


def differing_work(arms: Sequence[Arm], reference: Arm) -> list[str]:
    """What to say where arms train something else than the reference: their losses differ."""
    notes = []
    for part in WORK:
        others = [
            escape_control_chars(arm.name) for arm in arms if part in other_work(arm, reference)
        ]
        if others and part != "batch size":  # of which `differing_batches` tells
            notes.append(
                f"{', '.join(others)}: another {part} than "
                f"{escape_control_chars(reference.name)}, so only times can be compared, not losses"
            )
    return notes


def differing_levels(arms: Sequence[Arm], reference: Arm) -> list[str]:
    """What to say where arms that name no level are at another one than the reference."""
    inherited: dict[str, list[str]] = {}
    for arm in arms:
        if _elsewhere(arm, reference):
            inherited.setdefault(arm.base, []).append(escape_control_chars(arm.name))
    return [
        f"{', '.join(names)}: on top of {base}, unlike {escape_control_chars(reference.name)}; "
        "write optimization=none in an arm for its overrides alone"
        for base, names in inherited.items()
    ]


def _elsewhere(arm: Arm, reference: Arm) -> bool:
    levels = arm.config.optimization.level, reference.config.optimization.level
    return bool(arm.base) and levels[0] != levels[1]
