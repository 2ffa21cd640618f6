"""The jobs of a sweep and their progress: `sweep.json`, written after each change."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from runner.core.config.groups import without_arguments
from runner.core.errors import StorageError, UsageError, error_text
from runner.core.record.hydra_files import SWEEP, overrides_by_key, read_yaml
from runner.core.record.storage import read_record, write_or_log
from runner.core.record.summary import FINISHED_STATUSES
from runner.core.record.text import dataclass_from_json, shorten

SWEEP_FILE = "sweep.json"
WAITING, RUNNING, SKIPPED = "waiting", "running", "skipped"
LONGEST_TITLE = 80  # characters of a job's title in a message
MAX_NAME_BYTES = 240  # bytes of a path component; file systems allow 255


@dataclass
class Job:
    """One job of a sweep."""

    number: int  # Hydra's job number
    overrides: list[str]
    folder: str  # relative to the sweep's
    hash: str = ""  # see `job_hash`; "" for a job that cannot be composed
    status: str = WAITING
    reason: str = ""
    started: str = ""  # ISO 8601
    ended: str = ""
    seconds: float = 0.0  # over all tries
    tries: int = 0
    exit_code: int | None = None  # of the last try; -9: killed by signal 9
    command: str = ""  # runs the job alone
    device: str = ""  # the GPUs that the launcher assigned to it; "": it selected its devices

    @property
    def failed(self) -> bool:
        """Whether it ended badly; a job that never started has not."""
        return self.status not in (*FINISHED_STATUSES, WAITING, RUNNING, SKIPPED)

    @property
    def title(self) -> str:
        """Number and overrides, for messages."""
        return f"#{self.number} {' '.join(map(without_arguments, self.overrides))}"

    def short_title(self, shared: Mapping[str, str]) -> str:
        """Its title in a line of progress, which ends with what is in `shared_overrides`."""
        typed = shared.items()
        overrides = sorted(self.overrides, key=lambda x: overrides_by_key([x]).items() <= typed)
        return shorten(replace(self, overrides=overrides).title, LONGEST_TITLE)


@dataclass
class Sweep:
    """All jobs of a sweep."""

    command: str  # as typed
    hash: str  # of the overrides, to find the sweep again
    jobs: list[Job] = field(default_factory=list)
    started: str = ""
    ended: str = ""
    start: str = ""  # how the last jobs were started: fork | spawn
    schema: int = 1

    def write(self, folder: Path) -> None:
        """Replace `sweep.json` atomically; an OSError is logged."""
        write_or_log(folder / SWEEP_FILE, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Sweep:
        """Read the sweep of a folder. Raises StorageError if missing or damaged."""
        path = folder / SWEEP_FILE
        try:
            record = json.loads(read_record(path))
            jobs = list(map(_parse_job, record["jobs"]))
            if len({job.folder for job in jobs}) < len(jobs):
                raise ValueError("two jobs have one folder")
            return cls(str(record["command"]), str(record["hash"]), jobs, str(record["started"]))
        except FileNotFoundError:
            raise StorageError(f"{path}: does not exist") from None
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise StorageError(f"{path}: damaged ({error_text(error)})") from error


def utc_now() -> str:
    """Return the current time as recorded: ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _parse_job(values: Any) -> Job:
    job = dataclass_from_json(Job, dict(values))
    if not math.isfinite(job.seconds):
        raise TypeError("a job has values of other types")
    folder = Path(job.folder)
    longest = max((len(os.fsencode(part)) for part in folder.parts), default=MAX_NAME_BYTES + 1)
    is_outside = folder.is_absolute() or ".." in folder.parts or "\0" in job.folder
    if is_outside or longest > MAX_NAME_BYTES:
        name = job.folder[:MAX_NAME_BYTES]
        raise ValueError(f"a job's folder {name!r} is outside the sweep's folder")
    return job


@dataclass
class SweepSession:
    """A requested sweep; the launcher records its progress in `sweep`."""

    folder: Path
    command: str  # as typed
    flags: list[str] = field(default_factory=list)  # Hydra flags that jobs need: --config-dir=…
    hash: str = ""  # of the overrides
    quiet: bool = False  # show warnings alone, as its first job does
    resumed: bool = False  # its folder was named to be resumed, so it is untrusted
    sweep: Sweep | None = None
    earlier_jobs: list[Job] = field(default_factory=list)  # of another process, not matched yet
    search_plan: Any = None  # a SearchPlan, if the jobs are trials
    warned_of_shared_gpus: bool = False
    composed: list[tuple[Job, Any]] = field(default_factory=list)  # with its DictConfig
    has_run: bool = False  # whether this process has run a job
    sweeper_overrides: list[str] = field(default_factory=list)  # that select another sweeper


_CURRENT: ContextVar[SweepSession | None] = ContextVar("runner.scale.sweep", default=None)


def shared_overrides(job_folder: Path) -> dict[str, str]:
    """Return the overrides that were typed for the sweep of a job's folder, by key.

    A job has those of them that do not vary as they were typed.
    """
    try:
        recorded = read_yaml(job_folder.absolute().parent / SWEEP)
        return overrides_by_key(recorded["hydra"]["overrides"]["task"])
    except (StorageError, KeyError, TypeError):
        return {}


@contextmanager
def active_session(session: SweepSession) -> Iterator[SweepSession]:
    """Make `session` the one that the launcher uses within the context."""
    token = _CURRENT.set(session)
    try:
        yield session
    finally:
        _CURRENT.reset(token)


def current_session() -> SweepSession:
    """Return the active session. UsageError if not started by `python -m runner`."""
    if (session := _CURRENT.get()) is None:
        problem = "hydra/launcher=isolated: is for `python -m runner -m …`"
        raise UsageError(f"{problem}; use another launcher here")
    return session
