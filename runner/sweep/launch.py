"""From the jobs that Hydra names to their results."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from runner.checkpoint.lock import lock
from runner.composing import typed
from runner.config import config_hash, flat
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


class Composer:
    """Stands in for the method of Hydra's loader that sweepers call, and keeps what they got."""

    def __init__(self, loader: Any) -> None:
        self.compose = loader.load_sweep_config
        self.kept: dict[tuple[str, ...], DictConfig] = {}
        loader.load_sweep_config = self.ahead

    def ahead(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """A sweeper's question."""
        found: DictConfig = self.compose(master_config, sweep_overrides)
        self.kept[tuple(sweep_overrides)] = found
        return found

    def take(self, config: DictConfig, overrides: Sequence[str]) -> DictConfig:
        """The config of the job that is to be run now."""
        found = self.kept.pop(tuple(overrides), None)
        if found is None:
            found = self.compose(config, list(overrides))
        return found


PUTS_UP = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
"""It would end the sweep at the first failure that it is told of; others learn from failures."""


def launch(
    config: DictConfig,
    composer: Composer,
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
            configs = [composer.take(config, o) for o in job_overrides]
            wanted = [
                _wanted(one, list(overrides), first + i)
                for i, (one, overrides) in enumerate(zip(configs, job_overrides, strict=True))
            ]
            planned = _planned(session, wanted)
            # as typed: what stands for a secret, or for the job's number, is the job's to resolve
            hydras: Any = OmegaConf.to_container(config.hydra.overrides.hydra, resolve=False)
            _run(session, planned, wanted, settings, hydras)
    finally:
        close_logging()
    puts_up = config.hydra.sweeper._target_ == PUTS_UP
    return [
        _return(one, folder, composed, puts_up)
        for one, composed in zip(planned, configs, strict=True)
    ]


def _wanted(config: DictConfig, overrides: list[str], number: int) -> JobSpec:
    """The job as its process will see it; one that it would refuse says why."""
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
        config_hash(checked),
        kind is JobKind.train,
        kind in (JobKind.train, JobKind.evaluate),
        settings=flat(checked),
    )


def _planned(session: Session, wanted: list[JobSpec]) -> list[JobPlan]:
    """What is left to do; noted in the session's sweep, and said."""
    sweep = session.sweep
    earlier = load_previous_jobs(session.folder) if sweep is None else session.left
    wait_for_running_jobs(session.folder, earlier)
    planned = plan_jobs(wanted, earlier, session.folder)
    if sweep is None:
        sweep = session.sweep = Sweep(session.command, session.hash, started=now())
    mine = {one.job.folder for one in planned}
    session.left = [job for job in earlier if job.folder not in mine]
    sweep.jobs += [one.job for one in planned]
    done, onward = sum(one.done for one in planned), sum(one.continues for one in planned)
    left = len(planned) - done
    if done or onward:
        parts = [f"{done} of {len(planned)} done before", f"{left} to run"]
        if onward:
            parts[-1] += f", {onward} of them from a checkpoint"
        afresh = "" if left else " (sweep.resume=none does it all afresh)"
        log.info("%s: %s%s", session.folder, "; ".join(parts), afresh)
    else:
        log.info("%d jobs, in %s", len(planned), session.folder)
    return planned


def _run(
    session: Session,
    planned: list[JobPlan],
    wanted: list[JobSpec],
    settings: LauncherConfig,
    hydras: list[str],
) -> None:
    sweep, folder = session.sweep, session.folder
    if sweep is None:
        return
    values = command.domains([(one.overrides, one.settings) for one in wanted if one.settings])

    def start(one: JobPlan) -> Child:
        place = folder / one.job.folder
        arguments = command.typed(session.flags, hydras, one.wanted.overrides)
        where = f"checkpoint.resume={quote_for_hydra(str(place))}"
        told = [where if one.continues else f"hydra.run.dir={quote_for_hydra(str(place))}"]
        told += [values] if values else []
        return Child.start(
            command.process(arguments),
            command.environment(settings.jobs),
            place,
            settings.timeout_s,
            told,
            one.wanted.records,
            chosen=not session.resumed,
        )

    for one in planned:
        arguments = command.typed(session.flags, hydras, one.wanted.overrides)
        one.job.command = command.shown(arguments)
    sweep.write(folder)
    display = Display(sweep.jobs)
    Schedule(sweep, folder, settings, start, display).run([p for p in planned if not p.done])


def _return(one: JobPlan, folder: Path, config: DictConfig, puts_up: bool) -> JobReturn:
    """What the sweeper is told: the value that the run monitors."""
    job = one.job
    told = JobReturn(
        overrides=job.overrides,
        cfg=config,
        working_dir=str(folder / job.folder),
        task_name="runner",
    )
    if job.status in WELL:
        told.status, told.return_value = JobStatus.COMPLETED, _value(folder / job.folder)
    elif puts_up:
        told.status, told.return_value = JobStatus.COMPLETED, None
    else:
        told.status = JobStatus.FAILED
        told.return_value = SweepFailed(f"{job.title}: {job.status}: {job.reason}")
    return told


def _value(folder: Path) -> float | None:
    try:
        summary = Summary.read(folder)
    except StorageError:
        return None
    return summary.best if summary.best is not None else summary.metrics.get(summary.monitor)
