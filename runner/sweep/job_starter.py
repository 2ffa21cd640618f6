"""Processes of a sweep's jobs: their command, environment and folder."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from runner import fork_server
from runner.checkpoint.lock import lock
from runner.composing import typed
from runner.device.capabilities import usable_cores
from runner.errors import RunnerError
from runner.jobs.config import JobKind
from runner.overrides.groups import without_arguments
from runner.record.console import close_logging, set_up_logging
from runner.record.text import quote_for_hydra
from runner.security import secrets
from runner.security.config import SecurityLevel
from runner.security.paths import check_below, keep_private
from runner.sweep import fork
from runner.sweep.child import Child
from runner.sweep.config import LauncherConfig, StartMethod
from runner.sweep.identity import job_hash
from runner.sweep.plan import JobPlan, load_previous_jobs, wait_for_running_jobs
from runner.sweep.state import Job, Session, Sweep, current_session, now

log = logging.getLogger("runner")

DROPPED = (
    *("hydra/launcher", "hydra.launcher", "hydra.sweep", "hydra.mode"),
    *("hydra/sweeper", "hydra.sweeper", "hydra.run"),
)
"""Hydra's keys that a single job does not need."""


@dataclass(frozen=True)
class JobStarter:
    """Starts the processes of a sweep's jobs."""

    session: Session
    sweep: Sweep  # the session's
    settings: LauncherConfig
    hydras: list[str]  # overrides of `hydra.*`, as typed
    forks: bool  # whether jobs are forks of a process with imports done

    def arguments(self, overrides: Sequence[str]) -> list[str]:
        """Return the arguments that run one job alone."""
        kept = [text for text in self.hydras if not text.lstrip("+~").startswith(DROPPED)]
        return [*self.session.flags, *map(without_arguments, overrides), *kept]

    def command(self, overrides: Sequence[str]) -> str:
        """Return the command line that runs one job alone."""
        return shlex.join(["python", "-m", "runner", *self.arguments(overrides)])

    def start(self, plan: JobPlan) -> Child:
        """Start the job in its folder. Raises OSError.

        -P keeps Python from putting the current folder first, where a module may shadow an
        installed one; it is left out only if the runner itself is in that folder.
        """
        place = self.session.folder / plan.job.folder
        key = "checkpoint.resume" if plan.continues else "hydra.run.dir"
        apart = [] if fork_server.in_current_folder() and not sys.flags.safe_path else ["-P"]
        return Child.start(
            [sys.executable, *apart, "-m", "runner", *self.arguments(plan.job.overrides)],
            environment(self.settings.jobs),
            place,
            self.settings.timeout_s,
            [f"{key}={quote_for_hydra(str(place))}"],
            plan.records,
            chosen=not self.session.resumed,
            start_process=fork.fork if self.forks else None,
        )

    def start_fork_server(self) -> None:
        """Start the server that imports what forked jobs need; does nothing for spawned jobs."""
        if not self.forks:
            return
        needs_tracer = "optimization" in self.session.command  # else each job imports it itself
        modules = [*([fork.TRACER] if needs_tracer else []), *fork.PRELOAD]
        fork_server.start(modules, environment(self.settings.jobs))


@contextmanager
def open_sweep(config: DictConfig, settings: LauncherConfig) -> Iterator[JobStarter]:
    """Lock the session's folder within the context, and yield the starter of its jobs.

    Raises UsageError if another process has the lock.
    """
    session = current_session()
    session.folder.mkdir(parents=True, exist_ok=True)
    level = SecurityLevel[getattr(config.security.level, "name", "standard")]
    keep_private(session.folder, level)
    set_up_logging("info", None)
    # as typed: the job itself resolves secrets and its number
    hydras: Any = OmegaConf.to_container(config.hydra.overrides.hydra, resolve=False)
    forks = config.sweep.start is StartMethod.fork and fork_server.available()
    try:
        with lock(session.folder):
            if session.sweep is None:  # else it is from an earlier batch of the sweeper
                session.earlier = load_previous_jobs(session.folder)
                session.sweep = Sweep(session.command, session.hash, started=now())
            session.sweep.start = (StartMethod.fork if forks else StartMethod.spawn).name
            starter = JobStarter(session, session.sweep, settings, hydras, forks)
            if not session.earlier:
                starter.start_fork_server()  # it imports while jobs are composed
            wait_for_running_jobs(session.folder, session.earlier)
            yield starter
    finally:
        close_logging()


def make_plan(config: DictConfig, overrides: list[str], number: int) -> JobPlan:
    """Return the plan of a job with its hash, or with the error that would refuse it."""
    with open_dict(config):
        config.hydra.job.num = config.hydra.job.id = number
    subdir = str(secrets.place(config, "hydra.sweep.subdir"))
    check_below("hydra.sweep.subdir", subdir, current_session().folder)
    job = Job(number, overrides, subdir)
    try:
        checked = typed(config.copy())
        job.hash = job_hash(checked, OmegaConf.to_container(config.hydra.job.env_set, resolve=True))
    except (RunnerError, OmegaConfBaseException) as error:
        return JobPlan(job, error=secrets.named(str(error)))
    trains = checked.job.kind is JobKind.train
    return JobPlan(job, trains, records=trains or checked.job.kind is JobKind.evaluate)


def environment(jobs: int) -> dict[str, str]:
    """Return this process's environment and module path, for one of `jobs` parallel jobs.

    They share the cores: oversubscribed threads made steps four times as long.
    """
    variables = {**os.environ, "PYTHONPATH": fork_server.module_path()}
    if jobs > 1:
        variables.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // jobs)))
    return variables
