"""What a command finds before a run is built: its weights, and an unfinished run to continue."""

from __future__ import annotations

import json
from pathlib import Path

from runner.checkpoint.lock import is_locked
from runner.config import RunConfig
from runner.data.paths import existing
from runner.jobs.config import EVALUATING, JobKind
from runner.overrides.recorded import CHECKPOINTS
from runner.record.storage import read_record

ENDED = ("done", "stopped")
BUILDS = (JobKind.train, *EVALUATING, JobKind.benchmark, JobKind.verify)


def check_weights_exist(config: RunConfig) -> None:
    """Raise ConfigError where `model.weights` is to be read and does not exist.

    A run that continues from a checkpoint does not read it.
    """
    path = config.model.weights
    if path is not None and config.job.kind in BUILDS and config.checkpoint.resume == "none":
        existing(path, "model.weights")


def unfinished(planned: Path, config_hash: str) -> Path | None:
    """The newest run beside `planned` of that config that has checkpoints, no end and no owner."""
    runs = []
    for file in planned.parent.glob("*/summary.json"):
        try:
            summary = json.loads(read_record(file))
            written = file.stat().st_mtime_ns
        except (OSError, ValueError):  # an unreadable run is no candidate
            continue
        same = isinstance(summary, dict) and summary.get("config_hash") == config_hash
        if same and summary.get("status") not in ENDED and (file.parent / CHECKPOINTS).is_dir():
            runs.append((written, file.parent))
    newest_first = (folder for _, folder in sorted(runs, reverse=True))
    return next((folder for folder in newest_first if not is_locked(folder)), None)
