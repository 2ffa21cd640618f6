"""The layout of a capture's folder, and the search for one. Does not import torch.

debug/captures/step_00000123/
    manifest.json      kind of fault, the run's config, sha256 of the files beside it
    state.pt           batch, indices of its samples, loss, random state, optimizer state
    model.safetensors  weights and buffers, if they are those of the step
    checkpoint/        hard links to the last checkpoint before the step
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from runner.core.checkpoint.manifest import MODEL, NAME, STATE
from runner.core.errors import CheckpointError, UsageError
from runner.core.record.storage import FileDigest, HashedFile
from runner.core.security import checksummed_json
from runner.core.security.checksummed_json import FORMAT, to_checksummed_json

FOLDER = "debug/captures"
CHECKPOINT = "checkpoint"  # folder with the hard links
STEP = re.compile(r"step_\d{8,}", re.ASCII)


class CapturedWeights(Enum):
    """Which step's weights, buffers and optimizer state a capture contains."""

    then = "then"  # of the step itself: nothing was updated since
    again = "again"  # none: they are recomputed from the linked checkpoint
    later = "later"  # none: they changed since the step, and no checkpoint is older


@dataclass(frozen=True)
class CaptureManifest:
    """The manifest of a capture, written last: a folder without it is no capture."""

    step: int  # 1 is the first
    kind: str  # as in debug/history.json
    message: str
    weights: CapturedWeights
    name: str  # of the run
    given: list[str]  # components made by the caller of `build`: model, data, objective, optimizer
    micro_batch: int
    threads: int
    device: dict[str, Any]
    versions: dict[str, str]
    loss: str  # as text; the number is in state.pt
    grad_norm: str
    checkpoint: int | None = None  # step of the linked checkpoint
    seed: int = 0
    config_hash: str = ""
    # the composed config as `runner.core.config.run_config.WrittenConfig.plain` returns it
    config: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, Any] = field(default_factory=dict)  # automatic ones
    files: dict[str, FileDigest] = field(default_factory=dict)
    format: int = FORMAT

    def write(self, file: HashedFile) -> None:
        """Write the manifest with its digest, so that any flipped bit is detected."""
        file.write(to_checksummed_json({**asdict(self), "weights": self.weights.value}))


def read_manifest(folder: Path) -> CaptureManifest:
    """Return the manifest of a capture; CheckpointError if it is damaged or forged."""
    manifest = checksummed_json.read_manifest(folder, CaptureManifest)
    path = folder / NAME
    # names in the file are never used as paths
    allowed = {
        CapturedWeights.then: [{STATE, MODEL}],
        CapturedWeights.again: [{STATE}],
        CapturedWeights.later: [{STATE}, {STATE, MODEL}],  # earlier versions stored weights
    }
    if set(manifest.files) not in allowed[manifest.weights]:
        raise CheckpointError(f"{path}: not the manifest of a capture")
    if STEP.fullmatch(folder.resolve().name) and int(folder.resolve().name[5:]) != manifest.step:
        raise CheckpointError(f"{path}: belongs to step {manifest.step}")
    return manifest


def list_captures(run: Path) -> list[Path]:
    """Return the capture folders of a run, by step."""
    folders = (run / FOLDER).glob("step_*")
    return sorted(p for p in folders if STEP.fullmatch(p.name) and (p / NAME).is_file())


def find_capture(path: Path) -> Path:
    """Return the capture at `path`, or the first of a run. CheckpointError or UsageError."""
    if not path.exists():
        raise CheckpointError(f"replay.path: no such folder: {path} (relative to {Path.cwd()})")
    folder = (path.parent if path.is_file() else path).absolute()
    is_checkpoint = folder.parent.name == "checkpoints"
    if (folder / NAME).is_file() and not is_checkpoint:
        return folder
    capture_folders = list_captures(folder.parents[1] if folder.name == "captures" else folder)
    if capture_folders:
        return capture_folders[0]
    problem = "is a checkpoint" if is_checkpoint else "contains no captured step"
    fix = f"name a run's {FOLDER}/step_… folder, or the run's"
    raise UsageError(f"replay.path: {path} {problem}; {fix}")
