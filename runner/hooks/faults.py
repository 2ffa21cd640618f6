"""What went wrong, where people look: debug/history.json while it happens, pictures at the end."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from runner.record import history
from runner.record.config import TableKind
from runner.record.export import export
from runner.training.hook import Hook, Report
from runner.training.run import Run

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger("runner")

WRITE_S = 1.0  # between two writings of history.json
POINTS = 512  # of the picture of gradient norms; more could not be seen
PLOTS = "debug/plots"
SEVERITIES = ("info", "warning", "error")


class Faults(Hook):
    """Keeps debug/history.json up to date; shows it in TensorBoard when the run ends.

    Entered before the tools and left after them, so that `tables` hold what they have written. With
    `empty`, a run without a fault leaves history.json and anomalies.json that say so.
    """

    def __init__(self, tables: Sequence[TableKind] = (), empty: bool = False) -> None:
        self.tables, self.empty = tables, empty
        self.written = 0.0
        self.stretches: list[tuple[int, float, float]] = []  # last step; median and largest norm
        self.bad: list[int] = []

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
                self._show(run)
            except (OSError, ValueError, ArithmeticError) as error:
                log.warning("no pictures of the faults: %s", error)
            if run.folder is not None:
                export(run.folder, self.tables)

    def on_report(self, run: Run, report: Report) -> None:
        """Take the norms along; 5 µs."""
        finite = [norm for norm in report.grad_norm if math.isfinite(norm)]
        if finite:
            self.stretches.append((report.last, statistics.median(finite), max(finite)))
        if len(finite) < len(report.grad_norm) and len(self.bad) < POINTS:
            self.bad += [
                report.first + i for i, x in enumerate(report.grad_norm) if not math.isfinite(x)
            ]
        if len(self.stretches) > 2 * POINTS:  # thinned, not cut off
            self.stretches = _thinned(self.stretches)
        now = time.monotonic()
        if now - self.written > WRITE_S:
            self.written = now
            run.history.write()

    def _show(self, run: Run) -> None:
        if run.folder is None or not run.history.faults:
            return
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
        counts = run.history.counts
        self._picture(run, "timeline", plots.fault_timeline(lanes, counts, severities, step))
        self._picture(run, "distribution", plots.fault_counts(counts, severities, step))
        if len(self.stretches) > 1:
            steps, typical, largest = zip(*self.stretches, strict=True)
            picture = plots.grad_norms(steps, typical, largest, self.bad)
            self._picture(run, "gradient_norm", picture)
        run.recorder.text("faults/history", history.fault_table(faults), step)

    def _picture(self, run: Run, name: str, rgb: NDArray[np.uint8]) -> None:
        run.recorder.image(f"faults/{name}", rgb, run.progress.step)
        run.recorder.save_image(f"{PLOTS}/{name}.png", rgb)


def _thinned(rows: list[tuple[int, float, float]]) -> list[tuple[int, float, float]]:
    """Half as many stretches, each as long as two."""
    pairs = zip(rows[::2], rows[1::2], strict=False)
    return [(b[0], (a[1] * b[1]) ** 0.5, max(a[2], b[2])) for a, b in pairs]
