"""What the tools have in common: they are bounded, and say what they cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from runner.debug.config import DebugConfig
from runner.hook import Cost, Hook
from runner.run import Run


class Tool(Hook):
    """A hook that takes time at some steps, and rests after debug.max_iterations and timeout_s."""

    name: ClassVar[str]

    def __init__(self, config: DebugConfig, every: int | None = None) -> None:
        self.config = config
        self.every = every or config.every
        self.looks = 0
        self.seconds = 0.0
        self.finding = ""
        self.began = time.monotonic()

    def due(self, step: int) -> bool:
        """Each n-th step, until it rests."""
        return step % self.every == 0 and not self.rests(step)

    def rests(self, step: int) -> bool:
        """Whether it has done what it may."""
        most, seconds = self.config.max_iterations, self.config.timeout_s
        if most is not None and step > most:
            return True
        return seconds is not None and time.monotonic() - self.began > seconds

    @contextmanager
    def looking(self) -> Iterator[None]:
        """What happens meanwhile is on the tool's account."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.looks += 1
            self.seconds += time.perf_counter() - start

    def cost(self, run: Run) -> Cost | None:
        """Its row of the summary."""
        return Cost(self.name, self.looks, self.seconds, self.finding)
