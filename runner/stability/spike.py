"""Spike thresholds of loss and gradient norm, from robust statistics of recent steps."""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from runner.stability.config import SpikeConfig, Watch

TO_SIGMA = 1.4826  # standard deviation of a normal distribution, in MADs


class Usual:
    """The last `window` values of one number, and their median.

    NaN and Inf are ignored, and a spike is clipped to the limit that it exceeded: a single one has
    little effect, and spikes in most of the window become the new baseline.
    """

    def __init__(self, config: SpikeConfig) -> None:
        self.config = config
        self.values: deque[float] = deque(maxlen=config.window)
        self.first: float | None = None  # largest of the run's first values
        self.centre = 0.0

    def add(self, value: float, limit: float) -> None:
        """Add the value of a step; `limit` is the one that it was compared with."""
        if not math.isfinite(value):
            return
        self.values.append(min(value, limit))
        if self.first is None and len(self.values) == self.config.at_least:
            self.first = max(self.values)

    def limit(self) -> float:
        """Return the spike threshold rounded to float32; Inf until warmed up."""
        config = self.config
        if len(self.values) < config.at_least or self.first is None:
            return math.inf
        self.centre = _median(self.values)
        spread = _median(abs(value - self.centre) for value in self.values)
        above = self.centre + config.threshold * TO_SIGMA * spread
        highest = max(above, _times(config.ratio, self.centre), _times(config.floor, self.first))
        return _float32(highest) if highest > self.centre else math.inf  # the values do not vary

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"values": list(self.values), "first": self.first, "centre": self.centre}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.values = deque(state["values"], maxlen=self.config.window)
        self.first, self.centre = state["first"], state["centre"]


@dataclass
class SpikeLimits:
    """Limits that apply after a step, until later ones."""

    after: int
    loss: float = math.inf
    grad_norm: float = math.inf


class Spikes:
    """The limits of loss and gradient norm; each pair applies from a fixed step."""

    def __init__(self, config: SpikeConfig, on: bool) -> None:
        self.usual = {
            name: Usual(config)
            for name in ("loss", "grad_norm")
            if on and config.enabled and config.watch in (Watch.both, Watch[name])
        }
        self.limits = [SpikeLimits(0)]  # in order; the last may apply to later steps

    def of(self, step: int) -> SpikeLimits:
        """Return the limits that `step` was compared with."""
        return next((x for x in reversed(self.limits) if x.after < step), self.limits[0])

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add loss and gradient norm of a step."""
        limits = self.of(step)
        for name, usual in self.usual.items():
            usual.add(numbers[name], getattr(limits, name))

    def move(self, reported: int, after: int) -> None:
        """Compute limits for steps beyond `after`; drop those not needed after `reported`."""
        if not self.usual:
            return
        new = SpikeLimits(after, **{name: usual.limit() for name, usual in self.usual.items()})
        last = self.limits[-1]
        if (new.loss, new.grad_norm) != (last.loss, last.grad_norm):
            self.limits.append(new)
        while len(self.limits) > 1 and self.limits[1].after <= reported:
            self.limits.pop(0)

    def forget(self, step: int) -> None:
        """Drop the statistics: after `step` nothing is a spike until new ones are collected."""
        for usual in self.usual.values():
            usual.values.clear()
        earlier = [limits for limits in self.limits if limits.after < step]
        self.limits = [*earlier, SpikeLimits(step)]

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "usual": {name: usual.state() for name, usual in self.usual.items()},
            "limits": [asdict(limits) for limits in self.limits],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint; a number no longer watched has no limit."""
        for name, usual in self.usual.items():
            if name in state["usual"]:
                usual.load(state["usual"][name])
        gone = {name: math.inf for name in ("loss", "grad_norm") if name not in self.usual}
        self.limits = [SpikeLimits(**{**row, **gone}) for row in state["limits"]]


def _median(values: Iterable[float]) -> float:
    """Return the median, in a fifth of the time of statistics.median."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _times(factor: float, value: float) -> float:
    """Return value + (factor - 1) * |value|: a loss may be negative."""
    return value + (factor - 1) * abs(value)


def _float32(value: float) -> float:
    """Round to float32, as the device compares; Inf on overflow."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.inf
