"""Jobs: one module each, imported on demand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from runner import rooms
from runner.core.config.run_config import RunConfig
from runner.core.schemas.jobs import JobKind

JobMain = Callable[[RunConfig, Path], object]
"""Returns a Summary if there was a run."""


def load_job(kind: JobKind) -> JobMain:
    """Import and return the job's `main`."""
    job: JobMain = rooms.find("job", kind.value, f"job={kind.value}")
    return job
