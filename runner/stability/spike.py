"""What is usual for a number that each step brings, and from where on it is a spike."""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from runner.stability.config import Method, SpikeConfig, Watch

TO_SIGMA = 1.4826  # a normal distribution's deviation, in median distances to the median


class Usual:
    """The running statistics of one number.

    Neither a NaN nor an Inf enters, and a spike enters as the limit that it broke: one of them
    moves nothing, and when they go on for most of the window they are what is usual.
    """

    def __init__(self, config: SpikeConfig) -> None:
        self.config = config
        self.values: deque[float] = deque(maxlen=config.window)
        self.first: float | None = None  # largest of the first values of the run
        self.centre = self.spread = 0.0
        self.moving = False  # whether the averages go on from centre and spread

    def add(self, value: float, limit: float) -> None:
        """Take a step's number in; `limit` is what it was held against."""
        if not math.isfinite(value):
            return
        value = min(value, limit)
        if self.moving:
            weight = 1 / self.config.window
            distance = abs(value - self.centre)
            self.centre += weight * (value - self.centre)
            self.spread += weight * (distance - self.spread)
            return
        self.values.append(value)
        if len(self.values) == self.config.at_least:
            self._look()
            if self.first is None:
                self.first = max(self.values)
            self.moving = self.config.method is Method.ema

    def limit(self) -> float:
        """From where on a number is a spike: Inf while too little is known. As float32 has it."""
        if len(self.values) < self.config.at_least or self.first is None:
            return math.inf
        if not self.moving:
            self._look()
        config = self.config
        above = self.centre + config.threshold * TO_SIGMA * self.spread
        found = max(above, _times(config.ratio, self.centre), _times(config.floor, self.first))
        return _single(found) if found > self.centre else math.inf  # nothing ever differs

    def forget(self) -> None:
        """Learn anew what is usual; what it was in the first steps is kept."""
        self.values.clear()
        self.moving = False

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "values": list(self.values),
            "first": self.first,
            "centre": self.centre,
            "spread": self.spread,
            "moving": self.moving,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.values = deque(state["values"], maxlen=self.config.window)
        self.first, self.moving = state["first"], state["moving"]
        self.centre, self.spread = state["centre"], state["spread"]

    def _look(self) -> None:
        self.centre = _median(self.values)
        self.spread = _median(abs(value - self.centre) for value in self.values)


@dataclass
class SpikeLimits:
    """From where on a step is a spike, and which steps that is said of."""

    after: int  # for steps beyond this one, until others take their place
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
        """What that step was held against."""
        for limits in reversed(self.limits):
            if limits.after < step:
                return limits
        return self.limits[0]

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take a step's numbers in."""
        limits = self.of(step)
        for name, usual in self.usual.items():
            usual.add(numbers[name], getattr(limits, name))

    def move(self, reported: int, after: int) -> None:
        """Limits from what is known now, for steps beyond `after`; no report comes up to
        `reported` again.
        """
        if not self.usual:
            return
        found = SpikeLimits(after, **{name: usual.limit() for name, usual in self.usual.items()})
        last = self.limits[-1]
        if (found.loss, found.grad_norm) != (last.loss, last.grad_norm):
            self.limits.append(found)
        while len(self.limits) > 1 and self.limits[1].after <= reported:
            self.limits.pop(0)

    def forget(self, step: int) -> None:
        """Beyond that step nothing is a spike until it is known anew what is usual."""
        for usual in self.usual.values():
            usual.forget()
        self.limits = [
            *(limits for limits in self.limits if limits.after < step),
            SpikeLimits(step),
        ]

    def coming(self, step: int) -> list[int]:
        """The steps beyond this one after which others take their place."""
        return [limits.after for limits in self.limits if limits.after > step]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "usual": {name: usual.state() for name, usual in self.usual.items()},
            "limits": [asdict(limits) for limits in self.limits],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there; what is no longer watched has no limit."""
        for name, usual in self.usual.items():
            if name in state["usual"]:
                usual.load(state["usual"][name])
        gone = {name: math.inf for name in ("loss", "grad_norm") if name not in self.usual}
        self.limits = [SpikeLimits(**{**row, **gone}) for row in state["limits"]]


def _median(values: Iterable[float]) -> float:
    """In a fifth of the time that statistics.median takes."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def _times(factor: float, value: float) -> float:
    """So many times as far up; a loss may be negative."""
    return value + (factor - 1) * abs(value)


def _single(value: float) -> float:
    """As the device compares it."""
    try:
        found: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.inf
    return found
