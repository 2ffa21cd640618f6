"""A run's folder, or files in it, that are removed or moved while a command trains."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.runs import QUICK, command, read, rows

SHORT = (*QUICK, "data=cancer", "model=mlp", "training.steps=24", "training.validate_every=6")
SHORT += ("monitoring.every=2", "checkpoint.every=6", "debug.capture.enabled=false")
HOOK = """
import shutil
from runner import Hook
class Removes(Hook):
    def on_step(self, run, step):
        if step.number == 15 and run.writes:
            {action}
"""


def removed_by_a_command(place: Path, action: str, *typed: str) -> CompletedProcess[str]:
    """What `python -m runner` with a hook that removes the run's folder ended with."""
    (place / "own.py").write_text(HOOK.format(action=action))
    trusted = ("security.trusted=[own]", "+debug.hooks=[{_target_: own.Removes}]")
    return command(place, *SHORT, *trusted, *typed, "hydra.run.dir=outputs/r")


def resumes(place: Path) -> bool:
    typed = ("checkpoint.resume=outputs/r", "training.steps=30", "security.trusted=[own]")
    again = command(place, *typed)
    return again.returncode == 0 and read(place / "outputs/r")["steps"] == 30


@pytest.mark.slow
@pytest.mark.parametrize(
    "action",
    [
        "shutil.rmtree(run.folder)",
        "run.folder.rename(run.folder.with_name('moved'))",
        "[path.unlink() for name in ('*.jsonl', 'events.*') for path in run.folder.glob(name)]",
    ],
    ids="removed moved files".split(),
)
def test_the_end_of_a_run_says_that_its_folder_was_removed(action: str, tmp_path: Path) -> None:
    done = removed_by_a_command(tmp_path, f"run.checkpointer.join(); {action}")
    title = next(line for line in done.stdout.splitlines() if line)
    assert done.returncode == 0 and "done" in title and "removed by step 1" in title
    overrides = (tmp_path / "outputs/r/.hydra/overrides.yaml").read_text()
    assert "training.steps=24" in overrides and len(rows(tmp_path / "outputs/r", "train")) == 12
    assert resumes(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_processes_of_a_run_make_its_removed_folder_again(kind: str, tmp_path: Path) -> None:
    action = "shutil.rmtree(run.folder.rename(run.folder.with_name('moved')), ignore_errors=True)"
    ranks = (f"distributed={kind}", "distributed.processes=2", "distributed.timeout_s=30")
    done = removed_by_a_command(tmp_path, action, *ranks)
    folder = tmp_path / "outputs/r"
    assert done.returncode == 0, done.stderr
    summary = read(folder)
    assert summary["status"] == "done" and "removed by step 1" in summary["reason"]
    assert [row["step"] for row in rows(folder, "train")] == [*range(2, 25, 2)]
    assert [row["step"] for row in rows(folder, "val")] == [6, 12, 18, 24]
    for name in ("run.log", "ranks/1/run.log"):
        assert "removed during the run" in (folder / name).read_text()
    assert (folder / "checkpoints/best/manifest.json").is_file()
    assert resumes(tmp_path)
