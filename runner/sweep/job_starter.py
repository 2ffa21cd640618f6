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
from runner.sweep.plan import JobPlan, JobSpec
from runner.sweep.state import FILE, Session, current_session

log = logging.getLogger("runner")

SWEEP_KEYS = ("hydra/launcher", "hydra.launcher", "hydra.sweep", "hydra.mode")


@dataclass(frozen=True)
class JobStarter:
    """Starts the processes of a sweep's jobs."""

    session: Session
    settings: LauncherConfig
    hydras: list[str]  # overrides of Hydra's own part, as typed
    forks: bool  # whether jobs are forked from a process that has imported what they need

    def arguments(self, plan: JobPlan) -> list[str]:
        """The job's command line."""
        return job_arguments(self.session.flags, self.hydras, plan.spec.overrides)

    def command(self, plan: JobPlan) -> str:
        """What does the same by itself."""
        return shlex.join(["python", "-m", "runner", *self.arguments(plan)])

    def start(self, plan: JobPlan) -> Child:
        """Start it in its folder. Raises OSError."""
        place = self.session.folder / plan.job.folder
        key = "checkpoint.resume" if plan.continues else "hydra.run.dir"
        return Child.start(
            process_command(self.arguments(plan)),
            environment(self.settings.jobs),
            place,
            self.settings.timeout_s,
            [f"{key}={quote_for_hydra(str(place))}"],
            plan.spec.records,
            chosen=not self.session.resumed,
            start_process=fork.fork if self.forks else None,
        )


@contextmanager
def open_sweep(config: DictConfig, settings: LauncherConfig) -> Iterator[JobStarter]:
    """While entered, this process is the one that writes into the session's folder.

    Raises UsageError when another one is.
    """
    session = current_session()
    session.folder.mkdir(parents=True, exist_ok=True)
    level = SecurityLevel[getattr(config.security.level, "name", "standard")]
    keep_private(session.folder, level)
    set_up_logging("info", None)
    # as typed: what stands for a secret, or for the job's number, is the job's to resolve
    hydras: Any = OmegaConf.to_container(config.hydra.overrides.hydra, resolve=False)
    try:
        with lock(session.folder):
            starter = JobStarter(session, settings, hydras, _forks(config))
            if starter.forks and not (session.folder / FILE).exists():
                start_fork_server(starter)  # imports while jobs are composed
            yield starter
    finally:
        close_logging()


def start_fork_server(starter: JobStarter) -> None:
    """Begin to import what jobs need; once is enough."""
    needs_tracer = "optimization" in starter.session.command  # else each job imports it itself
    modules = [*([fork.TRACER] if needs_tracer else []), *fork.PRELOAD]
    fork_server.start(modules, environment(starter.settings.jobs))


def make_spec(config: DictConfig, overrides: list[str], number: int) -> JobSpec:
    """The job as its process will see it, or the reason why it would refuse it."""
    with open_dict(config):
        config.hydra.job.num = config.hydra.job.id = number
    subdir = str(secrets.place(config, "hydra.sweep.subdir"))
    check_below("hydra.sweep.subdir", subdir, current_session().folder)
    variables = config.hydra.job.env_set
    try:
        checked = typed(config.copy())
        values = OmegaConf.to_container(variables, resolve=True)
    except (RunnerError, OmegaConfBaseException) as error:
        return JobSpec(number, overrides, subdir, error=secrets.named(str(error)))
    trains = checked.job.kind is JobKind.train
    records = trains or checked.job.kind is JobKind.evaluate
    return JobSpec(number, overrides, subdir, job_hash(checked, values), trains, records)


def _forks(config: DictConfig) -> bool:
    """Whether jobs are forked from a process that has imported what they need."""
    return config.sweep.start is StartMethod.fork and fork_server.available()


def job_arguments(
    flags: Sequence[str], hydras: Sequence[str], overrides: Sequence[str]
) -> list[str]:
    """What to type to do one job of a sweep alone."""
    dropped = (*SWEEP_KEYS, "hydra/sweeper", "hydra.sweeper", "hydra.run")
    kept = [text for text in hydras if not text.lstrip("+~").startswith(dropped)]
    return [*flags, *map(without_arguments, overrides), *kept]


def process_command(arguments: Sequence[str]) -> list[str]:
    """The command that a process is started with: the same interpreter, the same runner.

    Without -P Python would put the current folder first, where a module may shadow an installed
    one. Only where the runner itself lies in that folder is that needed.
    """
    apart = [] if fork_server.in_current_folder() and not sys.flags.safe_path else ["-P"]
    return [sys.executable, *apart, "-m", "runner", *arguments]


def environment(jobs: int) -> dict[str, str]:
    """This process's environment and module path, for one of so many jobs at a time.

    They share the cores: threads that wait for one another's cores made steps four times as long.
    """
    variables = {**os.environ, "PYTHONPATH": fork_server.module_path()}
    if jobs > 1:
        variables.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // jobs)))
    return variables
