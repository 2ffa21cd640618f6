"""Display of a run's progress, on the terminal and in the log."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from runner.core.format import metric
from runner.core.interfaces.hook import Evaluation, Hook, Report
from runner.core.interfaces.run import Run
from runner.core.record.console import console, supports_live_display
from runner.core.schemas.monitoring import MonitoringConfig

if TYPE_CHECKING:
    from rich.live import Live

log = logging.getLogger("runner")

REFRESH_S = 0.25


class ProgressDisplay(Hook):
    """A live display on a terminal, and periodic plain lines elsewhere and in `run.log`."""

    monitors = True

    def __init__(self, config: MonitoringConfig) -> None:
        self.config = config
        self.live: Live | None = None
        self.last_refresh = self.last_line = 0.0
        self.pace_start = (0.0, 0)  # time and step from which the pace is measured
        self.is_first_report = True  # it may include compiling
        self.validation_text = ""  # of the last validation

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Show the live display until the run ends, then remove it."""
        self.last_line = time.monotonic()
        self.pace_start = (self.last_line, run.progress.step)
        screen = console()
        if supports_live_display(screen):
            from rich.live import Live

            live = Live(console=screen, auto_refresh=False, transient=True)
            with suppress(OSError, ValueError):  # the terminal has gone
                live.start()
                self.live = live
        try:
            yield
        finally:
            self._stop()

    def on_report(self, run: Run, report: Report) -> None:
        """Refresh the display and log a line when each is due."""
        now, left = time.monotonic(), self._time_left(run, report)
        if self.live is not None and now - self.last_refresh >= REFRESH_S:
            self.last_refresh = now
            from runner.core.hooks.live_display import draw  # imported only on a terminal

            epoch = f"epoch {run.train.epochs_before(report.last):.1f}"
            counts = f"{report.last:,}/{run.total_steps:,} · {epoch} · {left} left"
            texts = " · ".join(_report_texts(run, report)), self.validation_text
            try:
                draw(self.live, (run.total_steps, report.last), counts, texts)
            except (OSError, ValueError):  # the terminal has gone; the run continues
                self._stop()
        if now - self.last_line >= self.config.line_every_s:
            self.last_line = now
            share = f"({report.last / run.total_steps:.0%})"
            position = f"step {report.last:,}/{run.total_steps:,} {share}"
            line = " · ".join([position, *_report_texts(run, report), f"{left} left"])
            log.info("%s", line, extra={"live": self.live is not None})

    def on_validation(self, run: Run, evaluation: Evaluation) -> None:
        """Log the metrics, the monitored one first."""
        metrics = {name.removeprefix("val/"): value for name, value in evaluation.metrics.items()}
        monitored = run.monitor.removeprefix("val/")
        others = [name for name in metrics if "/" not in name and name != monitored][:2]
        names = [monitored, *others] if monitored in metrics else others
        values = ", ".join(f"{name} {metric(metrics[name])}" for name in names)
        best = " (best)" if evaluation.improved else ""
        text = f"step {evaluation.step:,}: validation {values}{best}"
        log.info("%s", text, extra={"live": self.live is not None})
        if monitored in metrics:
            self.validation_text = f"{run.monitor} {metric(metrics[monitored])}{best}"

    def _time_left(self, run: Run, report: Report) -> str:
        """Return the time left at the pace so far, including validation and checkpoints.

        The first report counts only until the second; "?" after it if the run compiles.
        """
        now, (start, step) = time.monotonic(), self.pace_start
        seconds = (now - start) / max(1, report.last - step) * (run.total_steps - report.last)
        if self.is_first_report:
            self.is_first_report, self.pace_start = False, (now, report.last)
            if run.step_graph is not None or run.compilation is not None:
                return "?"
        return str(timedelta(seconds=round(seconds))).removeprefix("0:").removeprefix("0")

    def _stop(self) -> None:
        live, self.live = self.live, None
        if live is not None:
            with suppress(OSError, ValueError):  # the terminal has gone
                live.stop()


def _report_texts(run: Run, report: Report) -> list[str]:
    """Return loss, learning rate, speed and skipped steps of a report, as texts."""
    finite = [loss for loss in report.loss if math.isfinite(loss)]
    loss = f"{sum(finite) / len(finite):.4f}" if finite else "not finite"
    texts = [f"loss {loss}", f"lr {report.lr:.2e}"]
    if report.seconds > 0:
        tokens = run.sizes.sequence if run.objective.unit == "tokens" else None
        rate = report.samples / report.seconds * (tokens or 1)
        seconds = report.seconds / len(report.loss)
        step = f"{seconds:.3g} s/step" if seconds >= 1 else f"{seconds * 1e3:.3g} ms/step"
        texts += [step, f"{rate:,.0f} {'tokens' if tokens else 'samples'}/s"]
    return [*texts, f"{run.progress.skipped} skipped"] if run.progress.skipped else texts
