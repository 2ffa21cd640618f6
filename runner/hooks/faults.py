"""What went wrong, where people look: debug/history.json while it happens, a picture at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from runner.record import history
from runner.training.hook import Hook, Report
from runner.training.run import Run

log = logging.getLogger("runner")

WRITE_S = 1.0  # between two writings of history.json
TIMELINE = "debug/plots/timeline.png"
SEVERITIES = ("info", "warning", "error")


class Faults(Hook):
    """Keeps debug/history.json up to date; shows it in TensorBoard when the run ends.

    With `empty`, a run without a fault leaves history.json and anomalies.json that say so.
    """

    def __init__(self, empty: bool = False) -> None:
        self.empty = empty
        self.written = 0.0

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Say at the end what there was."""
        try:
            yield
        finally:
            run.history.unwritten |= self.empty
            run.guardian.anomalies.unwritten |= self.empty
            run.history.write()
            run.guardian.anomalies.write(run.folder)
            try:
                if run.folder is not None and run.history.faults:
                    _draw_timeline(run)
            except (OSError, ValueError, ArithmeticError) as error:
                log.warning("no picture of the faults: %s", error)

    def on_report(self, run: Run, report: Report) -> None:
        """Write the history now and then."""
        now = time.monotonic()
        if now - self.written > WRITE_S:
            self.written = now
            run.history.write()


def _draw_timeline(run: Run) -> None:
    from runner.record import plots

    faults, step = list(run.history.faults.values()), run.progress.step
    lanes: dict[str, set[int]] = {}
    severities: dict[str, str] = {}
    for row in run.guardian.anomalies:  # a fault names its first twenty steps, these all
        lanes.setdefault(row.kind, set()).add(row.step)
    for fault in faults:
        lanes.setdefault(fault.kind, set()).update((*fault.steps, fault.last_step))
        worst = max(fault.severity, severities.get(fault.kind, "info"), key=SEVERITIES.index)
        severities[fault.kind] = worst
    rgb = plots.fault_timeline(lanes, run.history.counts, severities, step)
    run.recorder.image("faults/timeline", rgb, step)
    run.recorder.save_image(TIMELINE, rgb)
    run.recorder.text("faults/history", history.fault_table(faults), step)
