"""Bounds declared with a config key: `every: int = bounded(50, min=1)`.

They share one check and one message, and are listed in `docs/config.md`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from runner.errors import ConfigError


@dataclass(frozen=True)
class NumberRange:
    """The valid range of a key's number; NaN and infinities are always invalid."""

    min: float | None = None
    max: float | None = None
    above: float | None = None
    below: float | None = None

    def hold(self, value: float) -> bool:
        """Return whether a number is within the range."""
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
    """Return a dataclass field with a default and a valid range; `check_bounds` accepts None."""
    return field(default=default, metadata={"bounds": NumberRange(min, max, above, below)})


def check_bounds(config: Any, prefix: str) -> None:
    """Raise ConfigError for a number outside the bounds of its field."""
    for one in fields(config):
        bounds, value = one.metadata.get("bounds"), getattr(config, one.name)
        if bounds is not None and value is not None and not bounds.hold(value):
            raise ConfigError(f"{prefix}.{one.name}", f"must be {bounds}, got {value}")
