"""What a capture's folder holds, and which folder is meant. No torch at import.

debug/captures/step_00000123/
    manifest.json      what the step was, the run's config, sha256 of the files beside it
    state.pt           batch, indices of its samples, numbers, random state, optimizer state
    model.safetensors  weights and buffers; not where only a checkpoint leads to them
    checkpoint/        hard links to the last checkpoint before the step
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from runner.checkpoint.manifest import MODEL, NAME, STATE
from runner.errors import CheckpointError, UsageError
from runner.record.storage import FileDigest, HashedFile, read_record
from runner.security.sealed import read_sealed, sealed

FOLDER = "debug/captures"
REPLAY = "replay.json"  # what job=replay leaves in its own folder
CHECKPOINT = "checkpoint"  # the folder of the linked one
STEP = re.compile(r"step_\d{8,}", re.ASCII)
FORMAT = 1
KINDS: dict[str, Any] = {
    "step": int,
    "seed": int,
    "micro_batch": int,
    "threads": int,
    "checkpoint": int | None,
    "kind": str,
    "message": str,
    "name": str,
    "config_hash": str,
    "loss": str,
    "grad_norm": str,
    "config": dict,
    "choices": dict,
    "device": dict,
    "versions": dict,
    "given": list,
}
"""Of what type a field is: a forged one must not become text elsewhere."""


class Weights(Enum):
    """Which weights, buffers and optimizer state model.safetensors and state.pt hold."""

    then = "then"  # those of the step: nothing was updated since
    again = "again"  # none: the linked checkpoint and some steps lead to them
    later = "later"  # those of some steps later, for want of anything better


@dataclass(frozen=True)
class Manifest:
    """Written last: a folder without it is no capture."""

    step: int  # 1 is the first
    kind: str  # as in debug/history.json
    message: str
    weights: Weights
    checkpoint: int | None  # step of the linked one
    seed: int
    name: str  # of the run
    config_hash: str
    config: dict[str, Any]  # all of it, as it was composed; whom to trust is never in it
    given: list[str]  # what the run's program made itself: model, data, objective, optimizer
    choices: dict[str, Any]  # made automatically
    micro_batch: int
    threads: int
    device: dict[str, Any]
    versions: dict[str, str]
    loss: str  # in words, for people; the number is in state.pt
    grad_norm: str
    files: dict[str, FileDigest] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def steps_again(self) -> int | None:
        """Steps from the linked checkpoint to just before the bad one."""
        return None if self.checkpoint is None else self.step - 1 - self.checkpoint

    def write(self, file: HashedFile) -> None:
        """Write it with its own digest, so that no flipped bit goes unseen."""
        file.write(sealed({**asdict(self), "weights": self.weights.value}))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a capture; CheckpointError says in what way it is not good."""
    path = folder / NAME
    body = read_sealed(path, FORMAT)
    try:
        files = {name: FileDigest(**entry) for name, entry in body.pop("files").items()}
        weights = Weights(body.pop("weights"))
        manifest = Manifest(files=files, weights=weights, **body)
        sound = all(isinstance(getattr(manifest, name), kind) for name, kind in KINDS.items())
    except (TypeError, KeyError, AttributeError, ValueError):
        raise CheckpointError(f"{path}: not the manifest of a capture") from None
    expected = {STATE} if weights is Weights.again else {STATE, MODEL}
    if not sound or set(files) != expected:  # names in the file are never used as paths
        raise CheckpointError(f"{path}: not the manifest of a capture")
    if STEP.fullmatch(folder.resolve().name) and int(folder.resolve().name[5:]) != manifest.step:
        raise CheckpointError(f"{path}: is that of step {manifest.step}")
    return manifest


def captures(run: Path) -> list[Path]:
    """The captures in a run's folder, the first step's first."""
    found = (run / FOLDER).glob("step_*")
    return sorted(p for p in found if STEP.fullmatch(p.name) and (p / NAME).is_file())


def find(path: Path) -> Path:
    """The capture that `path` is, or a replay is of, or the first of the run or folder that it is.

    Raises CheckpointError where there is nothing, and UsageError where there is something else.
    """
    key = "replay.path"
    if not path.exists():
        raise CheckpointError(f"{key}: there is no folder {path} (looked from {Path.cwd()})")
    if path.is_file():
        path = path.absolute().parent
    if (path / REPLAY).is_file():
        path = _replayed(path / REPLAY)
    if (path / "checkpoints").is_dir() or (path / ".hydra").is_dir() or (path / FOLDER).is_dir():
        found = captures(path)
        if not found:
            raise UsageError(
                f"{key}: the run in {path} captured no step: none was bad, or "
                "debug.capture.enabled=false"
            )
        return found[0]
    if path.absolute().name == "captures":
        found = captures(path.absolute().parents[1])
        if found:
            return found[0]
    if not (path / NAME).is_file():
        raise UsageError(
            f"{key}: {path} is no capture; name a run's {FOLDER}/step_… folder, or the run's"
        )
    if (path / "state.pt").exists() and path.absolute().parent.name == "checkpoints":
        raise UsageError(
            f"{key}: {path} is a checkpoint; bad steps are in {path.parent.parent / FOLDER}"
        )
    return path


def _replayed(page: Path) -> Path:
    """The capture that a replay was of."""
    try:
        found = Path(json.loads(read_record(page))["capture"])
    except (OSError, ValueError, LookupError, TypeError):
        raise CheckpointError(f"replay.path: {page} does not say what it is a replay of") from None
    if not found.is_dir():
        raise CheckpointError(f"replay.path: {page} is a replay of {found}, which is gone")
    return found
