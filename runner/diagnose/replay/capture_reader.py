"""Reading of captures: every file is verified before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from runner.core.captures.manifest import (
    CHECKPOINT,
    CapturedWeights,
    CaptureManifest,
    read_manifest,
)
from runner.core.checkpoint import reading as checkpoints
from runner.core.checkpoint.folder import RestoredCheckpoint
from runner.core.checkpoint.manifest import MODEL, STATE
from runner.core.checkpoint.state_schema import check_state
from runner.core.errors import CheckpointError
from runner.core.interfaces.batch import Batch
from runner.core.security.files.policy import FilePolicy


@dataclass(frozen=True)
class Capture:
    """The recorded state of a bad step; tensors are on the CPU."""

    path: Path
    manifest: CaptureManifest
    batch: Batch  # contiguous, as before placement
    samples: list[int]  # indices in the data set
    loss: float | None  # as reported; None: not reported, such as after an exception
    grad_norm: float | None  # before clipping
    model: Mapping[str, Any] | None  # state_dict; None: see `manifest.weights`
    buffers: Mapping[str, Tensor]  # non-persistent ones
    update: Mapping[str, Any] | None  # state of `runner.core.optim.optimizer_step.OptimizerStep`
    random: Mapping[str, Any]  # of torch, python and numpy
    random_then: bool  # valid for the step: nothing drew from python's or numpy's
    progress: Mapping[str, Any]  # of the run at the time of the capture
    remedy: int  # step of the last remedy before this capture
    skipped: list[int]  # steps without an update between the checkpoint and this one
    medians: Mapping[str, float] = field(default_factory=dict)  # of recent losses and norms
    policy: FilePolicy | None = None  # for reading its checkpoint from another run tree

    @property
    def step(self) -> int:
        """Number of the captured step; 1 is the first."""
        return self.manifest.step

    @property
    def as_it_was(self) -> bool:
        """Whether the capture contains the state at the start of the step."""
        return self.manifest.weights is CapturedWeights.then and self.random_then

    def checkpoint(self) -> RestoredCheckpoint:
        """Return the linked checkpoint, verified; CheckpointError if missing or damaged."""
        restored = checkpoints.load_checkpoint(self.path / CHECKPOINT, self.policy, check_state)
        if restored.step != self.manifest.checkpoint:
            raise CheckpointError(f"{self.path / CHECKPOINT}: belongs to step {restored.step}")
        return restored


def open_capture(path: Path, policy: FilePolicy | None = None) -> Capture:
    """Read the capture in a folder (see `runner.core.captures.manifest.find_capture`).

    With a policy, a capture from outside this run tree is scanned first. Raises CheckpointError
    naming a damaged or missing file, and SecurityError for files with more than plain data, or of
    unknown digests under security=strict.
    """
    # a lazy import: most runs read no foreign files
    from runner.core.security.files.loader import check_foreign_folder, read_state, read_tensors

    admitted = None if policy is None else check_foreign_folder(path, policy)
    manifest = read_manifest(path)
    for name, digest in manifest.files.items():
        scanned_digest = digest if admitted is None else admitted.files.get(name)
        if scanned_digest is None or scanned_digest.sha256 != digest.sha256:
            raise CheckpointError(f"{path / name}: changed while it was being checked")
    content = read_state(path / STATE, manifest.files[STATE].sha256)
    model: dict[str, Any] | None = None
    if MODEL in manifest.files:
        model = dict(read_tensors(path / MODEL, manifest.files[MODEL].sha256))
    try:
        state = content["state"]
        if model is not None:
            model.update(content["model"])
        if len(state["batch"]) != 2 or not _has_plain_numbers(state):
            raise ValueError
        state["batch"] = tuple(state["batch"])
        return Capture(path, manifest, model=model, policy=policy, **state)
    except (AttributeError, LookupError, TypeError, ValueError):
        raise CheckpointError(f"{path / STATE}: not written by the runner") from None


def _has_plain_numbers(state: Mapping[str, Any]) -> bool:
    """Return whether steps, indices, losses and norms are plain numbers."""
    counts = [state["remedy"], *state["samples"], *state["skipped"]]
    numbers = [n for n in (state["loss"], state["grad_norm"]) if n is not None]
    numbers += state.get("medians", {}).values()
    return all(type(n) is int for n in counts) and all(type(n) in (float, int) for n in numbers)
