"""Run the jobs that Hydra names, and return their results.

Jobs are composed one at a time (0.3 s each), so that the first one starts without delay.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.core.errors import RunnerError, SecurityError, StorageError, SweepFailed
from runner.core.record.summary import FINISHED_STATUSES, Summary
from runner.core.schemas.sweep import JobSweeperConfig, LauncherConfig
from runner.core.security import secrets
from runner.scale.sweep.job_starter import JobStarter, open_sweep, plan_job
from runner.scale.sweep.plan import JobPlan, Planner
from runner.scale.sweep.schedule import Schedule
from runner.scale.sweep.state import Job

log = logging.getLogger("runner")


def launch_jobs(
    config: DictConfig,
    compose: Callable[[DictConfig, list[str]], DictConfig],
    settings: LauncherConfig,
    job_overrides: Sequence[Sequence[str]],
    first_number: int,
) -> list[JobReturn]:
    """Run these jobs, each in its own process, except those already done.

    Raises UsageError if another process writes to the sweep's folder, and Interrupted.
    """
    with open_sweep(config, settings) as starter:
        folder = starter.session.folder
        jobs = JobStream(starter, config, compose, job_overrides, first_number)
        try:
            Schedule(starter.sweep, folder, settings, starter.start, jobs).run()
        finally:
            starter.session.composed += [(plan.job, job) for plan, job in jobs.composed]
            starter.session.has_run |= any(not plan.done for plan, _ in jobs.composed)
    # our sweeper would stop at the first failure; other sweepers use failures as results
    tolerant = config.hydra.sweeper._target_ == JobSweeperConfig._target_
    return [_result(plan.job, folder, job_config, tolerant) for plan, job_config in jobs.composed]


class JobStream:
    """Source of jobs for the schedule; composes one job ahead.

    Raises RunnerError and Hydra's errors if the first job cannot be composed; a later one counts as
    failed.
    """

    def __init__(
        self,
        starter: JobStarter,
        config: DictConfig,
        compose: Callable[[DictConfig, list[str]], DictConfig],
        job_overrides: Sequence[Sequence[str]],
        first_number: int,
    ) -> None:
        self.starter, self.session, self.sweep = starter, starter.session, starter.sweep
        self.config, self._compose_config = config, compose
        self.composed: list[tuple[JobPlan, DictConfig]] = []
        self._remaining = deque(enumerate(map(list, job_overrides), first_number))
        self._batches = [*self.sweep.jobs]  # earlier batches of this sweep
        taken_folders = [job.folder for job in self._batches]
        self.planner = Planner(
            self.session.folder, self.session.earlier_jobs, job_overrides, taken_folders
        )
        self._composed_ahead = deque[JobPlan]()
        log.info("%s: %d jobs", self.session.folder, len(job_overrides))
        if not _numbers_folders(config):  # invalid folders are reported before any job starts
            while (plan := self._compose_next()) is not None:
                self._composed_ahead.append(plan)

    def next_job(self) -> JobPlan | None:
        """Return the next job; None at the end."""
        return self._composed_ahead.popleft() if self._composed_ahead else self._compose_next()

    def on_poll(self, _: JobPlan) -> None:
        """Compose the next job while others run."""
        if not self._composed_ahead and (plan := self._compose_next()) is not None:
            self._composed_ahead.append(plan)

    def on_end(self, _: JobPlan) -> None:
        """No-op: no job depends on another's result."""

    def take_remaining(self) -> list[Job]:
        """Return the remaining jobs; one that an earlier process started keeps its folder."""
        remaining_jobs = [plan.job for plan in self._composed_ahead if not plan.job.ended]
        while self._remaining:
            number, overrides = self._remaining.popleft()
            job = self.planner.take_match(overrides)
            if job is None:
                job = Job(number, overrides, self.planner.reserve_folder(str(number)))
                remaining_jobs.append(job)
            self._add(JobPlan(job), self.config)
        self._record()
        return remaining_jobs

    def _compose_next(self) -> JobPlan | None:
        if not self._remaining:
            return None
        number, overrides = self._remaining.popleft()
        config = self.config
        try:
            config = self._compose_config(self.config, overrides)
            plan = plan_job(config, overrides, number)
        except (RunnerError, HydraException, OmegaConfBaseException) as error:
            if not self.composed or isinstance(error, SecurityError):
                raise
            reason = secrets.mask_words(" ".join(str(error).split()))
            plan = JobPlan(Job(number, overrides, str(number)), error=reason)
        self.planner.match(plan)
        if not plan.done:
            self.starter.start_fork_server()
        self._add(plan, config)
        if not self._remaining:
            self._log_earlier_jobs()
        self._record()
        return plan

    def _add(self, plan: JobPlan, config: DictConfig) -> None:
        plan.job.command = self.starter.command(plan.job.overrides)
        self.composed.append((plan, config))

    def _record(self) -> None:
        """Update the sweep's record: planned jobs, and earlier ones not yet matched."""
        planned = [plan.job for plan, _ in self.composed]
        unmatched = self.planner.unmatched if self._remaining else []
        self.sweep.jobs = [*self._batches, *planned, *unmatched]

    def _log_earlier_jobs(self) -> None:
        """Log what earlier processes did, after all jobs are planned."""
        self.session.earlier_jobs = self.planner.unmatched
        if self.planner.unmatched:
            names = ", ".join(job.folder for job in self.planner.unmatched)
            log.info("no longer part of the sweep, kept unchanged: %s", names)
        total, done = len(self.composed), sum(plan.done for plan, _ in self.composed)
        continued = sum(plan.continues for plan, _ in self.composed)
        if done or continued:
            text = f"{done} of {total} done before; {total - done} to run"
            text += f", {continued} of them from a checkpoint" if continued else ""
            text += "" if done < total else " (sweep.resume=none starts a new one)"
            unstamped = sorted({path for plan, _ in self.composed for path in plan.unstamped})
            text += f"; not compared, too large: {', '.join(unstamped)}" if unstamped else ""
            log.info("%s: %s", self.session.folder, text)


def _numbers_folders(config: DictConfig) -> bool:
    """Whether the jobs' folders depend only on their numbers."""
    sweep: Any = OmegaConf.to_container(config.hydra.sweep, resolve=False)
    return "${" not in re.sub(r"\$\{hydra\.job\.(num|id)\}", "", str(sweep["subdir"]))


def _result(job: Job, folder: Path, config: DictConfig, tolerant: bool) -> JobReturn:
    """Return the result for the sweeper: the run's monitored value."""
    run_folder = folder / job.folder
    result = JobReturn(job.overrides, config, working_dir=str(run_folder), task_name="runner")
    result.status, result.return_value = JobStatus.COMPLETED, None
    if job.status in FINISHED_STATUSES:
        with suppress(StorageError):
            result.return_value = Summary.read(run_folder).monitored
    elif not tolerant:
        result.status = JobStatus.FAILED
        result.return_value = SweepFailed(f"{job.title}: {job.status}: {job.reason}")
    return result
