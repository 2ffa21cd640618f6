"""From the jobs that Hydra names to their results."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from runner.checkpoint.lock import lock
from runner.composing import typed
from runner.config import flat
from runner.errors import RunnerError, StorageError, SweepFailed
from runner.jobs.config import JobKind
from runner.record.console import close_logging, set_up_logging
from runner.record.text import quote_for_hydra
from runner.security import secrets
from runner.security.config import SecurityLevel
from runner.security.paths import check_below, keep_private
from runner.sweep import command
from runner.sweep.child import Child
from runner.sweep.config import LauncherConfig
from runner.sweep.identity import job_hash
from runner.sweep.plan import JobPlan, JobSpec, load_previous_jobs, plan_jobs, wait_for_running_jobs
from runner.sweep.schedule import Display, Schedule
from runner.sweep.state import WELL, Session, Sweep, current_session, now
from runner.training.summary import Summary

log = logging.getLogger("runner")

TOLERANT = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
"""It would end the sweep at the first failure that it learns of; others learn from failures."""


def launch(
    config: DictConfig,
    compose: Callable[[DictConfig, list[str]], DictConfig],
    settings: LauncherConfig,
    job_overrides: Sequence[Sequence[str]],
    first: int,
) -> list[JobReturn]:
    """Run these jobs, each in a process of its own, but for those that are done already.

    Raises UsageError when another process writes into the sweep's folder, and Interrupted.
    """
    session = current_session()
    folder = session.folder
    folder.mkdir(parents=True, exist_ok=True)
    keep_private(folder, SecurityLevel[getattr(config.security.level, "name", "standard")])
    set_up_logging("info", None)
    try:
        with lock(folder):
            jobs = [
                (list(overrides), compose(config, list(overrides))) for overrides in job_overrides
            ]
            specs = [_spec(one, texts, first + i) for i, (texts, one) in enumerate(jobs)]
            plans = _plan(session, specs)
            # as typed: what stands for a secret, or for the job's number, is the job's to resolve
            hydras: Any = OmegaConf.to_container(config.hydra.overrides.hydra, resolve=False)
            _run(session, plans, settings, hydras)
    finally:
        close_logging()
    tolerant = config.hydra.sweeper._target_ == TOLERANT
    return [
        _result(plan, folder, composed, tolerant)
        for plan, (_, composed) in zip(plans, jobs, strict=True)
    ]


def _spec(config: DictConfig, overrides: list[str], number: int) -> JobSpec:
    """The job as its process will see it, or the reason why it would refuse it."""
    with open_dict(config):
        config.hydra.job.num = config.hydra.job.id = number
    subdir = str(secrets.place(config, "hydra.sweep.subdir"))
    check_below("hydra.sweep.subdir", subdir, current_session().folder)
    variables = config.hydra.job.env_set
    try:
        checked = typed(config.copy())
        environment = OmegaConf.to_container(variables, resolve=True)
    except (RunnerError, OmegaConfBaseException) as error:
        return JobSpec(number, overrides, subdir, error=secrets.named(str(error)))
    kind = checked.job.kind
    return JobSpec(
        number,
        overrides,
        subdir,
        job_hash(checked, environment),
        trains=kind is JobKind.train,
        records=kind in (JobKind.train, JobKind.evaluate),
        settings=flat(checked),
    )


def _plan(session: Session, specs: list[JobSpec]) -> list[JobPlan]:
    """What is left to do; recorded in the session's sweep, and logged."""
    sweep = session.sweep
    earlier = load_previous_jobs(session.folder) if sweep is None else session.earlier
    wait_for_running_jobs(session.folder, earlier)
    plans = plan_jobs(specs, earlier, session.folder)
    if sweep is None:
        sweep = session.sweep = Sweep(session.command, session.hash, started=now())
    mine = {plan.job.folder for plan in plans}
    session.earlier = [job for job in earlier if job.folder not in mine]
    sweep.jobs += [plan.job for plan in plans]
    done, onward = sum(plan.done for plan in plans), sum(plan.continues for plan in plans)
    if not done and not onward:
        log.info("%d jobs, in %s", len(plans), session.folder)
        return plans
    left = len(plans) - done
    text = f"{done} of {len(plans)} done before; {left} to run"
    text += f", {onward} of them from a checkpoint" if onward else ""
    text += "" if left else " (sweep.resume=none begins anew)"
    log.info("%s: %s", session.folder, text)
    return plans


def _run(
    session: Session, plans: list[JobPlan], settings: LauncherConfig, hydras: list[str]
) -> None:
    sweep, folder = session.sweep, session.folder
    if sweep is None:
        return
    specs = [plan.spec for plan in plans]
    values = command.domains([(spec.overrides, spec.settings) for spec in specs if spec.settings])

    def arguments(plan: JobPlan) -> list[str]:
        return command.job_arguments(session.flags, hydras, plan.spec.overrides)

    def start(plan: JobPlan) -> Child:
        place = folder / plan.job.folder
        key = "checkpoint.resume" if plan.continues else "hydra.run.dir"
        return Child.start(
            command.process_command(arguments(plan)),
            command.environment(settings.jobs),
            place,
            settings.timeout_s,
            [f"{key}={quote_for_hydra(str(place))}", *([values] if values else [])],
            plan.spec.records,
            chosen=not session.resumed,
        )

    for plan in plans:
        plan.job.command = shlex.join(["python", "-m", "runner", *arguments(plan)])
    sweep.write(folder)
    schedule = Schedule(sweep, folder, settings, start, Display(sweep.jobs))
    schedule.run([plan for plan in plans if not plan.done])


def _result(plan: JobPlan, folder: Path, config: DictConfig, tolerant: bool) -> JobReturn:
    """What the sweeper gets: the value that the run monitors."""
    job, place = plan.job, folder / plan.job.folder
    result = JobReturn(job.overrides, config, working_dir=str(place), task_name="runner")
    if job.status in WELL or tolerant:
        result.status = JobStatus.COMPLETED
        result.return_value = _value(place) if job.status in WELL else None
    else:
        result.status = JobStatus.FAILED
        result.return_value = SweepFailed(f"{job.title}: {job.status}: {job.reason}")
    return result


def _value(folder: Path) -> float | None:
    try:
        summary = Summary.read(folder)
    except StorageError:
        return None
    return summary.best if summary.best is not None else summary.metrics.get(summary.monitor)
