"""How long epochs take, from the reports that reach the host anyway."""

from __future__ import annotations

import logging
import time

from runner.training.hook import Report
from runner.training.run import Run

log = logging.getLogger("runner")

LONG_S = 5.0  # a shorter epoch is no news


class Epochs:
    """Wall time from the end of one pass over the data to the next, validations included."""

    def __init__(self, step: int, steps_per_epoch: int) -> None:
        """`step` is where the run stands; an epoch that is under way by then is not timed."""
        self.steps = steps_per_epoch
        self.ended = step // steps_per_epoch
        self.mark = time.monotonic() if step % steps_per_epoch == 0 else None

    def seconds(self, run: Run, report: Report) -> float | None:
        """How long an epoch took that ended in this stretch, on average if several did.

        Said at level info where it took long, else at debug. The end within the stretch is by
        proportion, so reading no clock in the loop costs a part of a step.
        """
        epoch = report.last // self.steps
        if epoch <= self.ended:
            return None
        beyond = (report.last - epoch * self.steps) / len(report.loss)
        end = time.monotonic() - beyond * report.seconds
        count, self.ended = epoch - self.ended, epoch
        mark, self.mark = self.mark, end
        if mark is None:
            return None
        seconds = max(0.0, end - mark) / count
        level = logging.INFO if seconds >= LONG_S else logging.DEBUG
        log.log(level, "epoch %s ended after %.3g s", f"{epoch:,}", seconds)
        return seconds
