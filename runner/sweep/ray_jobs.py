"""hydra/launcher=ray: a Ray worker for each job, and rows for jobs whose worker is lost.

The plugin's own loop raises at the first worker that is lost, and Ray would run its job once more
in the same folder.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from omegaconf import DictConfig, OmegaConf, open_dict

from runner.errors import Interrupted, SweepFailed
from runner.record.console import close_logging, set_up_logging
from runner.sweep.child import GRACE_S
from runner.sweep.submitted import record_lost_job
from runner.training.signals import Interrupts

log = logging.getLogger("runner")

INIT = {"include_dashboard": False, "log_to_driver": False}  # each job has a log of its own
REMOTE = {"max_retries": 0, "max_calls": 1}  # a fresh process for each job
STATUS = {"OutOfMemoryError": "oom", "TaskCancelledError": "interrupted"}
POLL_S = 0.5


def replace_launch() -> None:
    """Have the plugin's launcher call `launch`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from hydra_plugins.hydra_ray_launcher import _core

    _core.launch = launch


def launch(
    launcher: Any, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
) -> list[JobReturn]:
    """Run the jobs on Ray; a failure is raised later, by the sweeper. Raises Interrupted."""
    import ray
    from hydra_plugins.hydra_ray_launcher._launcher_util import launch_job_on_ray

    setup_globals()
    set_up_logging("info", None)
    try:
        ray.init(**{**INIT, **_plain(launcher.ray_cfg.init)})
        remote = OmegaConf.create({**REMOTE, **_plain(launcher.ray_cfg.remote)})
        task, state = partial(_run, launcher.task_function), Singleton.get_state()
        jobs: dict[Any, DictConfig] = {}
        with Interrupts("ending the jobs") as interrupts:  # after init: Ray has handlers of its own
            for number, overrides in enumerate(job_overrides, initial_job_idx):
                context = launcher.hydra_context
                config = context.config_loader.load_sweep_config(launcher.config, list(overrides))
                with open_dict(config):
                    config.hydra.job.num = config.hydra.job.id = number
                jobs[launch_job_on_ray(context, remote, config, task, state)] = config
            _wait(ray, list(jobs), interrupts)
            results = [_result(ray, job, config) for job, config in jobs.items()]
        if interrupts.received is not None:
            raise Interrupted(interrupts.received)
        return results
    finally:
        close_logging()
        ray.shutdown()


def _plain(config: DictConfig) -> dict[str, Any]:
    values: Any = OmegaConf.to_container(config, resolve=True)
    return values or {}


def _run(task: Any, config: DictConfig) -> Any:
    """One job, in its worker; one that Ray begins again goes on from its last checkpoint."""
    begun = any(Path(HydraConfig.get().runtime.output_dir).glob("checkpoints/step_*"))
    if begun and config.checkpoint.resume == "none":
        config.checkpoint.resume = "auto"
    return task(config)


def _wait(ray: Any, jobs: list[Any], interrupts: Interrupts) -> None:
    """Until all jobs have ended. After a signal they have some time to write a checkpoint."""
    deadline = float("inf")
    while jobs and time.monotonic() < deadline:
        _, jobs = ray.wait(jobs, num_returns=len(jobs), timeout=POLL_S, fetch_local=False)
        if interrupts.received is not None and deadline == float("inf"):
            deadline = time.monotonic() + GRACE_S
            for job in jobs:
                ray.cancel(job)  # as Ctrl-C is to the job
    for job in jobs:
        ray.cancel(job, force=True)


def _result(ray: Any, job: Any, config: DictConfig) -> JobReturn:
    """What a job came to; one whose worker was lost gets its end into its folder."""
    try:
        result: JobReturn = ray.get(job)
        return result
    except ray.exceptions.RayError as error:
        kind = type(error).__name__
        reason = f"its Ray worker was lost: {kind}: {str(error).partition(chr(10))[0]}"
        folder = Path(str(config.hydra.sweep.dir)) / str(config.hydra.sweep.subdir)
        record_lost_job(folder, STATUS.get(kind, "killed"), reason)
        log.error("#%d: %s", config.hydra.job.num, reason)
        lost = JobReturn(config.hydra.overrides.task, config)
        lost.status, lost.return_value = JobStatus.FAILED, SweepFailed(reason)
        return lost
