"""How a run is coming along, for the person who is waiting for it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from runner.record.config import MonitoringConfig
from runner.record.console import console
from runner.record.text import escape_control_chars
from runner.training.hook import Evaluation, Hook, Report
from runner.training.run import Run

log = logging.getLogger("runner")

REFRESH_S = 0.25


class Progress(Hook):
    """On a terminal a live display of two lines; elsewhere a plain line now and then.

    The plain lines go to `run.log` in either case.
    """

    def __init__(self, config: MonitoringConfig) -> None:
        self.config = config
        self.live: Live | None = None
        self.started = self.refreshed = self.told = 0.0
        self.first_step = 0
        self.settled = (0.0, 0)  # when the first stretch was over, and its last step
        self.result = ""  # of the last validation

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Show while the run goes on; leave the terminal as it was."""
        self.started = self.told = time.monotonic()
        self.first_step = run.progress.step
        screen = console()
        if screen.is_terminal and not screen.is_dumb_terminal:
            self._start(Live(console=screen, auto_refresh=False, transient=True))
        try:
            yield
        finally:
            self._stop()

    def on_report(self, run: Run, report: Report) -> None:
        """Refresh the display, or say a line, if it is time."""
        now = time.monotonic()
        if self.settled[1] == 0:
            self.settled = (now, report.last)
        if self.live is not None and now - self.refreshed >= REFRESH_S:
            self.refreshed = now
            self._draw(run, report)
        if now - self.told >= self.config.line_every_s:
            self.told = now
            done = f"step {report.last:,}/{run.total_steps:,} ({report.last / run.total_steps:.0%})"
            facts = [done, *self._facts(run, report), f"{self._left(run, report)} left"]
            log.info("%s", " · ".join(facts), extra={"live": self.live is not None})

    def on_validation(self, run: Run, evaluation: Evaluation) -> None:
        """Say what came out."""
        metrics = {name.removeprefix("val/"): value for name, value in evaluation.metrics.items()}
        monitored = run.monitor.removeprefix("val/")
        first = [name for name in metrics if "/" not in name and name != monitored][:2]
        names = [monitored, *first] if monitored in metrics else first
        shown = [f"{name} {_short(metrics[name])}" for name in names]
        best = " (best)" if evaluation.improved else ""
        log.info(
            "step %s: validation %s%s",
            f"{evaluation.step:,}",
            ", ".join(shown),
            best,
            extra={"live": self.live is not None},
        )
        if monitored in metrics:
            self.result = f"{run.monitor} {_short(metrics[monitored])}{best}"

    def _facts(self, run: Run, report: Report) -> list[str]:
        """Loss, rate and speed of the stretch."""
        finite = [loss for loss in report.loss if math.isfinite(loss)]
        loss = f"{sum(finite) / len(finite):.4f}" if finite else "not finite"
        facts = [f"loss {loss}", f"lr {report.lr:.2e}"]
        if report.seconds > 0:
            rate = report.samples / report.seconds
            unit = "samples"
            if run.objective.unit == "tokens" and run.sizes.sequence:
                rate, unit = rate * run.sizes.sequence, "tokens"
            facts += [_per_step(report.seconds / len(report.loss)), f"{rate:,.0f} {unit}/s"]
        if run.progress.skipped:
            facts.append(f"{run.progress.skipped} skipped")
        return facts

    def _left(self, run: Run, report: Report) -> str:
        """Time to the end, at the pace so far, validation and checkpoints included.

        Without the first stretch as soon as there is another: something may be compiled in it.
        """
        now = time.monotonic()
        first = self.settled[1] == report.last
        since, step = (self.started, 0) if first else self.settled
        done = report.last - max(step, self.first_step)
        if done <= 0 or (first and (run.whole is not None or run.compilation is not None)):
            return "?"
        return _clock((now - since) / done * (run.total_steps - report.last))

    def _draw(self, run: Run, report: Report) -> None:
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True)
        epoch = f"epoch {report.last / run.train.steps_per_epoch:.1f}"
        left = f"{self._left(run, report)} left"
        counts = f"{report.last:,}/{run.total_steps:,} · {epoch} · {left}"
        head.add_row(
            ProgressBar(run.total_steps, report.last),
            Text(counts, no_wrap=True, overflow="ellipsis"),
        )
        facts = Text(" · ".join(self._facts(run, report)), no_wrap=True, overflow="ellipsis")
        lines: list[RenderableType] = [head, facts]
        if self.result:
            lines.append(
                Text(
                    escape_control_chars(self.result),
                    style="green",
                    no_wrap=True,
                    overflow="ellipsis",
                )
            )
        if self.live is not None:
            try:
                self.live.update(Group(*lines), refresh=True)
            except (OSError, ValueError):  # the terminal has gone; the run goes on
                self._stop()

    def _start(self, live: Live) -> None:
        try:
            live.start()
        except (OSError, ValueError) as error:
            log.debug("no live display: %s", error)
        else:
            self.live = live

    def _stop(self) -> None:
        live, self.live = self.live, None
        if live is not None:
            try:
                live.stop()
            except (OSError, ValueError) as error:
                log.debug("the terminal has gone: %s", error)


def _per_step(seconds: float) -> str:
    return f"{seconds:.3g} s/step" if seconds >= 1 else f"{seconds * 1e3:.3g} ms/step"


def _short(value: float) -> str:
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.3g}"


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
