"""hydra/launcher=submitit_slurm: jobs that end without a result, and jobs that are put back.

submitit learns from `sacct` that a job has ended, which needs a database for accounting: without it
the launcher waits for ever for one that was killed. `squeue` answers on every cluster.
"""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, open_dict

from runner.errors import StorageError, SweepFailed
from runner.sweep.schedule import write_failed_summary
from runner.training.signals import signals_unwind
from runner.training.summary import Summary

log = logging.getLogger("runner")

INSIDE = "SUBMITIT_EXECUTOR"  # set in a job
POLL_S = 30  # seconds between two questions to the scheduler, at most
ENDED = "ENDED"
CAUSE = re.compile(r"slurmstepd\S*: error: \*\*\* (.*) \*\*\*")


def watch_queue() -> None:
    """Have submitit ask for jobs by squeue, and report one that failed when all have ended."""
    from submitit.core.core import Job
    from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

    watcher: Any = SlurmInfoWatcher
    watcher._make_command, watcher.read_info = _ask_queue, _read_queue
    SlurmJob.watcher = watcher(delay_s=POLL_S)
    job: Any = Job
    wait = job.results
    job.results = lambda job: _results(job, wait)
    logging.getLogger("submitit").setLevel(logging.ERROR)


def _ask_queue(watcher: Any) -> list[str] | None:
    if not watcher._registered - watcher._finished:
        return None
    return ["squeue", "--noheader", "--array", "--me", "--format=%i|%T"]


def _read_queue(watcher: Any, answer: bytes | str) -> dict[str, dict[str, str]]:
    """The state of each job; one that is not in the queue has ended."""
    text = answer.decode() if isinstance(answer, bytes) else answer
    states = dict(line.strip().split("|") for line in text.splitlines() if "|" in line)
    return {job: {"State": states.get(job, ENDED)} for job in watcher._registered}


def _results(job: Any, wait: Any) -> list[Any]:
    """What a job came to; a failure is raised later, by the sweeper, when all have ended."""
    try:
        results: list[Any] = wait(job)
        return results
    except Exception as error:
        causes = CAUSE.findall(job.stderr() or "")
        reason = f"the scheduler: {causes[-1]}" if causes else "it ended without a result"
        try:
            _record_end(job, reason)
        except Exception:  # the sweep's folder may be gone
            log.debug("no record of %s", job.job_id, exc_info=True)
        log.debug("%s", error)
        result = JobReturn()
        result.status, result.return_value = JobStatus.FAILED, SweepFailed(reason)
        return [result]


def _record_end(job: Any, reason: str) -> None:
    """Have the job's folder say how it ended, where the job could not."""
    task = job.submission()
    overrides, _, number, *_ = task.args
    config = task.function.hydra_context.config_loader.load_sweep_config(
        task.function.config, overrides
    )
    with open_dict(config.hydra.job):
        config.hydra.job.num, config.hydra.job.id = number, job.job_id
    folder = Path(str(config.hydra.sweep.dir)) / str(config.hydra.sweep.subdir)
    record_lost_job(folder, "killed", reason)


def record_lost_job(folder: Path, status: str, reason: str) -> None:
    """Write how a job without a result ended, unless its own summary states an end."""
    try:
        if Summary.read(folder).status != "running":
            return
    except StorageError:
        log.debug("%s has no summary", folder)
    write_failed_summary(folder, status, reason, "")


@contextmanager
def in_job(config: DictConfig) -> Iterator[None]:
    """While entered in a job: its run saves a checkpoint before submitit puts the job back.

    That begins again in the same folder, and goes on from there.
    """
    from submitit import JobEnvironment

    if os.environ.get("SLURM_RESTART_COUNT", "0") != "0" and config.checkpoint.resume == "none":
        config.checkpoint.resume = "auto"
    number = getattr(signal, f"SIG{JobEnvironment.USR_SIG}")
    put_back = signal.signal(number, signal.SIG_DFL)
    try:
        with signals_unwind():
            yield
    except SystemExit as end:
        if end.code == 128 + number and callable(put_back):
            put_back(number, None)  # ends this process
        raise
