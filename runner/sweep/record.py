"""What a sweep is made of and how far it has come: `sweep.json`, written after each change."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]  # what OmegaConf reads files with

from runner.errors import StorageError
from runner.storage import replace_text
from runner.summary import Summary

log = logging.getLogger("runner")

FILE = "sweep.json"
WAITING, RUNNING, SKIPPED = "waiting", "running", "skipped"
WELL = ("done", "stopped")
"""How a job ends that is not run again. Otherwise: interrupted failed killed timeout oom skipped"""


@dataclass
class Job:
    """One job of a sweep."""

    number: int  # as Hydra counts them
    overrides: list[str]
    folder: str  # relative to the sweep's
    hash: str = ""  # of config, code, versions and device; "" where that is not known
    status: str = WAITING
    reason: str = ""
    started: str = ""  # ISO 8601
    ended: str = ""
    seconds: float = 0.0  # of all tries
    tries: int = 0
    exit_code: int | None = None  # of the last try; -9: killed by signal 9
    command: str = ""  # does the same by itself

    @property
    def failed(self) -> bool:
        """Whether it has come to a bad end; what was never begun has not."""
        return self.status not in (*WELL, WAITING, RUNNING, SKIPPED)

    @property
    def title(self) -> str:
        """Its number and what sets it up."""
        return f"#{self.number} {' '.join(self.overrides)}"


@dataclass
class Sweep:
    """All jobs of a sweep."""

    command: str  # as typed
    hash: str  # of what was typed, by which the same command finds it again
    jobs: list[Job] = field(default_factory=list)
    started: str = ""
    ended: str = ""
    schema: int = 1

    @property
    def failures(self) -> list[Job]:
        """The jobs that came to a bad end."""
        return [job for job in self.jobs if job.failed]

    def write(self, folder: Path) -> None:
        """Replace `sweep.json`, never leaving half of one. A disk that does not take it is a
        warning: jobs are then judged by their folders.
        """
        text = json.dumps(asdict(self), indent=2) + "\n"
        try:
            replace_text(folder / FILE, text)
        except OSError as error:
            log.warning("%s: not written: %s", folder / FILE, error.strerror or error)

    @classmethod
    def read(cls, folder: Path) -> Sweep:
        """What stands in a sweep's folder. StorageError where there is none or it is damaged."""
        path = folder / FILE
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            jobs = [_job(values) for values in found["jobs"]]
            return cls(str(found["command"]), str(found["hash"]), jobs, str(found["started"]))
        except FileNotFoundError:
            raise StorageError(f"{path}: there is none") from None
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise StorageError(f"{path}: damaged ({type(error).__name__}: {error})") from error


def now() -> str:
    """The time, as it is written down."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def by_their_folders(folder: Path) -> list[Job]:
    """The jobs of a sweep as far as their own folders tell; without hashes."""
    found: list[Job] = []
    for inside in sorted(folder.glob("*/.hydra/overrides.yaml"), key=_in_order):
        place = inside.parents[1]
        try:
            lines = OmegaConf.to_container(OmegaConf.load(inside), resolve=False)
            status = Summary.read(place).status
        except (OSError, ValueError, YAMLError, OmegaConfBaseException, StorageError):
            continue  # it is run again
        if isinstance(lines, list):
            own = [str(line) for line in lines if not str(line).startswith("++monitoring.domains")]
            found.append(Job(len(found), own, place.name, status=status, tries=1))
    return found


def _in_order(path: Path) -> tuple[int, str]:
    name = path.parents[1].name
    return (len(name) if name.isdigit() else 99, name)


def _job(values: dict[str, Any]) -> Job:
    known = {f.name for f in fields(Job)}
    job = Job(**{name: value for name, value in values.items() if name in known})
    texts = (job.folder, job.hash, job.status, job.reason, *job.overrides)
    if not all(isinstance(text, str) for text in texts) or not isinstance(job.tries, int):
        raise TypeError("a job of other types")
    inside = Path(job.folder)
    if inside.is_absolute() or ".." in inside.parts or not inside.parts:
        raise ValueError(f"a job's folder {job.folder!r} is not in the sweep's")
    return job
