"""Run the jobs of a sweep: so many at a time, with retries, shown as they work."""

from __future__ import annotations

import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from runner.errors import CheckpointError, Interrupted, StorageError
from runner.overrides.groups import as_typed
from runner.record.console import console
from runner.record.text import escape_control_chars
from runner.sweep.child import GRACE_S, Child
from runner.sweep.config import LauncherConfig
from runner.sweep.plan import JobPlan, archive_job, can_continue
from runner.sweep.state import RUNNING, SKIPPED, WELL, Job, Sweep, now
from runner.training.signals import Interrupts
from runner.training.summary import Summary

log = logging.getLogger("runner")

POLL_S = 0.1  # between two looks at the processes
ONWARD = "the same command again goes on with this sweep"
UNUSABLE = CheckpointError.exit_code
AGAIN = ("failed", "killed", "timeout", "oom")  # worth another try, where one is asked for

Start = Callable[[JobPlan], Child]


class Schedule:
    """Runs what is planned; every change is in `sweep.json` at once."""

    def __init__(
        self, sweep: Sweep, folder: Path, settings: LauncherConfig, start: Start, display: Display
    ) -> None:
        self.sweep, self.folder, self.settings = sweep, folder, settings
        self.start, self.display = start, display
        self.waiting: deque[JobPlan] = deque()
        self.running: list[tuple[JobPlan, Child]] = []
        self.retried: dict[int, int] = {}
        self.over = ""  # why no further job is begun

    def run(self, planned: Sequence[JobPlan]) -> None:
        """Until every job has ended. Raises Interrupted after Ctrl-C, SIGTERM or SIGHUP: the first
        one asks the jobs to end, which leaves a checkpoint, a second one ends them at once.
        """
        self.waiting.extend(planned)
        with Interrupts() as interrupts, self.display:
            try:
                while self.running or (self.waiting and not self.over):
                    if interrupts.received is not None and not self.over:
                        self._interrupt(interrupts.received)
                    self._begin()
                    self._collect()
                    self.display.refresh([(p.job, child) for p, child in self.running])
                    time.sleep(POLL_S)
            except KeyboardInterrupt:  # the second one
                self.over = self.over or "the sweep was interrupted"
                for _, child in self.running:
                    child.wanted, child.why = "interrupted", "ended at once by a second signal"
            finally:
                for one, child in self.running:
                    child.kill()
                    child.process.wait()
                    self._settle(one, child, again=False)
                self._skip()
            if interrupts.received is not None:
                raise Interrupted(interrupts.received, f"; {ONWARD}")

    def _begin(self) -> None:
        while self.waiting and not self.over and len(self.running) < self.settings.jobs:
            one = self.waiting.popleft()
            job = one.job
            refused = one.wanted.error  # there can be no such job
            try:
                if one.replaces:
                    archive_job(self.folder, job.folder, weights=one.unusable)
                child = None if refused else self.start(one)
            except OSError as error:
                child, refused = None, f"it cannot be started: {error}"
            if child is None:
                job.status, job.reason, job.ended = "failed", refused, now()
                self._changed(one, 0.0)
                continue
            job.status, job.reason, job.ended, job.exit_code = RUNNING, "", "", None
            job.started = job.started or now()
            job.tries += 1
            self.running.append((one, child))
            self.sweep.write(self.folder)
            self.display.began(job, one.continues)

    def _collect(self) -> None:
        for one, child in list(self.running):
            if child.has_ended():
                self.running.remove((one, child))
                self._settle(one, child, again=not self.over)

    def _settle(self, one: JobPlan, child: Child, again: bool) -> None:
        """Note what became of a process, and put the job back if it is to be tried again."""
        child.close()
        job = one.job
        job.exit_code = child.process.returncode
        job.status, job.reason = child.ending()
        job.seconds, job.ended = job.seconds + child.seconds, now()
        useless = one.continues and job.exit_code == UNUSABLE and not child.left_a_record
        again = again and job.status in AGAIN
        retries = again and self.retried.get(job.number, 0) < self.settings.retries
        if again and useless:  # so it would end again each time
            one.continues, one.replaces, one.unusable = False, True, True
            retries = True
            self.waiting.appendleft(one)
        elif retries:
            self.retried[job.number] = self.retried.get(job.number, 0) + 1
            one.continues = can_continue(one.wanted, self.folder / job.folder)
            one.replaces = not one.continues
            self.waiting.appendleft(one)
        self._changed(one, child.seconds, retries)

    def _changed(self, one: JobPlan, seconds: float, retries: bool = False) -> None:
        job = one.job
        write_failed_summary(self.folder / job.folder, job.status, job.reason, job.command)
        self.sweep.write(self.folder)
        self.display.ended(job, seconds, retries)
        if job.failed and not retries and self.settings.fail_fast and not self.over:
            self.over = f"fail_fast: #{job.number} {job.status}"
            for _, child in self.running:
                child.ask(signal.SIGTERM, "interrupted", self.over, GRACE_S)

    def _interrupt(self, number: int) -> None:
        self.over = "the sweep was interrupted"
        log.warning("ending %d jobs; once more to end them at once", len(self.running))
        # after Ctrl-C somebody is there to press it once more; whoever sends another waits in vain
        grace_s = float("inf") if number == signal.SIGINT else GRACE_S
        for _, child in self.running:
            child.ask(number, "interrupted", self.over, grace_s)

    def _skip(self) -> None:
        for one in self.waiting:
            if not one.job.ended:
                one.job.status, one.job.reason = SKIPPED, self.over or "the sweep ended before it"
        self.sweep.ended = now()
        self.sweep.write(self.folder)


def write_failed_summary(folder: Path, status: str, reason: str, command: str) -> None:
    """Make the job's `summary.json` say how it ended, where it could not itself."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            before = Summary.read(folder)
        except StorageError:
            before = Summary(command=command)
        if (before.status, before.reason) != (status, reason):
            replace(before, status=status, reason=reason).write(folder)
    except (OSError, StorageError) as error:
        log.warning("%s: what became of the job is in sweep.json only: %s", folder, error)


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
            level,
            "%s: %s in %.1f s%s%s",
            self.names[job.number],
            job.status,
            seconds,
            reason,
            again,
        )

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
