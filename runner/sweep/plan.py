"""What is left to do of a sweep: which jobs were done before, which go on, which begin."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runner.checkpoint.lock import is_locked
from runner.errors import SecurityError, StorageError, UsageError
from runner.record.hydra_files import read_yaml
from runner.sweep.identity import same_versions, sweep_hash
from runner.sweep.job import PATIENCE_S
from runner.sweep.state import FILE, WELL, Job, Sweep, job_folders, jobs_from_folders
from runner.training.summary import Summary

log = logging.getLogger("runner")

POLL_S = 0.1
ASIDE = ".earlier"  # hidden: what is in there is no job of the sweep any more


@dataclass(frozen=True)
class JobSpec:
    """A job that was asked for."""

    number: int
    overrides: list[str]
    folder: str  # where it would lie if nothing lay there
    hash: str = ""
    config_hash: str = ""
    trains: bool = False
    records: bool = False  # it leaves a summary when it has come to its end
    error: str = ""  # why there can be no such job
    settings: Mapping[str, Any] = field(default_factory=dict)  # its config, flat


@dataclass
class JobPlan:
    """A job, and what to do about it."""

    job: Job
    wanted: JobSpec
    done: bool = False  # before
    continues: bool = False  # from the checkpoint in its folder
    replaces: bool = False  # something else that lies in its folder
    unusable: bool = False  # the checkpoints of what it replaces, as far as could be told


def find_sweep(
    planned: Path, named: bool, resume: str, typed: str, flags: Sequence[str]
) -> Path | None:
    """The folder of the sweep to go on with, or None to begin one in `planned`.

    `named` says that `planned` was typed; `typed` is the hash of what was. Raises UsageError.
    """
    if resume == "auto":
        if named:
            return planned if (planned / FILE).exists() else None
        return _newest(planned.parent, typed, flags)
    if resume in ("none", "None", ""):
        if named and (planned / FILE).exists():
            raise UsageError(
                f"{planned} holds a sweep, and sweep.resume=none begins one; name another folder"
            )
        return None
    folder = Path(resume)
    if not folder.is_dir():
        raise UsageError(f"sweep.resume: there is no folder {folder} (looked from {Path.cwd()})")
    if not (folder / FILE).exists() and not (folder / "multirun.yaml").exists():
        raise UsageError(f"sweep.resume: {folder} is no sweep's folder: it has no {FILE}")
    return folder


def _newest(parent: Path, typed: str, flags: Sequence[str]) -> Path | None:
    found = []
    for file in parent.glob(f"*/{FILE}"):
        try:
            same = Sweep.read(file.parent).hash == typed
        except StorageError:
            same = _recorded(file.parent, flags) == typed
        if same:
            with suppress(OSError):
                found.append((file.stat().st_mtime_ns, file.parent))
    return max(found)[1] if found else None


def _recorded(folder: Path, flags: Sequence[str]) -> str:
    """The hash of what Hydra noted as typed."""
    try:
        asked = read_yaml(folder / "multirun.yaml")["hydra"]["overrides"]
        return sweep_hash([str(text) for text in (*asked["hydra"], *asked["task"])], flags)
    except (StorageError, UsageError, LookupError, TypeError):
        return ""


def load_previous_jobs(folder: Path) -> list[Job]:
    """The jobs that an earlier process left in the folder; says so if it cannot be sure."""
    if not (folder / FILE).exists() and next(job_folders(folder), None) is None:
        return []
    try:
        return Sweep.read(folder).jobs
    except StorageError as error:
        log.warning("%s; the jobs are judged by their folders, their code by nothing", error)
        return jobs_from_folders(folder)


def wait_for_running_jobs(folder: Path, jobs: Sequence[Job]) -> None:
    """Wait for processes of these jobs that have outlived their sweep: they write a checkpoint, and
    end by themselves. One that does not is left to say so itself, to the process that comes.
    """
    until = time.monotonic() + PATIENCE_S + POLL_S
    told = False
    while time.monotonic() < until:
        left = [job.folder for job in jobs if is_locked(folder / job.folder)]
        if not left:
            return
        if not told:
            log.info("waiting for jobs that are still ending: %s", ", ".join(left))
            told = True
        time.sleep(POLL_S)


def plan_jobs(wanted: Sequence[JobSpec], earlier: Sequence[Job], folder: Path) -> list[JobPlan]:
    """Each job with its folder: by what it is, else by how it was typed, else a new one."""
    left = list(earlier)
    found: dict[int, JobPlan] = {}

    def match(is_same: Callable[[Job, JobSpec], bool], unchanged: bool) -> None:
        for one in wanted:
            job = next((j for j in left if one.number not in found and is_same(j, one)), None)
            if job is not None:
                left.remove(job)
                found[one.number] = _judged(one, job, unchanged, folder)

    match(lambda job, one: _is_same(job, one, folder) and job.overrides == one.overrides, True)
    match(lambda job, one: _is_same(job, one, folder), True)
    match(lambda job, one: job.overrides == one.overrides, False)
    taken = {planned.job.folder for planned in found.values()} | {job.folder for job in left}
    for one in wanted:
        if one.number not in found:
            place = _free(one.folder, taken, folder)
            taken.add(place)
            found[one.number] = JobPlan(Job(one.number, one.overrides, place, one.hash), one)
    if left:
        names = ", ".join(job.folder for job in left)
        log.info("not asked for any more, and left as they are: %s", names)
    return [found[one.number] for one in wanted]


def _is_same(job: Job, one: JobSpec, folder: Path) -> bool:
    """Whether the job would be the same again, as far as is known."""
    if one.error:
        return False
    if job.hash:
        return job.hash == one.hash
    try:
        summary = Summary.read(folder / job.folder)
    except StorageError:
        return False
    return summary.config_hash == one.config_hash != "" and same_versions(summary.versions)


def _judged(one: JobSpec, job: Job, unchanged: bool, folder: Path) -> JobPlan:
    kept = Job(one.number, one.overrides, job.folder, one.hash)
    if unchanged and job.status in WELL and _ended_well(folder / job.folder):
        kept = replace(job, number=one.number, overrides=one.overrides, hash=one.hash)
        return JobPlan(kept, one, done=True)
    if unchanged:
        kept.tries, kept.seconds, kept.started = job.tries, job.seconds, job.started
    continues = unchanged and can_continue(one, folder / job.folder)
    replaces = not continues and (folder / job.folder).exists()
    return JobPlan(kept, one, continues=continues, replaces=replaces)


def _ended_well(folder: Path) -> bool:
    try:
        return Summary.read(folder).status in WELL
    except StorageError:
        return False


def can_continue(one: JobSpec, folder: Path) -> bool:
    """Whether there is a checkpoint of that training in the folder."""
    return one.trains and any(folder.glob("checkpoints/step_*/manifest.json"))


def _free(wanted: str, taken: set[str], folder: Path) -> str:
    """`wanted`, or the next number that nothing has."""
    if wanted not in taken and not (folder / wanted).exists():
        return wanted
    names = (str(number) for number in range(len(taken) + 10_000))
    return next(n for n in names if n not in taken and not (folder / n).exists())


def archive_job(folder: Path, job: str, weights: bool = False) -> None:
    """Make room for a job that begins again: its log and record of before stay, hidden.

    Weights go unless they are to be kept, and so do curves: a second curve of one job would be a
    job too many in TensorBoard.
    """
    number = 1
    for path in (folder / ASIDE, *(folder / job, *(folder / job).parents)[: len(Path(job).parts)]):
        if path.is_symlink():
            raise SecurityError(
                f"{path}: refused: it is a link, to {path.resolve()}; the jobs of a sweep are "
                "moved and deleted in folders of its own"
            )
    while (place := folder / ASIDE / f"{job.replace('/', '_')}-{number}").exists():
        number += 1
    place.parent.mkdir(exist_ok=True)
    (folder / job).rename(place)
    if not weights:
        shutil.rmtree(place / "checkpoints", ignore_errors=True)
    for file in place.rglob("events.out.tfevents.*"):
        file.unlink(missing_ok=True)
