"""A fork, a run that continues another one in a folder of its own, has the best checkpoint."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from runner.core.checkpoint.checkpointer import Checkpointer
from runner.core.checkpoint.folder import find_inherited, steps
from runner.core.errors import CheckpointError
from runner.core.record.summary import Summary
from tests.runs import differences, opened, trained

# the highest loss is called the best, so that the first validation is
PARENT = ("model=mlp", "model.width=8", "training.steps=24", "training.validate_every=8",
          "training.monitor=val/loss", "training.monitor_mode=max", "schedule=constant",
          "optimization=none")  # fmt: skip
NO_BETTER = ("training.steps=32", "optimizer.lr=1e-30")
BETTER = ("training.steps=32", "optimizer.lr=50")


def data(folder: Path) -> tuple[str, ...]:
    x = np.random.default_rng(0).normal(size=(400, 6)).astype("float32")
    for name, part in (("d", x[:300]), ("test", x[300:])):
        if not (folder / f"{name}.npz").exists():
            np.savez(folder / f"{name}.npz", x=part, y=(part[:, 0] > 0).astype("int64"))
    return ("data=arrays", f"data.path={folder}/d.npz", f"data.test_path={folder}/test.npz")


def run_in(folder: Path, *typed: str) -> Summary:
    return trained(*data(folder.parent), *PARENT, *typed, folder=folder)


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forks") / "parent"
    assert run_in(folder).best_step == 8
    return folder


@pytest.fixture
def family(parent: Path, tmp_path: Path) -> Path:
    """A folder with the run `parent`, which a test may damage."""
    for file in parent.parent.glob("*.npz"):
        shutil.copy(file, tmp_path)
    shutil.copytree(parent, tmp_path / "parent", symlinks=True)
    return tmp_path


def fork(family: Path, *typed: str, of: str = "parent", name: str = "fork") -> Summary:
    return run_in(family / name, f"checkpoint.resume={family / of}", *typed)


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors")


def test_a_fork_without_improvement_holds_the_best_checkpoint_of_its_parent(family: Path) -> None:
    summary = fork(family, *NO_BETTER)
    root, source = family / "fork" / "checkpoints", family / "parent" / "checkpoints/step_00000008"
    assert (summary.best, summary.best_step) == (Summary.read(family / "parent").best, 8)
    assert summary.checkpoint.best == "checkpoints/inherited/step_00000008"
    best = (root / "best").resolve()
    assert best.is_relative_to(root.resolve())
    assert {file.name for file in source.iterdir()} == {file.name for file in best.iterdir()}
    for file in source.iterdir():
        copy = best / file.name
        assert not copy.is_symlink() and os.path.samefile(copy, file)
    assert summary.tested["step"] == 8  # the test set is evaluated with the best, too
    shutil.rmtree(family / "parent")
    resume = f"checkpoint.resume={family / 'fork'}"
    with opened(*data(family), *PARENT, resume, "job=evaluate", folder=family / "test") as run:
        assert run.progress.step == 8
        assert differences(weights(best), run.model.state_dict()) == []


def test_no_resume_and_no_rollback_takes_the_inherited_checkpoint(family: Path) -> None:
    fork(family, *NO_BETTER)
    root = family / "fork" / "checkpoints"
    own = sorted(steps(root))
    assert own[0] == 24 and find_inherited(root) == root / "inherited" / "step_00000008"
    assert Checkpointer(family / "fork", 3).newest_before(24) is None
    for folder in root.glob("step_*"):
        (folder / "state.pt").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        Checkpointer(family / "fork", 3).restore()
    restored = Checkpointer(None, 3, best_first=True).restore(family / "fork")
    assert restored is not None and restored.step == 8


def test_a_resumed_fork_keeps_the_inherited_best_and_so_does_its_own_fork(family: Path) -> None:
    fork(family, *NO_BETTER)
    again = fork(family, *NO_BETTER, "training.steps=40", of="fork")
    assert (again.steps, again.best_step) == (40, 8)
    grandchild = fork(family, *NO_BETTER, "training.steps=48", of="fork", name="second")
    assert grandchild.checkpoint.best == "checkpoints/inherited/step_00000008"


def test_a_better_checkpoint_of_the_fork_replaces_the_inherited_one(family: Path) -> None:
    summary = fork(family, *BETTER)
    root = family / "fork" / "checkpoints"
    assert summary.best_step == 32 and (root / "best").resolve().name == "step_00000032"
    assert not (root / "inherited").exists()


def test_a_fork_from_the_best_step_begins_with_the_best(family: Path) -> None:
    summary = fork(family, *NO_BETTER, of="parent/checkpoints/step_00000008")
    best = (family / "fork" / "checkpoints" / "best").resolve()
    assert summary.best_step == 8 and best == family / "fork" / "checkpoints" / "step_00000008"
    source = weights(family / "parent" / "checkpoints" / "step_00000008")
    assert differences(weights(best), source) == []


@pytest.mark.parametrize("problem", ["missing", "damaged", "full disk"])
def test_without_its_parents_best_a_fork_starts_over_and_says_so(
    problem: str, family: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    best = family / "parent" / "checkpoints" / "step_00000008"
    if problem == "missing":
        shutil.rmtree(best)
    elif problem == "damaged":
        (best / "model.safetensors").write_bytes(b"damaged")
    else:
        no_space = Mock(side_effect=OSError(28, "No space left on device"))
        monkeypatch.setattr("runner.core.record.storage.link_or_copy", no_space)
    summary = fork(family, *NO_BETTER)
    reason = "has no checkpoint in" if problem == "missing" else "cannot be copied"
    assert f"at step 8, {reason}" in caplog.text
    assert ("No space left on device" in caplog.text) is (problem == "full disk")
    checkpoints = family / "fork" / "checkpoints"
    assert summary.best_step == 32 and (checkpoints / "best").resolve().name == "step_00000032"
    assert "it starts over" in caplog.text and not list(checkpoints.glob(".tmp-*"))


def test_a_fork_with_another_metric_inherits_no_checkpoint(family: Path) -> None:
    summary = fork(family, *NO_BETTER, "training.monitor=val/accuracy")
    assert summary.best_step == 32
    assert not (family / "fork" / "checkpoints" / "inherited").exists()


def test_files_are_copied_where_they_cannot_be_linked(
    family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    another_file_system = Mock(side_effect=OSError("another file system"))
    monkeypatch.setattr("runner.core.record.storage.os.link", another_file_system)
    summary = fork(family, *NO_BETTER, "debug.capture.enabled=false")
    best = family / "fork" / str(summary.checkpoint.best)
    for file in (family / "parent" / "checkpoints" / "step_00000008").iterdir():
        copy = best / file.name
        assert copy.read_bytes() == file.read_bytes() and not os.path.samefile(copy, file)
