"""The work left of a sweep: which jobs are done, which continue, which begin."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class JobSpec:
    """A job that was asked for."""

    number: int
    overrides: list[str]
    folder: str  # relative to the sweep's, unless another job has it
    hash: str = ""
    trains: bool = False
    records: bool = False  # it leaves a summary at its end
    error: str = ""  # why there can be no such job


@dataclass
class JobPlan:
    """A job, and what to do about it."""

    job: Job
    spec: JobSpec
    done: bool = False  # by an earlier process
    continues: bool = False  # from the checkpoint in its folder
    replaces: bool = False  # something else that lies in its folder


def find_sweep(
    planned: Path, named: bool, resume: str, typed_hash: str, shared: bool = False
) -> Path | None:
    """The folder of the sweep to continue, or None to begin one in `planned`.

    `named` says that `planned` was typed; `shared` that several processes may do the same work,
    each in a folder that no other one writes to. Raises UsageError.
    """
    exists = (planned / FILE).exists()
    if resume == "auto" and not named:
        return _newest(planned.parent, typed_hash, shared)
    if resume in ("auto", *NO_RESUME):
        if exists and resume != "auto" and named:
            problem = f"{planned} holds a sweep, and sweep.resume=none begins one"
            raise UsageError(f"{problem}; name another folder")
        return planned if exists and resume == "auto" else None
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
    """The jobs that an earlier process left in the folder. Raises StorageError."""
    return Sweep.read(folder).jobs if (folder / FILE).exists() else []


def wait_for_running_jobs(folder: Path, jobs: Sequence[Job]) -> None:
    """Wait for processes of these jobs that have outlived their sweep and write a checkpoint.

    For the time that they have for it; a job that is still locked then reports that itself.
    """
    until = time.monotonic() + GRACE_S + POLL_S
    if any(is_locked(folder / job.folder) for job in jobs):
        log.info("waiting for jobs of the sweep before that are still ending")
    while time.monotonic() < until and any(is_locked(folder / job.folder) for job in jobs):
        time.sleep(POLL_S)


class Planner:
    """Finds for each job that is asked for the one of an earlier process that it goes on with.

    That is the one with the same overrides, else, of those whose overrides are not asked for, one
    with the same hash. So a job can be planned before the next one is composed.
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

    def plan(self, spec: JobSpec) -> JobPlan:
        """The job with its folder: the earlier one's, or a new one."""
        job = self._earlier(spec)
        if job is None:
            return JobPlan(
                Job(spec.number, spec.overrides, self.place(spec.folder), spec.hash), spec
            )
        self.left.remove(job)
        return _plan(spec, job, spec.hash == job.hash != "", self.folder)

    def place(self, name: str) -> str:
        """`name`, or the first number that no other job has."""
        names = chain([name], map(str, count()))
        free = next(n for n in names if n not in self._taken and not (self.folder / n).exists())
        self._taken.add(free)
        return free

    def take(self, overrides: Sequence[str]) -> Job | None:
        """The earlier process's job with these overrides; it belongs to no other then."""
        job = next((job for job in self.left if job.overrides == overrides), None)
        if job is not None:
            self.left.remove(job)
        return job

    def _earlier(self, spec: JobSpec) -> Job | None:
        same = (job for job in self.left if job.overrides == spec.overrides)
        others = (job for job in self.left if tuple(job.overrides) not in self._requested)
        alike = (job for job in others if spec.hash == job.hash != "")
        return next(chain(same, alike), None)


def _plan(spec: JobSpec, earlier: Job, unchanged: bool, folder: Path) -> JobPlan:
    place = folder / earlier.folder
    if unchanged and earlier.status in WELL and _ended_well(place):
        done = replace(earlier, number=spec.number, overrides=spec.overrides, hash=spec.hash)
        return JobPlan(done, spec, done=True)
    job = Job(spec.number, spec.overrides, earlier.folder, spec.hash)
    if unchanged:
        job.tries, job.seconds, job.started = earlier.tries, earlier.seconds, earlier.started
    if unchanged and earlier.failed:  # that stays true until it has begun again
        job.status, job.reason, job.ended = earlier.status, earlier.reason, earlier.ended
        job.exit_code = earlier.exit_code
    continues = unchanged and can_continue(spec, place)
    return JobPlan(job, spec, continues=continues, replaces=not continues and place.exists())


def _ended_well(folder: Path) -> bool:
    try:
        return Summary.read(folder).status in WELL
    except StorageError:
        return False


def can_continue(spec: JobSpec, folder: Path) -> bool:
    """Whether there is a checkpoint of that training in the folder."""
    return spec.trains and any(folder.glob("checkpoints/step_*/manifest.json"))


def archive_job(folder: Path, job: str) -> None:
    """Move the folder of a job that begins again out of the way, hidden.

    Its curves are deleted: TensorBoard would show them as another job.
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
