"""Run the jobs that Hydra names, and return their results."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from runner.core.errors import RunnerError, SecurityError, StorageError, SweepFailed
from runner.core.format import join_names
from runner.core.record.summary import FINISHED_STATUSES, Summary
from runner.core.schemas.sweep import JobSweeperConfig, LauncherConfig
from runner.core.security import secrets
from runner.scale.sweep.job_starter import open_sweep, plan_job
from runner.scale.sweep.plan import JobPlan, Planner
from runner.scale.sweep.schedule import Schedule
from runner.scale.sweep.state import Job, SweepSession

log = logging.getLogger("runner")


def launch_jobs(
    config: DictConfig,
    compose: Callable[[DictConfig, list[str]], DictConfig],
    settings: LauncherConfig,
    job_overrides: Sequence[Sequence[str]],
    first_number: int,
) -> list[JobReturn]:
    """Compose these jobs and run each in its own process, except those already done.

    Raises RunnerError and Hydra's errors if the first job cannot be composed; a later one has
    failed. Raises UsageError if another process writes to the sweep's folder, and Interrupted.
    """
    with open_sweep(config, settings) as starter:
        session, sweep = starter.session, starter.sweep
        log.info("%s: %d jobs", session.folder, len(job_overrides))
        taken_folders = [job.folder for job in sweep.jobs]  # by earlier batches of this sweep
        planner = Planner(session.folder, session.earlier_jobs, job_overrides, taken_folders)
        composed: list[tuple[JobPlan, DictConfig]] = []
        for number, overrides in enumerate(map(list, job_overrides), first_number):
            job_config = config
            try:
                job_config = compose(config, overrides)
                plan = plan_job(job_config, overrides, number)
            except (RunnerError, HydraException, OmegaConfBaseException) as error:
                if not composed or isinstance(error, SecurityError):
                    raise
                reason = secrets.mask_words(" ".join(str(error).split()))
                plan = JobPlan(Job(number, overrides, str(number)), error=reason)
            planner.match(plan)
            plan.job.command = starter.command(overrides)
            composed.append((plan, job_config))
        plans = [plan for plan, _ in composed]
        session.earlier_jobs = planner.unmatched
        sweep.jobs += [plan.job for plan in plans]
        _log_earlier_jobs(session, plans)
        try:
            Schedule(sweep, session.folder, settings, starter.start, PlannedJobs(plans)).run()
        finally:
            session.composed += [(plan.job, job_config) for plan, job_config in composed]
            session.has_run |= not all(plan.done for plan in plans)
    # our sweeper would stop at the first failure; other sweepers use failures as results
    tolerant = config.hydra.sweeper._target_ == JobSweeperConfig._target_
    return [_result(plan.job, session.folder, each, tolerant) for plan, each in composed]


class PlannedJobs:
    """Source of jobs for the schedule that do not depend on each other."""

    def __init__(self, plans: Sequence[JobPlan]) -> None:
        self._remaining = deque(plans)

    def next_job(self) -> JobPlan | None:
        """Return the next job; None at the end."""
        return self._remaining.popleft() if self._remaining else None

    def on_poll(self, _: JobPlan) -> None:
        """No-op, as `on_end`: no job depends on another's result."""

    on_end = on_poll

    def take_remaining(self) -> list[Job]:
        """Return the jobs that did not start; one that ended before the sweep is not among them."""
        return [plan.job for plan in self._remaining if not plan.job.ended]


def _log_earlier_jobs(session: SweepSession, plans: Sequence[JobPlan]) -> None:
    if session.earlier_jobs:
        names = ", ".join(job.folder for job in session.earlier_jobs)
        log.info("no longer part of the sweep, kept unchanged: %s", names)
    counts = Counter(" ".join(plan.job.overrides) for plan in plans)
    if doubled := [overrides for overrides, times in counts.items() if times > 1]:
        log.warning("typed more than once, and run as often: %s", join_names(doubled))
    total, done = len(plans), sum(plan.done for plan in plans)
    continued = sum(plan.continues for plan in plans)
    if done or continued:
        text = f"{done} of {total} done before; {total - done} to run"
        text += f", {continued} of them from a checkpoint" if continued else ""
        text += "" if done < total else " (sweep.resume=none starts a new one)"
        unstamped = sorted({path for plan in plans for path in plan.unstamped})
        text += f"; not compared, too large: {', '.join(unstamped)}" if unstamped else ""
        log.info("%s: %s", session.folder, text)


def _result(job: Job, folder: Path, config: DictConfig, tolerant: bool) -> JobReturn:
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
