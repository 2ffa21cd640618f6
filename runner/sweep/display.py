"""What is seen of a sweep while it works: on a terminal a row for each job that is running."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from runner.overrides.groups import as_typed
from runner.record.console import console
from runner.record.text import escape_control_chars
from runner.sweep.child import Child
from runner.sweep.record import WELL, Job

log = logging.getLogger("runner")

REFRESH_S = 0.5  # each time, the end of each log is read
LINE_S = 60.0  # between two lines about a job, where there is no terminal


class Display:
    """A line at the start and the end of each job; in between a live row of how far it has come on
    a terminal, elsewhere a line now and then.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.names = names(jobs)
        self.jobs = jobs
        self.live: Live | None = None
        self.refreshed = 0.0
        self.told: dict[int, float] = {}  # when a job was last spoken of, by its number

    def __enter__(self) -> Display:
        screen = console()
        if screen.is_terminal and not screen.is_dumb_terminal:
            live = Live(console=screen, auto_refresh=False, transient=True)
            try:
                live.start()
                self.live = live
            except (OSError, ValueError) as error:
                log.debug("no live display: %s", error)
        return self

    def __exit__(self, *exc: object) -> None:
        live, self.live = self.live, None
        if live is not None:
            try:
                live.stop()
            except (OSError, ValueError) as error:
                log.debug("the terminal has gone: %s", error)

    def began(self, job: Job, continues: bool) -> None:
        """Say that a job has begun."""
        again = f", try {job.tries}" if job.tries > 1 else ""
        onward = ", from its checkpoint" if continues else ""
        self.told[job.number] = time.monotonic()
        log.info("%s: begun%s%s", self.names[job.number], again, onward)

    def ended(self, job: Job, seconds: float, retries: bool) -> None:
        """Say what became of it."""
        again = "; tried again" if retries else ""
        reason = f": {job.reason}" if job.reason else ""
        level = logging.INFO if job.status in WELL else logging.ERROR
        log.log(
            level, "%s: %s in %.1f s%s%s", self.names[job.number], job.status, seconds, reason,
            again,
        )  # fmt: skip

    def refresh(self, running: Iterable[tuple[Job, Child]]) -> None:
        """Draw the rows anew, or say a line, if it is time."""
        now = time.monotonic()
        if self.live is None:
            for job, child in running:
                if now - self.told[job.number] >= LINE_S:
                    self.told[job.number] = now
                    log.info("%s: %s", self.names[job.number], child.at_work())
            return
        if now - self.refreshed < REFRESH_S:
            return
        self.refreshed = now
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True, overflow="ellipsis", max_width=40)
        table.add_column(justify="right", no_wrap=True, min_width=6)
        table.add_column(style="dim", no_wrap=True, overflow="ellipsis", ratio=1)
        for job, child in running:
            said = Text(escape_control_chars(child.at_work()), no_wrap=True, overflow="ellipsis")
            name = Text(
                escape_control_chars(self.names[job.number]), no_wrap=True, overflow="ellipsis"
            )
            table.add_row(name, f"{child.seconds:.0f} s", said)
        over = sum(bool(job.ended) for job in self.jobs)
        lines: list[RenderableType] = [table, Text(f"{over} of {len(self.jobs)} jobs ended")]
        try:
            self.live.update(Group(*lines), refresh=True)
        except (OSError, ValueError):  # the terminal has gone; the sweep goes on
            self.__exit__()


def names(jobs: Sequence[Job]) -> dict[int, str]:
    """Each job's number and what sets it apart from the others."""
    everywhere = set.intersection(*(set(job.overrides) for job in jobs)) if jobs else set()
    found = {}
    for job in jobs:
        own = [as_typed(text) for text in job.overrides if text not in everywhere]
        found[job.number] = " ".join([f"#{job.number}", *(own if len(jobs) > 1 else [])])
    return found
