"""Memory given back before there is none left."""

from __future__ import annotations

import logging

from runner.device import memory
from runner.hook import Hook, Report
from runner.run import Run

log = logging.getLogger("runner")

GROWN = 0.01  # share of the memory since the last cleaning, below which another gains nothing


class Cleaning(Hook):
    """Cleans when the process or the device holds more than a share of the memory it may have.

    Said once for as long as it stays above; counted in `faults` as `memory_cleaned`. Looking
    takes 10 µs a report, cleaning 50 ms.
    """

    def __init__(self, above: float) -> None:
        self.above = above
        self.left: float | None = None  # share held after the last cleaning, while above

    def on_report(self, run: Run, report: Report) -> None:
        """Look, and clean if it is time."""
        held = memory.share_held(run.device)
        if held <= self.above:
            self.left = None
            return
        if self.left is not None and held < self.left + GROWN:
            return
        first = self.left is None
        memory.clean(run.device)
        self.left = memory.share_held(run.device)
        run.history.add(
            "memory_cleaned",
            f"{held:.0%} of the memory was held (device.clean_above={self.above:g}); "
            f"{self.left:.0%} after cleaning",
            step=report.last,
            category="memory",
            action="cleaned",
            say=first,
        )
