"""A run's folder, or files in it, that are removed or moved while the run trains."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runner import Summary
from runner.core.checkpoint.lock import is_locked
from runner.core.errors import StorageError
from runner.core.interfaces.run import Run
from runner.core.record.console import close_logging, set_up_logging
from tests.runs import QUICK, AtSteps, command, rows, scalars, trained

SHORT = (*QUICK, "data=cancer", "model=mlp", "training.steps=24", "training.validate_every=6")
SHORT += ("monitoring.every=2", "checkpoint.every=6", "debug.capture.enabled=false")
OWNER = """
import sys
from pathlib import Path
from runner.core.checkpoint.lock import lock
held = lock(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


HOOK = """
import shutil
from runner import Hook
class Removes(Hook):
    def on_step(self, run, step):
        if step.number == 15 and run.writes:
            moved = run.folder.rename(run.folder.with_name('moved'))
            shutil.rmtree(moved, ignore_errors=True)
"""


def train_in(folder: Path, number: int, action: Callable[[Path], object], *typed: str) -> Summary:
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra/overrides.yaml").write_text("[]\n")
    set_up_logging("info", folder)

    def act(run: Run) -> None:
        run.checkpointer.join()
        action(folder)

    try:
        return trained(*SHORT, *typed, folder=folder, hooks=[AtSteps(number, act)])
    finally:
        close_logging()


def remove_files(folder: Path) -> None:
    for path in (*folder.glob("*.jsonl"), *folder.glob("events.*"), folder / "run.log"):
        path.unlink()
    shutil.rmtree(folder / ".hydra")


def move(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))


@pytest.mark.parametrize("number", [15, 24])
@pytest.mark.parametrize("action", [shutil.rmtree, move, remove_files])
def test_the_files_of_a_removed_folder_are_made_again_with_all_that_they_held(
    tmp_path: Path, action: Callable[[Path], object], number: int
) -> None:
    folder = tmp_path / "r"
    summary = train_in(folder, number, action)
    assert summary.status == "done" and "removed" in summary.reason
    assert [row["step"] for row in rows(folder, "train")] == [*range(2, 25, 2)]
    assert [row["step"] for row in rows(folder, "val")] == [6, 12, 18, 24]
    assert [step for step, _ in scalars(folder, "watch_train/loss")] == [*range(2, 25, 2)]
    assert (folder / ".hydra/overrides.yaml").read_text() == "[]\n"
    log = (folder / "run.log").read_text()
    assert "removed during the run" in log and log.count("its files are made again") == 1
    assert (folder / "provenance.json").is_file()
    assert summary.checkpoint.last == "checkpoints/step_00000024"
    assert summary.checkpoint.best == f"checkpoints/step_{summary.best_step:08d}"
    assert (folder / summary.checkpoint.best).is_dir()


def test_the_best_checkpoint_is_saved_again_after_all_checkpoints_were_removed(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "r"
    typed = "optimizer.lr=1e-30", "schedule=constant"  # the first validation stays the best
    summary = train_in(folder, 15, lambda r: shutil.rmtree(r / "checkpoints"), *typed)
    assert summary.best_step == 18 and "removed" in summary.reason
    assert (folder / "checkpoints/best/manifest.json").is_file()
    assert "earlier checkpoints" in summary.reason


def test_a_record_that_cannot_be_completed_again_ends_the_run_with_code_5(tmp_path: Path) -> None:
    def replace_by_file(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.touch()

    with pytest.raises(StorageError, match="is not complete: all of it is missing") as failed:
        train_in(tmp_path / "r", 15, replace_by_file, "checkpoint.enabled=false")
    assert failed.value.exit_code == 5


def test_nothing_is_written_where_another_run_has_locked_the_removed_folder(tmp_path: Path) -> None:
    folder, owners = tmp_path / "r", list[subprocess.Popen[str]]()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def take(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(folder)], text=True, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        owners.append(owner)
        assert owner.stdout is not None and owner.stdout.readline() == "locked\n"

    try:
        with pytest.raises(StorageError, match="another run has it now: .*in use by process"):
            train_in(folder, 14, take)
        assert is_locked(folder) and [path.name for path in folder.iterdir()] == [".lock"]
    finally:
        for owner in owners:
            owner.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_processes_of_a_run_make_its_removed_folder_again_and_it_resumes(
    kind: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(HOOK)
    own = ("security.trusted=[own]", "+debug.hooks=[{_target_: own.Removes}]")
    ranks = (f"distributed={kind}", "distributed.processes=2", "distributed.timeout_s=30")
    done = command(tmp_path, *SHORT, *own, *ranks, "hydra.run.dir=outputs/r")
    folder = tmp_path / "outputs/r"
    assert done.returncode == 0, done.stderr
    summary = Summary.read(folder)
    title = next(line for line in done.stdout.splitlines() if line)
    assert summary.status == "done" and "removed by step 1" in summary.reason
    assert "done" in title and "removed by step 1" in title
    assert [row["step"] for row in rows(folder, "train")] == [*range(2, 25, 2)]
    assert [row["step"] for row in rows(folder, "val")] == [6, 12, 18, 24]
    assert "training.steps=24" in (folder / ".hydra/overrides.yaml").read_text()
    for name in ("run.log", "ranks/1/run.log"):
        assert "removed during the run" in (folder / name).read_text()
    assert (folder / "checkpoints/best/manifest.json").is_file()
    longer = ("checkpoint.resume=outputs/r", "training.steps=30", "security.trusted=[own]")
    again = command(tmp_path, *longer)
    assert again.returncode == 0 and Summary.read(folder).steps == 30, again.stderr
