"""The work left of a sweep: which jobs are done, which continue, which begin."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runner.checkpoint.lock import is_locked
from runner.errors import SecurityError, StorageError, UsageError
from runner.sweep.job import GRACE_S
from runner.sweep.state import FILE, WELL, Job, Sweep
from runner.training.summary import Summary

log = logging.getLogger("runner")

POLL_S = 0.1
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
    settings: Mapping[str, Any] = field(default_factory=dict)  # its config, flat


@dataclass
class JobPlan:
    """A job, and what to do about it."""

    job: Job
    spec: JobSpec
    done: bool = False  # by an earlier process
    continues: bool = False  # from the checkpoint in its folder
    replaces: bool = False  # something else that lies in its folder
    unusable: bool = False  # the checkpoints of what it replaces


def find_sweep(planned: Path, named: bool, resume: str, typed_hash: str) -> Path | None:
    """The folder of the sweep to continue, or None to begin one in `planned`.

    `named` says that `planned` was typed. Raises UsageError.
    """
    exists = (planned / FILE).exists()
    if resume == "auto":
        return (planned if exists else None) if named else _newest(planned.parent, typed_hash)
    if resume in ("none", "None", ""):
        if named and exists:
            raise UsageError(
                f"{planned} holds a sweep, and sweep.resume=none begins one; name another folder"
            )
        return None
    folder = Path(resume)
    if not folder.is_dir():
        raise UsageError(f"sweep.resume: there is no folder {folder} (looked from {Path.cwd()})")
    if not (folder / FILE).exists():
        raise UsageError(f"sweep.resume: {folder} is no sweep's folder: it has no {FILE}")
    return folder


def _newest(parent: Path, typed_hash: str) -> Path | None:
    sweeps = []
    for file in parent.glob(f"*/{FILE}"):
        try:
            if Sweep.read(file.parent).hash == typed_hash:
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
    reported = False
    while time.monotonic() < until:
        running = [job.folder for job in jobs if is_locked(folder / job.folder)]
        if not running:
            return
        if not reported:
            log.info("waiting for jobs that are still ending: %s", ", ".join(running))
            reported = True
        time.sleep(POLL_S)


def plan_jobs(specs: Sequence[JobSpec], earlier: Sequence[Job], folder: Path) -> list[JobPlan]:
    """Each job with its folder: by its hash, else by its overrides, else a new one."""
    left = list(earlier)
    plans: dict[int, JobPlan] = {}

    def match(is_same: Callable[[Job, JobSpec], bool], unchanged: bool) -> None:
        for spec in specs:
            job = next((j for j in left if spec.number not in plans and is_same(j, spec)), None)
            if job is not None:
                left.remove(job)
                plans[spec.number] = _plan(spec, job, unchanged, folder)

    match(lambda job, spec: spec.hash == job.hash != "" and job.overrides == spec.overrides, True)
    match(lambda job, spec: spec.hash == job.hash != "", True)
    match(lambda job, spec: job.overrides == spec.overrides, False)
    taken = {plan.job.folder for plan in plans.values()} | {job.folder for job in left}
    for spec in specs:
        if spec.number not in plans:
            place = _free(spec.folder, taken, folder)
            taken.add(place)
            plans[spec.number] = JobPlan(Job(spec.number, spec.overrides, place, spec.hash), spec)
    if left:
        names = ", ".join(job.folder for job in left)
        log.info("not asked for any more, and left as they are: %s", names)
    return [plans[spec.number] for spec in specs]


def _plan(spec: JobSpec, earlier: Job, unchanged: bool, folder: Path) -> JobPlan:
    place = folder / earlier.folder
    if unchanged and earlier.status in WELL and _ended_well(place):
        done = replace(earlier, number=spec.number, overrides=spec.overrides, hash=spec.hash)
        return JobPlan(done, spec, done=True)
    job = Job(spec.number, spec.overrides, earlier.folder, spec.hash)
    if unchanged:
        job.tries, job.seconds, job.started = earlier.tries, earlier.seconds, earlier.started
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


def _free(name: str, taken: set[str], folder: Path) -> str:
    """`name`, or the next number that no other job has."""
    names = (name, *(str(number) for number in range(len(taken) + 10_000)))
    return next(n for n in names if n not in taken and not (folder / n).exists())


def archive_job(folder: Path, job: str, weights: bool = False) -> None:
    """Move the folder of a job that begins again out of the way, hidden.

    Its checkpoints are deleted unless `weights`, and so are its curves: TensorBoard would show them
    as another job.
    """
    number = 1
    for path in (
        folder / ARCHIVE,
        *(folder / job, *(folder / job).parents)[: len(Path(job).parts)],
    ):
        if path.is_symlink():
            raise SecurityError(
                f"{path}: refused: it is a link, to {path.resolve()}; the jobs of a sweep are "
                "moved and deleted in folders of its own"
            )
    while (place := folder / ARCHIVE / f"{job.replace('/', '_')}-{number}").exists():
        number += 1
    place.parent.mkdir(exist_ok=True)
    (folder / job).rename(place)
    if not weights:
        shutil.rmtree(place / "checkpoints", ignore_errors=True)
    for file in place.rglob("events.out.tfevents.*"):
        file.unlink(missing_ok=True)
