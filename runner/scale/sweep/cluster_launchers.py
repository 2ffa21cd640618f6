"""hydra/launcher=submitit_slurm and =ray: handle jobs that end without a result or restart.

Both launchers raise at the first job that is lost. Without `sacct` submitit would wait forever for
a killed job. Ray would rerun a lost job in the same folder.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from omegaconf import DictConfig, OmegaConf, open_dict

from runner.core.checkpoint.ownership import archive_record, has_checkpoints
from runner.core.device.signals import InterruptHandler, raise_on_signals
from runner.core.errors import Interrupted, StorageError, SweepFailed, UsageError
from runner.core.record.console import close_logging, set_up_logging
from runner.core.record.summary import Summary
from runner.scale.sweep.job_process import GRACE_S
from runner.scale.sweep.schedule import write_failed_summary

log = logging.getLogger("runner")

PLUGIN_FOLDER = Path(__file__).resolve().parents[1] / "plugins"
SUBMITIT_VARIABLE = "SUBMITIT_EXECUTOR"  # set within a job
SACCT_TIMEOUT_S = 60.0
ARRAY_JOB = (
    "sbatch --array=0-2 --signal=TERM@120 --requeue --wrap 'srun python -m runner "
    "seed=$SLURM_ARRAY_TASK_ID name=mine-$SLURM_ARRAY_TASK_ID checkpoint.resume=auto'"
)
SLURM_ERROR = re.compile(r"slurmstepd\S*: error: \*\*\* (.*) \*\*\*")

RAY_INIT = {"include_dashboard": False, "log_to_driver": False}  # each job has its own log
RAY_REMOTE = {"max_retries": 0, "max_calls": 1}  # a new process for each job
RAY_STATUS = {"OutOfMemoryError": "oom", "TaskCancelledError": "interrupted"}
RAY_POLL_S = 0.5


def adapt_launcher(target: str) -> None:
    """Make the launcher of that class report failed jobs after all have ended.

    Also lets its processes import Hydra's plugins, which unpickling needs: their module path lacks
    the current folder, which `python -m` would put first.
    """
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    root = PLUGIN_FOLDER.parents[1]
    plugin_paths = [PLUGIN_FOLDER, *([root] if root == Path.cwd().resolve() else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*paths, *map(str, plugin_paths)]))
    os.environ["PYTHONSAFEPATH"] = "1"
    if "hydra_submitit_launcher" in target:
        if target.endswith("SlurmLauncher"):
            _check_accounting()
        from submitit.core.core import Job

        job: Any = Job
        job.results = partialmethod(_read_results, job.results)
        logging.getLogger("submitit").setLevel(logging.ERROR)
    elif target.endswith("ray_launcher.RayLauncher"):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        from hydra_plugins.hydra_ray_launcher.ray_launcher import RayLauncher

        launcher: Any = RayLauncher
        launcher.launch = launch_on_ray


def _resume_job(config: DictConfig) -> None:
    """Let a job that is started again in its folder continue from its checkpoint, if it has one."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    if has_checkpoints(folder) and config.checkpoint.resume == "none":
        config.checkpoint.resume = "auto"
    archive_record(folder)  # of a job that was lost before its first checkpoint


def _record_lost_job(config: DictConfig, number: int, id: Any, status: str, reason: str) -> None:
    """Record how a job without a result ended, unless its summary states an end."""
    with open_dict(config):
        config.hydra.job.num, config.hydra.job.id = number, id
    folder = Path(str(config.hydra.sweep.dir)) / str(config.hydra.sweep.subdir)
    try:
        if Summary.read(folder).status != "running":
            return
    except StorageError:
        log.debug("%s has no summary", folder)
    write_failed_summary(folder, status, reason, "")


def _mark_failed(result: JobReturn, reason: str) -> JobReturn:
    result.status, result.return_value = JobStatus.FAILED, SweepFailed(reason)
    return result


# -- SLURM -----------------------------------------------------------------------------------------


def _check_accounting() -> None:
    """Raise UsageError unless `sacct` works, which submitit asks whether a job has ended."""
    command = ["sacct", "--noheader", "--starttime=now"]
    options: Any = {"capture_output": True, "text": True, "errors": "replace"}
    try:
        done = subprocess.run(command, **options, timeout=SACCT_TIMEOUT_S)  # noqa: S603
        if done.returncode == 0:
            return
        problem = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    raise UsageError(
        "hydra/launcher=submitit_slurm: submitit learns from sacct that a job has ended, but it "
        f"does not work here ({problem[:200]}); use an array of jobs instead: {ARRAY_JOB}"
    )


