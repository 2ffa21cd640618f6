"""Jobs: one module each, imported on demand."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from runner.jobs.config import JobKind

if TYPE_CHECKING:
    from runner.config import RunConfig

JobMain = Callable[["RunConfig", Path], object]
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
"""The module with the job's `main`."""


def load_job(kind: JobKind) -> JobMain:
    """Import and return the job's `main`."""
    job: JobMain = import_module(JOBS[kind]).main
    return job
