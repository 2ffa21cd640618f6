"""Schedule the jobs of a sweep: several at a time, with retries and progress lines."""

from __future__ import annotations

import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from runner.core.device.signals import InterruptHandler
from runner.core.errors import CheckpointError, Interrupted, ProcessLost, StorageError
from runner.core.format import count_noun
from runner.core.record.storage import make_folder
from runner.core.record.summary import FINISHED_STATUSES, Summary
from runner.core.record.text import shorten
from runner.core.schemas.sweep import LauncherConfig
from runner.scale.sweep.job_process import GRACE_S, JobProcess
from runner.scale.sweep.plan import JobPlan, archive_job, can_continue
from runner.scale.sweep.state import RUNNING, SKIPPED, Job, Sweep, shared_overrides, utc_now

log = logging.getLogger("runner")

POLL_S = 0.1  # of the processes
SERVER_LOSSES = 3  # of the fork server, after each of which a job is tried again
CHECKPOINT_ERROR = CheckpointError.exit_code
RETRIED_STATUSES = ("failed", "killed", "timeout", "oom")  # if `retries` allows
PROGRESS_S = 30.0  # between progress lines
LONGEST_LINE = 60  # characters of a job's own line in one of them


class JobSource(Protocol):
    """A source of jobs; each is planned on demand, so it may depend on earlier results."""

    def next_job(self) -> JobPlan | None:
        """Return the next job, which may be done already; None if there is none (yet)."""

    def on_poll(self, plan: JobPlan) -> None:
        """Called repeatedly while the job runs."""

    def on_end(self, plan: JobPlan) -> None:
        """Called when a job has finally ended; may change its status and reason."""

    def take_remaining(self) -> Sequence[Job]:
        """Return the requested jobs that will not run, for the record."""