def _read_results(job: Any, read_results: Any) -> list[Any]:
    """Return a job's results, or a failure, recorded in its folder."""
    try:
        results: list[Any] = read_results(job)
        return results
    except Exception as error:
        causes = SLURM_ERROR.findall(job.stderr() or "")
        reason = f"the scheduler: {causes[-1]}" if causes else "it ended without a result"
        try:
            task = job.submission()
            overrides, _, number, *_ = task.args
            loader = task.function.hydra_context.config_loader
            config = loader.load_sweep_config(task.function.config, overrides)
            _record_lost_job(config, number, job.job_id, "killed", reason)
        except Exception:  # the sweep's folder may no longer exist
            log.debug("no record of %s", job.job_id, exc_info=True)
        log.debug("%s", error)
        return [_mark_failed(JobReturn(), reason)]


@contextmanager
def in_slurm_job(config: DictConfig) -> Iterator[None]:
    """While entered, a requeued job first saves a checkpoint.

    After the requeue it resumes in the same folder.
    """
    from submitit import JobEnvironment

    if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
        _resume_job(config)
    number = getattr(signal, f"SIG{JobEnvironment.USR_SIG}")
    previous_handler = signal.signal(number, signal.SIG_DFL)
    try:
        with raise_on_signals():
            yield
    except SystemExit as end:
        if end.code == 128 + number and callable(previous_handler):
            previous_handler(number, None)  # requeues the job and ends this process
        raise


# -- Ray -------------------------------------------------------------------------------------------


def launch_on_ray(
    launcher: Any, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
) -> list[JobReturn]:
    """Run the jobs, each in a Ray worker. Raises Interrupted."""
    import ray

    setup_globals()
    set_up_logging("info", None)
    try:
        settings: Any = OmegaConf.to_container(launcher.ray_cfg, resolve=True)
        ray.init(**{**RAY_INIT, **(settings["init"] or {})})
        remote = ray.remote(**{**RAY_REMOTE, **(settings["remote"] or {})})(_run_on_ray)
        task, state = launcher.task_function, Singleton.get_state()
        context, jobs = launcher.hydra_context, dict[Any, DictConfig]()
        # after init: Ray has its own handlers
        with InterruptHandler("ending the jobs") as interrupts:
            for number, overrides in enumerate(job_overrides, initial_job_idx):
                config = context.config_loader.load_sweep_config(launcher.config, list(overrides))
                with open_dict(config):
                    config.hydra.job.num = config.hydra.job.id = number
                jobs[remote.remote(context, config, task, state)] = config
            _wait_for_jobs(ray, list(jobs), interrupts)
            results = [_ray_result(ray, job, config) for job, config in jobs.items()]
        if interrupts.received is not None:
            raise Interrupted(interrupts.received)
        return results
    finally:
        close_logging()
        ray.shutdown()


def _run_on_ray(context: Any, config: DictConfig, task: Any, state: Any) -> JobReturn:
    setup_globals()
    Singleton.set_state(state)
    return run_job(
        hydra_context=context,
        task_function=partial(_continue_on_ray, task),
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )


def _continue_on_ray(task: Any, config: DictConfig) -> Any:
    _resume_job(config)  # Ray may have restarted it
    return task(config)


def _wait_for_jobs(ray: Any, jobs: list[Any], interrupts: InterruptHandler) -> None:
    """Wait for all jobs; after a signal they get `GRACE_S` to write a checkpoint."""
    deadline = float("inf")
    while jobs and time.monotonic() < deadline:
        _, jobs = ray.wait(jobs, num_returns=len(jobs), timeout=RAY_POLL_S, fetch_local=False)
        if interrupts.received is not None and deadline == float("inf"):
            deadline = time.monotonic() + GRACE_S
            for job in jobs:
                ray.cancel(job)  # acts like Ctrl-C in the job
    for job in jobs:
        ray.cancel(job, force=True)


def _ray_result(ray: Any, job: Any, config: DictConfig) -> JobReturn:
    """Return a job's result; the loss of its worker is recorded in its folder."""
    try:
        result: JobReturn = ray.get(job)
        return result
    except ray.exceptions.RayError as error:
        kind = type(error).__name__
        reason = f"its Ray worker was lost: {kind}: {str(error).partition(chr(10))[0]}"
        number = config.hydra.job.num
        _record_lost_job(config, number, number, RAY_STATUS.get(kind, "killed"), reason)
        log.error("#%d: %s", number, reason)
        return _mark_failed(JobReturn(config.hydra.overrides.task, config), reason)
