"""Start the processes of a sweep's jobs: command, environment and folder."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from runner.core import fork_server
from runner.core.checkpoint.lock import lock
from runner.core.config.composing import typed
from runner.core.config.groups import without_arguments
from runner.core.config.run_config import RunConfig
from runner.core.device.capabilities import usable_cores
from runner.core.device.gpu_assignment import VISIBLE_DEVICES, assign_gpus, describe_gpus, list_gpus
from runner.core.errors import RunnerError
from runner.core.module_path import python_command
from runner.core.record.console import close_logging, set_up_logging
from runner.core.record.storage import make_folder
from runner.core.record.text import quote_for_hydra
from runner.core.schemas.device import DeviceKind, DistributedKind
from runner.core.schemas.jobs import JobKind
from runner.core.schemas.security import SecurityLevel
from runner.core.schemas.sweep import LauncherConfig, StartMethod
from runner.core.security import secrets
from runner.core.security.paths import check_subfolder, restrict_run_folder
from runner.scale.sweep import fork
from runner.scale.sweep.identity import job_hash, unstamped_paths
from runner.scale.sweep.job_process import JobProcess
from runner.scale.sweep.plan import JobPlan, load_previous_jobs, wait_for_running_jobs
from runner.scale.sweep.state import Job, Sweep, SweepSession, current_session, utc_now

log = logging.getLogger("runner")

DROPPED_PREFIXES = (
    *("hydra/launcher", "hydra.launcher", "hydra.sweep", "hydra.mode"),
    *("hydra/sweeper", "hydra.sweeper", "hydra.run"),
)
"""Hydra keys that are not needed to run a job alone."""


@dataclass(frozen=True)
class JobStarter:
    """Starts the processes of a sweep's jobs."""

    session: SweepSession
    sweep: Sweep  # the session's
    settings: LauncherConfig
    hydra_overrides: list[str]  # overrides of Hydra keys, as typed
    use_fork: bool  # fork jobs from a process with preloaded imports
    gpus: list[str] = field(default_factory=list)  # to assign to jobs that run at the same time

    def arguments(self, overrides: Sequence[str]) -> list[str]:
        """Return the arguments that run one job alone."""
        typed = self.hydra_overrides
        kept = [text for text in typed if not text.lstrip("+~").startswith(DROPPED_PREFIXES)]
        return [*self.session.flags, *map(without_arguments, overrides), *kept]

    def command(self, overrides: Sequence[str]) -> str:
        """Return the command that runs one job alone."""
        return shlex.join([*python_command(), *self.arguments(overrides)])

    def start(self, plan: JobPlan) -> JobProcess:
        """Start a job in its folder. Raises OSError, and ProcessLost for the fork server.

        -P keeps the current folder off the front of sys.path, where a module may shadow an
        installed one. It is omitted if the runner itself lies in that folder.
        """
        folder = self.session.folder / plan.job.folder
        key = "checkpoint.resume" if plan.continues else "hydra.run.dir"
        environment = {**job_environment(self.settings.jobs), **self._assign_gpus(plan)}
        safe_flag = [] if fork_server.in_current_folder() and not sys.flags.safe_path else ["-P"]
        self.start_fork_server()  # it may have been killed
        fork_job = partial(fork.fork_job, start_s=plan.start_s)
        return JobProcess.start(
            [sys.executable, *safe_flag, "-m", "runner", *self.arguments(plan.job.overrides)],
            environment,
            folder,
            self.settings.timeout_s,
            [f"{key}={quote_for_hydra(str(folder))}"],
            plan.writes_summary,
            folder_trusted=not self.session.resumed,
            start_process=fork_job if self.use_fork else fork.spawn_job,
        )

    def _assign_gpus(self, plan: JobPlan) -> dict[str, str]:
        """Return the variable that shows a job its GPUs alone; {} if it selects devices itself."""
        plan.job.device = ""
        if not (self.gpus and plan.gpu_processes):
            return {}
        jobs, count = self.settings.jobs, len(self.gpus)
        if jobs * plan.gpu_processes > count and not self.session.warned_of_shared_gpus:
            self.session.warned_of_shared_gpus = True
            needed = f"{jobs} jobs at a time need {jobs * plan.gpu_processes}"
            fix = f"hydra.launcher.jobs={max(1, count // plan.gpu_processes)} gives each its own"
            log.warning("%d GPUs, but %s: jobs share them; %s", count, needed, fix)
        gpus = assign_gpus(self.gpus, plan.job.number, plan.gpu_processes)
        plan.job.device = describe_gpus(gpus)
        return {VISIBLE_DEVICES: ",".join(gpus)}

    def start_fork_server(self) -> None:
        """Start the fork server with the imports of jobs, if jobs are forked; idempotent."""
        if not self.use_fork:
            return
        needs_dynamo = "optimization" in self.session.command  # else each job imports it
        modules = [*([fork.DYNAMO] if needs_dynamo else []), *fork.PRELOAD]
        fork_server.start(modules, job_environment(self.settings.jobs))


