"""Plan of a sweep: which jobs are done, which continue, and which begin."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from runner.checkpoint.lock import is_locked
from runner.errors import SecurityError, StorageError, UsageError
from runner.sweep.job import GRACE_S
from runner.sweep.state import FILE, WELL, Job, Sweep
from runner.training.summary import Summary

log = logging.getLogger("runner")

POLL_S = 0.1
NO_RESUME = ("none", "None", "")
ARCHIVE = ".earlier"  # hidden: its folders are no jobs of the sweep


@dataclass
class JobPlan:
    """A requested job, and what to do with it."""

    job: Job
    trains: bool = False
    records: bool = False  # whether it writes a summary
    error: str = ""  # why it cannot run
    done: bool = False  # by an earlier process
    continues: bool = False  # from the checkpoint in its folder
    replaces: bool = False  # its folder is archived first


def find_sweep(
    planned: Path, named: bool, resume: str, typed_hash: str, shared: bool = False
) -> Path | None:
    """Return the folder of the sweep to continue, or None to begin one in `planned`.

    `named`: `planned` was typed. `shared`: several processes may run the same sweep, each in its
    own folder. Raises UsageError.
    """
    exists = (planned / FILE).exists()
    if resume == "auto" and not named:
        return _newest(planned.parent, typed_hash, shared)
    if resume == "auto":
        return planned if exists else None
    if resume in NO_RESUME:
        if exists and named:
            problem = f"{planned} holds a sweep, and sweep.resume=none begins one"
            raise UsageError(f"{problem}; name another folder")
        return None
    folder = Path(resume)
    if not (folder / FILE).exists():
        problem = f"is no sweep's folder: it has no {FILE} (looked from {Path.cwd()})"
        raise UsageError(f"sweep.resume: {folder} {problem}")
    return folder


def _newest(parent: Path, typed_hash: str, free: bool) -> Path | None:
    sweeps = []
    for file in parent.glob(f"*/{FILE}"):
        try:
            taken = free and is_locked(file.parent)
            if not taken and Sweep.read(file.parent).hash == typed_hash:
                sweeps.append((file.stat().st_mtime_ns, file.parent))
        except (StorageError, OSError):  # a damaged sweep is not continued
            continue
    return max(sweeps)[1] if sweeps else None


def load_previous_jobs(folder: Path) -> list[Job]:
    """Load the jobs of an earlier process from the folder. Raises StorageError."""
    return Sweep.read(folder).jobs if (folder / FILE).exists() else []


def wait_for_running_jobs(folder: Path, jobs: Sequence[Job]) -> None:
    """Wait up to GRACE_S for processes that outlived their sweep and write a checkpoint.

    A job that is still locked afterwards reports that itself.
    """
    until, logged = time.monotonic() + GRACE_S + POLL_S, False
    while time.monotonic() < until and any(is_locked(folder / job.folder) for job in jobs):
        if not logged:
            log.info("waiting for jobs of the sweep before that are still ending")
        logged = True
        time.sleep(POLL_S)


class Planner:
    """Matches each requested job with the job of an earlier process that it continues.

    That has the same overrides, or else the same hash and overrides that are not requested. So a
    job can be planned before the next one is composed.
    """

    def __init__(
        self,
        folder: Path,
        earlier: Sequence[Job],
        requested: Sequence[Sequence[str]],
        taken: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.left = [j for j in earlier if j.tries or j.ended or (folder / j.folder).exists()]
        self._requested = {tuple(overrides) for overrides in requested}
        self._taken = {*taken, *(job.folder for job in self.left)}

    def place(self, name: str) -> str:
        """Reserve a job's folder: `name`, or the first free number."""
        names = chain([name], map(str, count()))
        free = next(n for n in names if n not in self._taken and not (self.folder / n).exists())
        self._taken.add(free)
        return free

    def take(self, overrides: Sequence[str], hash: str = "") -> Job | None:
        """Remove and return the earlier job that matches overrides or hash; None without one."""
        same = (job for job in self.left if job.overrides == overrides)
        others = (job for job in self.left if tuple(job.overrides) not in self._requested)
        job = next(chain(same, (job for job in others if hash == job.hash != "")), None)
        if job is not None:
            self.left.remove(job)
        return job

    def match(self, plan: JobPlan) -> JobPlan:
        """Complete the plan with the matching earlier job's folder and record, or a new folder."""
        job = plan.job
        earlier = self.take(job.overrides, job.hash)
        if earlier is None:
            job.folder = self.place(job.folder)
            return plan
        job.folder = earlier.folder
        place = self.folder / job.folder
        if job.hash == earlier.hash != "":
            job.tries, job.seconds, job.started = earlier.tries, earlier.seconds, earlier.started
            plan.done = earlier.status in WELL and _ended_well(place)
            if plan.done or earlier.failed:  # kept until it starts again
                job.status, job.reason, job.ended = earlier.status, earlier.reason, earlier.ended
                job.exit_code = earlier.exit_code
            plan.continues = not plan.done and can_continue(plan, place)
        plan.replaces = not (plan.done or plan.continues) and place.exists()
        return plan


def _ended_well(folder: Path) -> bool:
    try:
        return Summary.read(folder).status in WELL
    except StorageError:
        return False


def can_continue(plan: JobPlan, folder: Path) -> bool:
    """Whether the job trains and its folder has a checkpoint."""
    return plan.trains and any(folder.glob("checkpoints/step_*/manifest.json"))


def archive_job(folder: Path, job: str) -> None:
    """Move the folder of a restarted job into a hidden archive.

    Its TensorBoard files are deleted, since they would appear as another job.
    """
    place, archive = folder / job, folder / ARCHIVE
    for path in (archive, *(place, *place.parents)[: len(Path(job).parts)]):
        if path.is_symlink():
            problem = f"{path}: refused: it is a link, to {path.resolve()}"
            raise SecurityError(f"{problem}; jobs are moved in folders of the sweep's own")
    archive.mkdir(exist_ok=True)
    names = (archive / f"{job.replace('/', '_')}-{number}" for number in count(1))
    earlier = place.rename(next(name for name in names if not name.exists()))
    for file in earlier.rglob("events.out.tfevents.*"):
        file.unlink(missing_ok=True)
