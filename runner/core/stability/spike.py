"""Spike limits of loss and gradient norm, from their rolling medians."""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from runner.core.schemas.stability import SpikeConfig, SpikeQuantity

MAD_TO_SIGMA = 1.4826  # standard deviation / median absolute deviation of a normal distribution


class RollingBaseline:
    """The last `window` values of one quantity, and their median.

    NaN and Inf are ignored, and a spike is clipped to the limit that it exceeded: a single one
    hardly matters, and spikes over most of the window become the new baseline.
    """

    def __init__(self, config: SpikeConfig) -> None:
        self.config = config
        self.values: deque[float] = deque(maxlen=config.window)
        self.initial_max: float | None = None  # largest of the first `at_least` values
        self.median = 0.0

    def add(self, value: float, limit: float) -> None:
        """Add the value of a step, clipped to the limit that it was compared with."""
        if not math.isfinite(value):
            return
        self.values.append(min(value, limit))
        if self.initial_max is None and len(self.values) == self.config.at_least:
            self.initial_max = max(self.values)

    def limit(self) -> float:
        """Return the spike threshold rounded to float32; Inf before `at_least` values."""
        config = self.config
        if len(self.values) < config.at_least or self.initial_max is None:
            return math.inf
        self.median = _median(self.values)
        spread = _median(abs(value - self.median) for value in self.values)
        limit = self.median + config.threshold * MAD_TO_SIGMA * spread
        limit = max(limit, _scale(config.ratio, self.median))
        limit = max(limit, _scale(config.floor, self.initial_max))
        return _float32(limit) if limit > self.median else math.inf  # without spread, no limit

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"values": list(self.values), "first": self.initial_max, "centre": self.median}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.values = deque(state["values"], maxlen=self.config.window)
        self.initial_max, self.median = state["first"], state["centre"]


@dataclass
class SpikeLimits:
    """The limits of the steps beyond `after`, until newer limits apply."""

    after: int
    loss: float = math.inf
    grad_norm: float = math.inf


class SpikeDetector:
    """Spike limits of loss and gradient norm; each pair applies from a fixed step on."""

    def __init__(self, config: SpikeConfig, enabled: bool) -> None:
        self.baselines = {
            name: RollingBaseline(config)
            for name in ("loss", "grad_norm")
            if enabled and config.enabled
            if config.watch in (SpikeQuantity.both, SpikeQuantity[name])
        }
        self.limits = [SpikeLimits(0)]  # by step; the last may be for future steps

    def limits_at(self, step: int) -> SpikeLimits:
        """Return the limits that the step is compared with."""
        return next((x for x in reversed(self.limits) if x.after < step), self.limits[0])

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add the values of a step, by name: loss and grad_norm."""
        limits = self.limits_at(step)
        for name, baseline in self.baselines.items():
            baseline.add(numbers[name], getattr(limits, name))

    def update_limits(self, reported: int, after: int) -> None:
        """Set limits for steps beyond `after`, and drop limits of steps up to `reported` only."""
        if not self.baselines:
            return
        new = SpikeLimits(after, **{n: baseline.limit() for n, baseline in self.baselines.items()})
        last = self.limits[-1]
        if (new.loss, new.grad_norm) != (last.loss, last.grad_norm):
            self.limits.append(new)
        while len(self.limits) > 1 and self.limits[1].after <= reported:
            self.limits.pop(0)

    def reset(self, step: int) -> None:
        """Discard the values; no later step is a spike before `at_least` new values."""
        for baseline in self.baselines.values():
            baseline.values.clear()
        earlier = [limits for limits in self.limits if limits.after < step]
        self.limits = [*earlier, SpikeLimits(step)]

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "usual": {name: baseline.state() for name, baseline in self.baselines.items()},
            "limits": [asdict(limits) for limits in self.limits],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint; a quantity that is no longer watched has no limit."""
        for name, baseline in self.baselines.items():
            if name in state["usual"]:
                baseline.load(state["usual"][name])
        unlimited = {name: math.inf for name in ("loss", "grad_norm") if name not in self.baselines}
        self.limits = [SpikeLimits(**{**row, **unlimited}) for row in state["limits"]]


def _median(values: Iterable[float]) -> float:
    """Return the median, in a fifth of the time of statistics.median."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _scale(factor: float, value: float) -> float:
    """Return value + (factor - 1) * |value|, which is above a negative loss as well."""
    return value + (factor - 1) * abs(value)


def _float32(value: float) -> float:
    """Round to float32, as the device compares; Inf on overflow."""
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
        return rounded
    except OverflowError:
        return math.inf
