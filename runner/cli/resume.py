"""Find the runs that a command refers to: weights, unfinished runs, captured steps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from runner.core.captures.manifest import find_capture, read_manifest
from runner.core.checkpoint.lock import is_locked
from runner.core.checkpoint.manifest import Manifest
from runner.core.checkpoint.manifest import read_manifest as read_checkpoint
from runner.core.config.composing import config_from_plain
from runner.core.config.recorded import CHECKPOINTS
from runner.core.config.run_config import RunConfig
from runner.core.config.spelling import parse_override
from runner.core.data.paths import existing_path
from runner.core.errors import CheckpointError, ConfigError, StorageError
from runner.core.record.storage import OLD_PREFIX
from runner.core.record.summary import Summary
from runner.core.schemas.data import FromFiles
from runner.core.schemas.jobs import EVALUATION_JOBS, JobKind

REPLAY_KEY = "replay.path"
REPLAY_KEYS = ("job", "replay", "security", "monitoring", "hydra", "name")
NAME_PATTERN = re.compile(r"[\w.-]+", re.ASCII)
BUILD_JOBS = (JobKind.train, *EVALUATION_JOBS, JobKind.benchmark, JobKind.verify)


def check_inputs_exist(config: RunConfig) -> None:
    """Raise ConfigError if `model.weights` or `data.path` will be read and does not exist.

    A run that resumes from a checkpoint does not read `model.weights`, a prompt no data.
    """
    if config.job.kind not in BUILD_JOBS:
        return
    if config.model.weights is not None and config.checkpoint.resume == "none":
        existing_path(config.model.weights, "model.weights")
    if isinstance(config.data, FromFiles) and config.predict.prompt is None:
        existing_path(config.data.path)


def find_unfinished_run(planned: Path, config_hash: str) -> Path | None:
    """Return the unfinished, unlocked run of this config beside `planned` with the most steps.

    A run with a damaged or missing summary is unfinished; its checkpoints have the config's hash.
    """
    runs = []
    for checkpoints in planned.parent.glob(f"*/{CHECKPOINTS}"):
        folder = checkpoints.parent
        summary, manifests = Summary(), _read_manifests(checkpoints)
        with suppress(StorageError):
            summary = Summary.read(folder)
        hashes = {summary.config_hash, *(m.config_hash for m in manifests[-1:])}
        if config_hash in hashes and not summary.finished:
            runs.append((manifests[-1].step if manifests else -1, folder))
    furthest_first = (folder for _, folder in sorted(runs, reverse=True))
    return next((folder for folder in furthest_first if not is_locked(folder)), None)


def _read_manifests(checkpoints: Path) -> list[Manifest]:
    """Return the readable manifests, sorted by step."""
    manifests = []
    for folder in (*checkpoints.glob("step_*"), *checkpoints.glob(f"{OLD_PREFIX}step_*")):
        with suppress(CheckpointError):
            manifests.append(read_checkpoint(folder))
    return sorted(manifests, key=lambda manifest: manifest.step)


def add_captured_name(overrides: Sequence[str], trusted: Sequence[str]) -> list[str]:
    """Add the captured run's name to the overrides, if they replay one.

    Raises CheckpointError for a path that does not exist or is damaged, UsageError for one that is
    something else, SecurityError for code that is not `trusted`, and ConfigError for a key that
    would change the captured step.
    """
    parsed = [parse_override(text) for text in overrides]
    paths = [o for o in parsed if o.key == REPLAY_KEY and o.sign != "~"]
    if not paths or not any(o.key in ("job", "job.kind") and o.value == "replay" for o in parsed):
        return list(overrides)
    if paths[-1].parsed.is_sweep_override():
        raise ConfigError(REPLAY_KEY, "names several captures", "replay one at a time")
    path = paths[-1].parsed.value()
    if path in (None, ""):  # the config's own check reports it
        return [str(o) for o in parsed if o.key != REPLAY_KEY]
    for override in parsed:
        if re.split(r"[./@]", override.key)[0] not in REPLAY_KEYS:
            problem = "has no effect: a step is replayed with the config of its run"
            raise ConfigError(override.key, problem, "leave it out")
    manifest = read_manifest(find_capture(Path(str(path))))
    config_from_plain(manifest.config, trusted)  # checked before a folder is created
    if NAME_PATTERN.fullmatch(manifest.name) and all(o.key != "name" for o in parsed):
        return [*overrides, f"name={manifest.name}"]
    return list(overrides)
