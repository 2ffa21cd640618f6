"""Bounds declared with a config key: `every: int = bounded(50, min=1)`.

One check and one message for all keys; listed in `docs/config.md`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from runner.core.errors import ConfigError


@dataclass(frozen=True)
class NumberRange:
    """The valid range of a key; NaN and infinities are never valid."""

    min: float | None = None
    max: float | None = None
    above: float | None = None
    below: float | None = None

    def contains(self, value: float) -> bool:
        """Whether a number is valid."""
        lower = (self.min is None or value >= self.min) and (
            self.above is None or value > self.above
        )
        upper = (self.max is None or value <= self.max) and (
            self.below is None or value < self.below
        )
        return math.isfinite(value) and lower and upper

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
