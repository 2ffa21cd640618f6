"""A capture opened again: every byte of it verified before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from runner.captures.manifest import CHECKPOINT, CapturedWeights, CaptureManifest, read_manifest
from runner.checkpoint import reading as checkpoints
from runner.checkpoint.content import check_state
from runner.checkpoint.folder import Restored
from runner.checkpoint.manifest import MODEL, STATE
from runner.data.batch import Batch
from runner.errors import CheckpointError
from runner.security.files.policy import FilePolicy


@dataclass(frozen=True)
class Capture:
    """A bad step, as far as it was written down; tensors are on the CPU."""

    path: Path
    manifest: CaptureManifest
    batch: Batch  # before it is placed: contiguous
    samples: list[int]  # indices in the data set
    loss: float | None  # as the run recorded them; None where it ended in an exception
    grad_norm: float | None  # before clipping
    model: Mapping[str, Any] | None  # state_dict; None where only the checkpoint leads to it
    buffers: Mapping[str, Tensor]  # those that are in no state_dict
    update: Mapping[str, Any] | None  # state of `runner.optim.optimizer_step.Update`
    random: Mapping[str, Any]  # of torch, python and numpy
    random_then: bool  # it is that of the step: nothing drew from python's or numpy's
    progress: Mapping[str, Any]  # of the run when it was captured
    remedy: int  # step after which something was last done about a fault, before this was captured
    skipped: list[int]  # steps between the checkpoint and this one that were not made
    policy: FilePolicy | None = None  # for its checkpoint, where it is of another run tree

    @property
    def step(self) -> int:
        """1 is the first."""
        return self.manifest.step

    @property
    def as_it_was(self) -> bool:
        """Whether what the step began with is in the capture itself."""
        return self.manifest.weights is CapturedWeights.then and self.random_then

    def checkpoint(self) -> Restored:
        """The linked checkpoint, verified; CheckpointError where it is missing or not good."""
        restored = checkpoints.load(self.path / CHECKPOINT, self.policy, check_state)
        if restored.step != self.manifest.checkpoint:
            raise CheckpointError(f"{self.path / CHECKPOINT}: is that of step {restored.step}")
        return restored


def open_capture(path: Path, policy: FilePolicy | None = None) -> Capture:
    """The capture in that folder (see `runner.captures.manifest.find`).

    With a policy, one from outside this run tree is looked at as a foreign one first. Raises
    CheckpointError naming the file that is damaged or missing, and SecurityError for one that
    holds more than plain data, or whose digests are unknown under security=strict.
    """
    # what reads foreign files is only imported where one is read
    from runner.security.files.loader import admit_folder, read_state, read_tensors

    admitted = None if policy is None else admit_folder(path, policy)
    manifest = read_manifest(path)
    for name, written in manifest.files.items():
        seen = written if admitted is None else admitted.files.get(name)
        if seen is None or seen.sha256 != written.sha256:
            raise CheckpointError(f"{path / name}: changed while it was being looked at")
    whole = read_state(path / STATE, manifest.files[STATE].sha256)
    model: dict[str, Any] | None = None
    if MODEL in manifest.files:
        model = dict(read_tensors(path / MODEL, manifest.files[MODEL].sha256))
    try:
        state = whole["state"]
        if model is not None:
            model.update(whole["model"])
        if len(state["batch"]) != 2 or not _has_plain_numbers(state):
            raise ValueError
        state["batch"] = tuple(state["batch"])
        return Capture(path, manifest, model=model, policy=policy, **state)
    except (LookupError, TypeError, ValueError):
        raise CheckpointError(f"{path / STATE}: not written by the runner") from None


def _has_plain_numbers(state: Mapping[str, Any]) -> bool:
    """Whether what must be a number is one."""
    counts = [state["remedy"], *state["samples"], *state["skipped"]]
    numbers = [n for n in (state["loss"], state["grad_norm"]) if n is not None]
    return all(type(n) is int for n in counts) and all(type(n) in (float, int) for n in numbers)
