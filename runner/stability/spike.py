"""The usual range of a number that each step brings, and the limit above which it is a spike."""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from runner.stability.config import SpikeConfig, Watch

TO_SIGMA = 1.4826  # a normal distribution's deviation, in median distances to the median


class Usual:
    """The last `window` values of one number, and their median.

    Neither NaN nor Inf enters, and a spike enters as the limit that it broke: one of them moves
    nothing, and when they last for most of the window they are the new usual.
    """

    def __init__(self, config: SpikeConfig) -> None:
        self.config = config
        self.values: deque[float] = deque(maxlen=config.window)
        self.first: float | None = None  # largest of the first values of the run
        self.centre = 0.0

    def add(self, value: float, limit: float) -> None:
        """Add the number of a step; `limit` is the one it was compared with."""
        if not math.isfinite(value):
            return
        self.values.append(min(value, limit))
        if self.first is None and len(self.values) == self.config.at_least:
            self.first = max(self.values)

    def limit(self) -> float:
        """Spike threshold rounded to float32; Inf until enough is known."""
        config = self.config
        if len(self.values) < config.at_least or self.first is None:
            return math.inf
        self.centre = _median(self.values)
        spread = _median(abs(value - self.centre) for value in self.values)
        above = self.centre + config.threshold * TO_SIGMA * spread
        highest = max(above, _times(config.ratio, self.centre), _times(config.floor, self.first))
        return _float32(highest) if highest > self.centre else math.inf  # it never differs

    def state(self) -> dict[str, Any]:
        """The content of a checkpoint."""
        return {"values": list(self.values), "first": self.first, "centre": self.centre}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.values = deque(state["values"], maxlen=self.config.window)
        self.first, self.centre = state["first"], state["centre"]


@dataclass
class SpikeLimits:
    """The limits of the steps after one, until others take their place."""

    after: int
    loss: float = math.inf
    grad_norm: float = math.inf


class Spikes:
    """The limits of loss and gradient norm; each pair holds from a fixed step on."""

    def __init__(self, config: SpikeConfig, on: bool) -> None:
        self.usual = {
            name: Usual(config)
            for name in ("loss", "grad_norm")
            if on and config.enabled and config.watch in (Watch.both, Watch[name])
        }
        self.limits = [SpikeLimits(0)]  # in order; the last may be for steps to come

    def of(self, step: int) -> SpikeLimits:
        """The limits that the step was compared with."""
        return next((x for x in reversed(self.limits) if x.after < step), self.limits[0])

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add the numbers of a step."""
        limits = self.of(step)
        for name, usual in self.usual.items():
            usual.add(numbers[name], getattr(limits, name))

    def move(self, reported: int, after: int) -> None:
        """Limits from the numbers so far, for steps beyond `after`; all up to `reported` came."""
        if not self.usual:
            return
        new = SpikeLimits(after, **{name: usual.limit() for name, usual in self.usual.items()})
        last = self.limits[-1]
        if (new.loss, new.grad_norm) != (last.loss, last.grad_norm):
            self.limits.append(new)
        while len(self.limits) > 1 and self.limits[1].after <= reported:
            self.limits.pop(0)

    def forget(self, step: int) -> None:
        """Beyond that step nothing is a spike until the usual range is known again."""
        for usual in self.usual.values():
            usual.values.clear()
        earlier = [limits for limits in self.limits if limits.after < step]
        self.limits = [*earlier, SpikeLimits(step)]

    def state(self) -> dict[str, Any]:
        """The content of a checkpoint."""
        return {
            "usual": {name: usual.state() for name, usual in self.usual.items()},
            "limits": [asdict(limits) for limits in self.limits],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; a number that is no longer watched has no limit."""
        for name, usual in self.usual.items():
            if name in state["usual"]:
                usual.load(state["usual"][name])
        gone = {name: math.inf for name in ("loss", "grad_norm") if name not in self.usual}
        self.limits = [SpikeLimits(**{**row, **gone}) for row in state["limits"]]


def _median(values: Iterable[float]) -> float:
    """In a fifth of the time that statistics.median takes."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _times(factor: float, value: float) -> float:
    """So many times as far up; a loss may be negative."""
    return value + (factor - 1) * abs(value)


def _float32(value: float) -> float:
    """As the device compares it."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.inf
