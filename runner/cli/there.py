"""Files that a config names, looked for before torch is imported and a folder is made."""

from __future__ import annotations

from runner.config import RunConfig
from runner.data.paths import existing
from runner.jobs.config import JobKind

BUILDS = (JobKind.train, JobKind.evaluate, JobKind.benchmark, JobKind.verify)


def check_there(config: RunConfig) -> None:
    """Raise ConfigError where `model.weights` is to be read and is not there.

    A run that goes on from a checkpoint does not read it.
    """
    path = config.model.weights
    if path is not None and config.job.kind in BUILDS and config.checkpoint.resume == "none":
        existing(path, "model.weights")
