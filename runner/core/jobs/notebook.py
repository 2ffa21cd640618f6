"""What a notebook's cell shows of a run and of its summary."""

from __future__ import annotations

from runner import rooms
from runner.core.interfaces.run import Run
from runner.core.jobs.run_report import RunSummaryTable
from runner.core.record.console import to_html
from runner.core.record.summary import Summary


def show_summary(summary: Summary) -> str:
    """Return the end table as HTML."""
    return to_html(RunSummaryTable(summary, None))


def show_run(run: Run) -> str | None:
    """Return the curves of a run's folder as SVG; None if there are none yet."""
    if run.folder is None:
        return None
    curves: str = rooms.find("comparison", "curves")(run.folder, run.monitor)
    return curves or None