class Schedule:
    """Runs planned jobs; each change is written to `sweep.json` immediately."""

    def __init__(
        self,
        sweep: Sweep,
        folder: Path,
        settings: LauncherConfig,
        start: Callable[[JobPlan], JobProcess],
        source: JobSource,
    ) -> None:
        self.sweep, self.folder, self.settings = sweep, folder, settings
        self.start, self.source = start, source
        self.retrying: deque[JobPlan] = deque()
        self.running: list[tuple[JobPlan, JobProcess]] = []
        self.retry_counts: dict[int, int] = {}
        self.lost_counts: dict[int, int] = {}  # tries of a job whose fork server was lost
        self.stopped: set[int] = set()  # numbers of jobs reported as stopped
        self.shared = shared_overrides(folder / "job")
        self.stop_reason = ""  # why no more jobs start
        self.last_progress = time.monotonic()  # time of the last progress lines

    def run(self) -> None:
        """Run until every job has ended. Raises Interrupted after Ctrl-C, SIGTERM or SIGHUP: the
        first signal asks the jobs to save a checkpoint and end, the second kills them.
        """
        with InterruptHandler() as interrupts:
            try:
                while True:
                    if interrupts.received is not None and not self.stop_reason:
                        self._interrupt_jobs(interrupts.received)
                    may_start_more = self._start_next()
                    if not self.running and not may_start_more:
                        break
                    self._poll_jobs()
                    if not may_start_more:
                        time.sleep(POLL_S)
            except KeyboardInterrupt:  # the second one
                self.stop_reason = self.stop_reason or "the sweep was interrupted"
                for _, process in self.running:
                    process.requested_status = "interrupted"
                    process.requested_reason = "ended at once by a second signal"
            finally:
                for plan, process in self.running:
                    self._record_end(plan, process, may_retry=False)
                for job in self.source.take_remaining():
                    job.status = SKIPPED
                    job.reason = self.stop_reason or "the sweep ended before it"
                self.sweep.ended = utc_now()
                self.sweep.write(self.folder)
            if interrupts.received is not None:
                more = "; the same command again continues this sweep"
                raise Interrupted(interrupts.received, more)

    def _start_next(self) -> bool:
        """Start one job if there is room; returns whether another may follow immediately."""
        if self.stop_reason or len(self.running) >= self.settings.jobs:
            return False
        plan = self.retrying.popleft() if self.retrying else self.source.next_job()
        if plan is not None and not plan.done:
            self._start_job(plan)
        return plan is not None

    def _start_job(self, plan: JobPlan) -> None:
        job, error_text, process = plan.job, plan.error, None
        try:
            if plan.replaces:
                archive_job(self.folder, job.folder)
            process = None if error_text else self.start(plan)
        except (OSError, ProcessLost) as error:
            error_text = f"could not be started: {error}"
            if isinstance(error, ProcessLost) and self._may_repeat(job):
                log.warning("%s: %s; tried again", job.title, error)
                self.retrying.appendleft(plan)
                return
        if process is None:
            job.status, job.reason, job.ended = "failed", error_text, utc_now()
            self._report_end(plan, 0.0)
            return
        job.status, job.reason, job.ended, job.exit_code = RUNNING, "", "", None
        job.started, job.tries = job.started or utc_now(), job.tries + 1
        self.running.append((plan, process))
        self.sweep.write(self.folder)
        again = f", try {job.tries}" if job.tries > 1 else ""
        again += ", from its checkpoint" if plan.continues else ""
        again += f", on {job.device}" if job.device else ""
        log.info("%s: started%s", job.short_title(self.shared), again)

    def _may_repeat(self, job: Job) -> bool:
        """Count a try whose fork server was lost; whether the job is tried again."""
        count = self.lost_counts[job.number] = self.lost_counts.get(job.number, 0) + 1
        return count <= SERVER_LOSSES and not self.stop_reason

    def _poll_jobs(self) -> None:
        if is_due := time.monotonic() - self.last_progress >= PROGRESS_S:
            self.last_progress = time.monotonic()
        for plan, process in list(self.running):
            if process.has_ended():
                self.running.remove((plan, process))
                self._record_end(plan, process, may_retry=not self.stop_reason)
                continue
            self.source.on_poll(plan)
            notice, number = process.stop_notice(), plan.job.number
            if notice and number not in self.stopped:  # once
                log.warning("%s: %s", plan.job.title, notice)
            (self.stopped.add if notice else self.stopped.discard)(number)
            if is_due:
                line = shorten(process.last_line() or "starting", LONGEST_LINE)
                log.info("%s: %s", plan.job.short_title(self.shared), line)

    def _record_end(self, plan: JobPlan, process: JobProcess, may_retry: bool) -> None:
        """Record how a process ended, and queue the job again if it is to be retried."""
        process.close()
        job = plan.job
        job.exit_code = process.process.exit_code
        job.status, job.reason = process.end_status()
        job.seconds, job.ended = job.seconds + process.seconds, utc_now()
        invalid = plan.continues and job.exit_code == CHECKPOINT_ERROR and not process.wrote_summary
        retries_used = self.retry_counts.get(job.number, 0)
        lost = process.process.has_lost_server() and self._may_repeat(job)
        retry_left = invalid or lost or retries_used < self.settings.retries
        retries = may_retry and job.status in RETRIED_STATUSES and retry_left
        if retries:  # an invalid checkpoint would fail each time
            self.retry_counts[job.number] = retries_used + (not (invalid or lost))
            plan.continues = not invalid and can_continue(plan, self.folder / job.folder)
            plan.replaces = not plan.continues
            self.retrying.appendleft(plan)
        self._report_end(plan, process.seconds, retries)

    def _report_end(self, plan: JobPlan, seconds: float, retries: bool = False) -> None:
        job = plan.job
        if not retries:
            self.source.on_end(plan)
        write_failed_summary(self.folder / job.folder, job.status, job.reason, job.command)
        self.sweep.write(self.folder)
        title = job.title if job.failed else job.short_title(self.shared)
        line = f"{title}: {job.status} in {seconds:.1f} s"
        line += (f": {job.reason}" if job.reason else "") + ("; tried again" if retries else "")
        log.log(logging.INFO if job.status in FINISHED_STATUSES else logging.ERROR, "%s", line)
        if job.failed and not retries and self.settings.fail_fast and not self.stop_reason:
            self.stop_reason = f"fail_fast: #{job.number} {job.status}"
            for _, process in self.running:
                process.request_end(signal.SIGTERM, "interrupted", self.stop_reason, GRACE_S)

    def _interrupt_jobs(self, number: int) -> None:
        self.stop_reason, jobs = "the sweep was interrupted", count_noun(len(self.running), "job")
        log.warning("stopping %s; interrupt again to kill at once", jobs)
        # after Ctrl-C a person can press it again; other senders of signals cannot
        grace_s = float("inf") if number == signal.SIGINT else GRACE_S
        for _, process in self.running:
            process.request_end(number, "interrupted", self.stop_reason, grace_s)


def write_failed_summary(folder: Path, status: str, reason: str, command: str) -> None:
    """Set in the job's `summary.json` how it ended, if the job could not."""
    try:
        make_folder(folder)
        summary = Summary(command=command)
        with suppress(StorageError):
            summary = Summary.read(folder)
        if (summary.status, summary.reason) != (status, reason):
            summary.set_end(status, reason)
            summary.write(folder)
    except (OSError, StorageError) as error:
        log.warning("%s: the job's end is in sweep.json only: %s", folder, error)
