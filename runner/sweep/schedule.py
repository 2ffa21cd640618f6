"""Schedule the jobs of a sweep: several at a time, with retries and progress lines."""

from __future__ import annotations

import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from runner.errors import CheckpointError, Interrupted, StorageError
from runner.sweep.child import GRACE_S, Child
from runner.sweep.config import LauncherConfig
from runner.sweep.plan import JobPlan, archive_job, can_continue
from runner.sweep.state import RUNNING, SKIPPED, WELL, Job, Sweep, now
from runner.training.signals import Interrupts
from runner.training.summary import Summary

log = logging.getLogger("runner")

POLL_S = 0.1  # of the processes
UNUSABLE = CheckpointError.exit_code
RETRIED = ("failed", "killed", "timeout", "oom")  # if `retries` allows
LINE_S = 30.0  # between progress lines


class JobSource(Protocol):
    """A source of jobs; each is planned on demand, so it may depend on earlier results."""

    def next_job(self) -> JobPlan | None:
        """Return the next job, which may be done already; None if there is none (yet)."""

    def watch(self, plan: JobPlan) -> None:
        """Called repeatedly while the job runs."""

    def settle(self, plan: JobPlan) -> None:
        """Called when a job has finally ended; may change its status and reason."""

    def skip(self) -> Sequence[Job]:
        """Return the requested jobs that will not run, for the record."""


class Schedule:
    """Runs planned jobs; each change is written to `sweep.json` immediately."""

    def __init__(
        self,
        sweep: Sweep,
        folder: Path,
        settings: LauncherConfig,
        start: Callable[[JobPlan], Child],
        source: JobSource,
    ) -> None:
        self.sweep, self.folder, self.settings = sweep, folder, settings
        self.start, self.source = start, source
        self.retrying: deque[JobPlan] = deque()
        self.running: list[tuple[JobPlan, Child]] = []
        self.retried: dict[int, int] = {}
        self.over = ""  # why no more jobs start
        self.logged = time.monotonic()  # time of the last progress lines

    def run(self) -> None:
        """Run until every job has ended. Raises Interrupted after Ctrl-C, SIGTERM or SIGHUP: the
        first signal asks the jobs to save a checkpoint and end, the second kills them.
        """
        with Interrupts() as interrupts:
            try:
                while True:
                    if interrupts.received is not None and not self.over:
                        self._interrupt(interrupts.received)
                    further = self._begin()
                    if not self.running and not further:
                        break
                    self._collect()
                    if not further:
                        time.sleep(POLL_S)
            except KeyboardInterrupt:  # the second one
                self.over = self.over or "the sweep was interrupted"
                for _, child in self.running:
                    child.requested, child.why = "interrupted", "ended at once by a second signal"
            finally:
                for plan, child in self.running:
                    self._settle(plan, child, again=False)
                for job in self.source.skip():
                    job.status, job.reason = SKIPPED, self.over or "the sweep ended before it"
                self.sweep.ended = now()
                self.sweep.write(self.folder)
            if interrupts.received is not None:
                more = "; the same command again continues this sweep"
                raise Interrupted(interrupts.received, more)

    def _begin(self) -> bool:
        """Start one job if there is room; returns whether another may follow immediately."""
        if self.over or len(self.running) >= self.settings.jobs:
            return False
        plan = self.retrying.popleft() if self.retrying else self.source.next_job()
        if plan is not None and not plan.done:
            self._start(plan)
        return plan is not None

    def _start(self, plan: JobPlan) -> None:
        job, refused, child = plan.job, plan.error, None
        try:
            if plan.replaces:
                archive_job(self.folder, job.folder)
            child = None if refused else self.start(plan)
        except OSError as error:
            refused = f"could not be started: {error}"
        if child is None:
            job.status, job.reason, job.ended = "failed", refused, now()
            self._report(plan, 0.0)
            return
        job.status, job.reason, job.ended, job.exit_code = RUNNING, "", "", None
        job.started, job.tries = job.started or now(), job.tries + 1
        self.running.append((plan, child))
        self.sweep.write(self.folder)
        again = f", try {job.tries}" if job.tries > 1 else ""
        again += ", from its checkpoint" if plan.continues else ""
        log.info("%s: started%s", job.title, again)

    def _collect(self) -> None:
        if due := time.monotonic() - self.logged >= LINE_S:
            self.logged = time.monotonic()
        for plan, child in list(self.running):
            if child.has_ended():
                self.running.remove((plan, child))
                self._settle(plan, child, again=not self.over)
                continue
            self.source.watch(plan)
            if due:
                log.info("%s: %s", plan.job.title, child.last_line() or "starting")

    def _settle(self, plan: JobPlan, child: Child, again: bool) -> None:
        """Record how a process ended, and queue the job again if it is to be retried."""
        child.close()
        job = plan.job
        job.exit_code = child.process.returncode
        job.status, job.reason = child.ending()
        job.seconds, job.ended = job.seconds + child.seconds, now()
        unusable = plan.continues and job.exit_code == UNUSABLE and not child.left_a_record
        used = self.retried.get(job.number, 0)
        retries = again and job.status in RETRIED and (unusable or used < self.settings.retries)
        if retries:  # an unusable checkpoint would fail each time
            self.retried[job.number] = used + (not unusable)
            plan.continues = not unusable and can_continue(plan, self.folder / job.folder)
            plan.replaces = not plan.continues
            self.retrying.appendleft(plan)
        self._report(plan, child.seconds, retries)

    def _report(self, plan: JobPlan, seconds: float, retries: bool = False) -> None:
        job = plan.job
        if not retries:
            self.source.settle(plan)
        write_failed_summary(self.folder / job.folder, job.status, job.reason, job.command)
        self.sweep.write(self.folder)
        line = f"{job.title}: {job.status} in {seconds:.1f} s"
        line += (f": {job.reason}" if job.reason else "") + ("; tried again" if retries else "")
        log.log(logging.INFO if job.status in WELL else logging.ERROR, "%s", line)
        if job.failed and not retries and self.settings.fail_fast and not self.over:
            self.over = f"fail_fast: #{job.number} {job.status}"
            for _, child in self.running:
                child.ask(signal.SIGTERM, "interrupted", self.over, GRACE_S)

    def _interrupt(self, number: int) -> None:
        self.over = "the sweep was interrupted"
        log.warning("stopping %d jobs; interrupt again to kill them", len(self.running))
        # after Ctrl-C a person can press it again; other senders of signals cannot
        grace_s = float("inf") if number == signal.SIGINT else GRACE_S
        for _, child in self.running:
            child.ask(number, "interrupted", self.over, grace_s)


def write_failed_summary(folder: Path, status: str, reason: str, command: str) -> None:
    """Set in the job's `summary.json` how it ended, if the job could not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        summary = Summary(command=command)
        with suppress(StorageError):
            summary = Summary.read(folder)
        if (summary.status, summary.reason) != (status, reason):
            replace(summary, status=status, reason=reason).write(folder)
    except (OSError, StorageError) as error:
        log.warning("%s: the job's end is in sweep.json only: %s", folder, error)
