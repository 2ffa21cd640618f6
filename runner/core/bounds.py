"""Bounds of numbers in a config.

Those of a key are declared with it, `every: int = bounded(50, min=1)`, and listed in
`docs/config.md`: one check and one message for all keys.

Counts have upper limits, too, since a config from someone else may request any number of threads,
processes or tensor elements. They are far above useful values on the largest machines, and the same
on every machine, so that a config that is valid on one is valid on all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from runner.core.errors import ConfigError

MAX_STEPS = 50_000_000  # learning rates are in a table: 32 bytes a step
DEFAULT_LIMIT = 1_000_000_000  # for counts that are only compared
LIMITS = {
    "device.threads": 1024,
    "device.interop_threads": 1024,
    "device.index": 1024,
    "distributed.processes": 1024,
    "data.workers": 256,  # processes
    "data.prefetch": 1024,  # batches per worker
    "data.samples": 100_000_000,
    "data.features": 1_000_000,
    "data.channels": 4096,
    "data.image_size": 16_384,
    "data.classes": 1_000_000,
    "data.vocab": 10_000_000,
    "data.sequence": 10_000_000,
    "data.randaugment": 100,
    "data.cache_mb": 10_000_000,
    "data.default_steps": MAX_STEPS,
    "model.width": 65_536,
    "model.depth": 1024,
    "model.heads": 4096,
    "model.stages": 10,  # each doubles the width
    "model.blocks": 1024,
    "training.steps": MAX_STEPS,
    "training.batch_size": 10_000_000,
    "training.micro_batch": 10_000_000,
    "verify.steps": 100_000,
    "stability.spike.window": 1_000_000,
    "checks.inputs.schema.classes": 1_000_000,
    "checkpoint.keep": 100_000,
    "debug.capture.at_most": 10_000,
    "debug.profile.warmup": 10_000,
    "debug.profile.steps": 10_000,
    "scan.rows": 1_000_000,
    "hydra.launcher.jobs": 256,  # processes
    "hydra.launcher.retries": 1000,
}
SEED_KEYS = ("seed", "data.split_seed")
USER_KEYS = ("arguments", "options", "hooks")  # with keys of the user's code below them


@dataclass(frozen=True)
class NumberRange:
    """The valid range of a key; NaN and infinities are never valid."""

    min: float | None = None
    max: float | None = None
    above: float | None = None
    below: float | None = None

    def contains(self, value: float) -> bool:
        """Whether a number is valid."""
        least = self.min is None or value >= self.min
        most = self.max is None or value <= self.max
        above = self.above is None or value > self.above
        below = self.below is None or value < self.below
        return math.isfinite(value) and least and most and above and below

    def __str__(self) -> str:
        signs = (("≥", self.min), (">", self.above), ("≤", self.max), ("<", self.below))
        limits = [f"{sign} {limit:,g}" for sign, limit in signs if limit is not None]
        return " and ".join(limits) or "a finite number"


def bounded(
    default: Any,
    *,
    min: float | None = None,
    max: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """Return a dataclass field with a default and a valid range; null is not checked."""
    return field(default=default, metadata={"bounds": NumberRange(min, max, above, below)})


def check_bounds(config: Any, prefix: str) -> None:
    """Raise ConfigError for a number outside its field's bounds."""
    for config_field in fields(config):
        bounds, value = config_field.metadata.get("bounds"), getattr(config, config_field.name)
        if bounds is not None and value is not None and not bounds.contains(value):
            raise ConfigError(f"{prefix}.{config_field.name}", f"must be {bounds}, got {value}")


class Bounded:
    """A part of the config, below `key`; the bounds of its fields are checked when it is made."""

    config_key = ""

    def __init_subclass__(cls, key: str = "") -> None:
        cls.config_key = key or cls.config_key

    def __post_init__(self) -> None:
        check_bounds(self, self.config_key)


def check_counts(values: Mapping[str, Any], prefix: str = "") -> None:
    """Raise ConfigError for an integer, at any depth, above its key's limit."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and name not in USER_KEYS:
            check_counts(value, f"{key}.")
        for number in value if isinstance(value, list) else [value]:
            check_count(key, number)


def check_count(key: str, value: Any) -> None:
    """Raise ConfigError if `value` is an integer above the limit of `key`."""
    limit = LIMITS.get(key, DEFAULT_LIMIT)
    if isinstance(value, int) and value > limit and key not in SEED_KEYS:
        raise ConfigError(key, f"{value:,} is too many", f"use {limit:,} or less")