@contextmanager
def open_sweep(config: DictConfig, settings: LauncherConfig) -> Iterator[JobStarter]:
    """Yield the starter; this process then holds the lock of the session's folder.

    Raises UsageError if another process holds it.
    """
    session = current_session()
    make_folder(session.folder)
    level = SecurityLevel[getattr(config.security.level, "name", "standard")]
    restrict_run_folder(session.folder, level)
    set_up_logging("warning" if session.quiet else "info", None)
    # unresolved: the job resolves secrets and its own number
    hydra_overrides: Any = OmegaConf.to_container(config.hydra.overrides.hydra, resolve=False)
    use_fork = config.sweep.start is StartMethod.fork and fork_server.available()
    try:
        with lock(session.folder):
            if session.sweep is None:  # else a sweeper that launches several batches
                session.earlier_jobs = load_previous_jobs(session.folder)
                session.sweep = Sweep(session.command, session.hash, started=utc_now())
            session.sweep.start = (StartMethod.fork if use_fork else StartMethod.spawn).name
            gpus = list_gpus(os.environ) if settings.jobs > 1 else []
            starter = JobStarter(session, session.sweep, settings, hydra_overrides, use_fork, gpus)
            if not session.earlier_jobs:
                starter.start_fork_server()  # imports while jobs are composed
            wait_for_running_jobs(session.folder, session.earlier_jobs)
            yield starter
    finally:
        close_logging()


def plan_job(config: DictConfig, overrides: list[str], number: int) -> JobPlan:
    """Return the plan of a job, or with the error because of which it would fail."""
    with open_dict(config):
        config.hydra.job.num = config.hydra.job.id = number
    subdir = str(secrets.read_path(config, "hydra.sweep.subdir"))
    check_subfolder("hydra.sweep.subdir", subdir, current_session().folder)
    job = Job(number, overrides, subdir)
    try:
        checked = typed(config.copy())
        variables: Any = OmegaConf.to_container(config.hydra.job.env_set, resolve=True)
        job.hash = job_hash(checked, variables)
    except (RunnerError, OmegaConfBaseException) as error:
        return JobPlan(job, error=secrets.mask_words(str(error)))
    trains = checked.job.kind is JobKind.train
    return JobPlan(
        job,
        trains,
        writes_summary=trains or checked.job.kind is JobKind.evaluate,
        unstamped=tuple(unstamped_paths(checked)),
        gpu_processes=0 if VISIBLE_DEVICES in variables else _count_gpu_processes(checked),
        start_s=checked.data.timeout_s,
    )


def _count_gpu_processes(config: RunConfig) -> int:
    """Return how many GPUs the launcher is to assign; 0 if the job names its device.

    With `device.index=auto`, jobs are spread: those of one moment would take the same GPU.
    """
    device, distributed = config.device, config.distributed
    if isinstance(device.index, int) or device.kind not in (DeviceKind.auto, DeviceKind.cuda):
        return 0
    one_process = distributed.kind is DistributedKind.none
    return 1 if one_process else distributed.processes or 0  # null: one per GPU, all of them


def job_environment(jobs: int) -> dict[str, str]:
    """Return environment and module path for a job, if `jobs` run at a time.

    They share the cores: oversubscription made steps four times as long.
    """
    variables = {**os.environ, "PYTHONPATH": fork_server.child_pythonpath()}
    if jobs > 1:
        variables.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // jobs)))
    return variables
