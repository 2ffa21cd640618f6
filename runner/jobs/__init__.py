"""What can be done with a run, one module a job; each is imported only when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from runner.jobs.config import JobKind

if TYPE_CHECKING:
    from runner.config import RunConfig

Job = Callable[["RunConfig", Path], object]
"""What it returns is a Summary where there was a run."""

JOBS: dict[JobKind, str] = {
    JobKind.train: "runner.jobs.train",
    JobKind.evaluate: "runner.jobs.evaluate",
    JobKind.predict: "runner.jobs.predict",
    JobKind.doctor: "runner.jobs.doctor",
    JobKind.verify: "runner.verify.job",
    JobKind.replay: "runner.jobs.replay",
    JobKind.benchmark: "runner.jobs.benchmark",
    JobKind.scan: "runner.jobs.scan",
}
"""The module whose `main` does it."""


def find(kind: JobKind) -> Job:
    """The job's `main`."""
    job: Job = import_module(JOBS[kind]).main
    return job
