"""Jobs, one module each; a module is imported only when its job is requested."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from runner.jobs.config import JobKind

if TYPE_CHECKING:
    from runner.config import RunConfig

Job = Callable[["RunConfig", Path], object]
"""Returns a Summary if there was a run."""

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
"""The module of each job; its `main` runs the job."""


def find(kind: JobKind) -> Job:
    """Return the `main` of a job."""
    job: Job = import_module(JOBS[kind]).main
    return job
