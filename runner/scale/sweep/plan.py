"""Plan the remaining work of a sweep: jobs that are done, continue, or start."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from runner.core.checkpoint.lock import is_locked
from runner.core.checkpoint.ownership import ARCHIVE, has_lost_weights
from runner.core.errors import SecurityError, StorageError, UsageError
from runner.core.fork_server import START_S
from runner.core.record.digests import changed_files
from runner.core.record.storage import make_folder, remove_file, rename
from runner.core.record.summary import FINISHED_STATUSES, Summary
from runner.scale.sweep.job_context import ORPHAN_GRACE_S
from runner.scale.sweep.state import SWEEP_FILE, Job, Sweep

log = logging.getLogger("runner")

POLL_S = 0.1
NO_RESUME = ("none", "None", "")


@dataclass
class JobPlan:
    """A requested job, and how to run it."""

    job: Job
    trains: bool = False
    writes_summary: bool = False
    error: str = ""  # why the job is invalid
    done: bool = False  # finished by an earlier process
    continues: bool = False  # resumes from the checkpoint in its folder
    replaces: bool = False  # its folder has other content
    unstamped: tuple[str, ...] = ()  # folders of its data that are too large to be compared
    gpu_processes: int = 0  # processes that need a GPU each; 0: it selects its devices itself
    start_s: float = START_S  # for the fork server's imports


def find_sweep(
    planned: Path, folder_typed: bool, resume: str, typed_hash: str, shared: bool = False
) -> Path | None:
    """Return the folder of the sweep to continue; None to start one in `planned`.

    `folder_typed`: `planned` was typed. `shared`: several processes may do the same work, each in
    its own unlocked folder. Raises UsageError.
    """
    exists = (planned / SWEEP_FILE).exists()
    if resume == "auto" and not folder_typed:
        return _find_newest_sweep(planned.parent, typed_hash, shared)
    if resume == "auto":
        return planned if exists else None
    if resume in NO_RESUME:
        if exists and folder_typed:
            problem = f"{planned} already holds a sweep, but sweep.resume=none starts a new one"
            raise UsageError(f"{problem}; choose another folder")
        return None
    folder = Path(resume)
    if not (folder / SWEEP_FILE).exists():
        problem = f"is not a sweep's folder: it has no {SWEEP_FILE} (current folder: {Path.cwd()})"
        raise UsageError(f"sweep.resume: {folder} {problem}")
    return folder


def _find_newest_sweep(parent: Path, typed_hash: str, unlocked_only: bool) -> Path | None:
    sweeps = []
    for file in parent.glob(f"*/{SWEEP_FILE}"):
        try:
            is_taken = unlocked_only and is_locked(file.parent)
            if not is_taken and Sweep.read(file.parent).hash == typed_hash:
                sweeps.append((file.stat().st_mtime_ns, file.parent))
        except (StorageError, OSError):  # a damaged sweep is not continued
            continue
    return max(sweeps)[1] if sweeps else None


def load_previous_jobs(folder: Path) -> list[Job]:
    """Return the jobs that an earlier process recorded in the folder. Raises StorageError."""
    return Sweep.read(folder).jobs if (folder / SWEEP_FILE).exists() else []


def wait_for_running_jobs(folder: Path, jobs: Sequence[Job]) -> None:
    """Wait, for their grace period at most, for jobs that outlived a sweep and are saving."""
    deadline = time.monotonic() + ORPHAN_GRACE_S + POLL_S
    if any(is_locked(folder / job.folder) for job in jobs):
        log.info("waiting for jobs of the previous sweep to end")
    while time.monotonic() < deadline and any(is_locked(folder / job.folder) for job in jobs):
        time.sleep(POLL_S)


class Planner:
    """Matches each requested job with the job of an earlier process that it continues.

    That is the job with the same overrides or, of those no longer requested, the same hash.
    """

    def __init__(
        self,
        folder: Path,
        earlier: Sequence[Job],
        requested: Sequence[Sequence[str]],
        taken_folders: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.unmatched = [j for j in earlier if j.tries or j.ended or (folder / j.folder).exists()]
        self._requested = {tuple(overrides) for overrides in requested}
        self._taken_folders = {*taken_folders, *(job.folder for job in self.unmatched)}

    def match(self, plan: JobPlan) -> JobPlan:
        """Set the plan's folder, and its record if an earlier job is continued."""
        job = plan.job
        same = (x for x in self.unmatched if x.overrides == job.overrides)
        others = (x for x in self.unmatched if tuple(x.overrides) not in self._requested)
        earlier = next(chain(same, (x for x in others if x.hash == job.hash != "")), None)
        if earlier is None:
            job.folder = self._free_folder(job.folder)
            return plan
        self.unmatched.remove(earlier)
        job.folder = earlier.folder
        job_folder = self.folder / job.folder
        if job.hash == earlier.hash != "" and not changed_files(job_folder):
            job.tries, job.seconds, job.started = earlier.tries, earlier.seconds, earlier.started
            plan.done = earlier.status in FINISHED_STATUSES and _has_finished(job_folder)
            if plan.done or earlier.failed:  # unchanged until it starts again
                job.status, job.reason, job.ended = earlier.status, earlier.reason, earlier.ended
                job.exit_code, job.device = earlier.exit_code, earlier.device
            plan.continues = not plan.done and can_continue(plan, job_folder)
        plan.replaces = not (plan.done or plan.continues) and job_folder.exists()
        return plan

    def _free_folder(self, name: str) -> str:
        names, taken = chain([name], map(str, count())), self._taken_folders
        folder = next(x for x in names if x not in taken and not (self.folder / x).exists())
        taken.add(folder)
        return folder


def _has_finished(folder: Path) -> bool:
    with suppress(StorageError):
        return Summary.read(folder).finished
    return False


def can_continue(plan: JobPlan, folder: Path) -> bool:
    """Whether the folder has a checkpoint of this training that is of use."""
    has_any = plan.trains and any(folder.glob("checkpoints/step_*/manifest.json"))
    return has_any and not has_lost_weights(folder)


def archive_job(folder: Path, job: str) -> None:
    """Move the folder of a job that starts over into the hidden archive.

    Its event files are deleted, since TensorBoard would show them as another job.
    """
    job_folder, archive = folder / job, folder / ARCHIVE
    for path in (archive, *(job_folder, *job_folder.parents)[: len(Path(job).parts)]):
        if path.is_symlink():
            problem = f"{path}: refused: it is a link, to {path.resolve()}"
            raise SecurityError(f"{problem}; jobs are moved only within the sweep's folder")
    make_folder(archive)
    names = (archive / f"{job.replace('/', '_')}-{number}" for number in count(1))
    earlier = next(name for name in names if not os.path.lexists(name))
    rename(job_folder, earlier)
    for file in earlier.rglob("events.out.tfevents.*"):
        remove_file(file)
