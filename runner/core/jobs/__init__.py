"""Jobs: one module each, imported on demand."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from runner.core.schemas.jobs import JobKind

if TYPE_CHECKING:
    from runner.core.config.run_config import RunConfig

JobMain = Callable[["RunConfig", Path], object]
"""Returns a Summary if there was a run."""

JOBS: dict[JobKind, str] = {
    JobKind.train: "runner.core.jobs.train",
    JobKind.evaluate: "runner.core.jobs.evaluate",
    JobKind.predict: "runner.datasets.predict",
    JobKind.doctor: "runner.diagnose.doctor.job",
    JobKind.verify: "runner.measure.verify.job",
    JobKind.replay: "runner.diagnose.replay.job",
    JobKind.benchmark: "runner.measure.benchmark.job",
    JobKind.scan: "runner.scan.job",
}
"""The module with the job's `main`."""


def load_job(kind: JobKind) -> JobMain:
    """Import and return the job's `main`."""
    job: JobMain = import_module(JOBS[kind]).main
    return job
