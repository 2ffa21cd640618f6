"""A finished sweep: what runs once more when the command, the record or the folder changes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from runner.checkpoint.lock import lock

from .conftest import only, statuses, sweep, told

TYPED = ["seed=0,1", "security.trusted=[own]", "hydra.launcher.jobs=2"]
AGAIN = ["hydra.launcher.jobs=1", *TYPED[1::-1]]  # how it is run is not what is run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    (folder / "own.py").write_text("WIDTH = 1\n")
    done = sweep(folder, *TYPED)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path


def ended(folder: Path) -> list[str]:
    return [job["ended"] + job["hash"] for job in told(only(folder))["jobs"]]


def test_a_finished_sweep_runs_nothing_shows_the_table_and_says_how_to_begin_anew(
    folder: Path,
) -> None:
    before = ended(folder)
    done = sweep(folder, *AGAIN, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0 and ended(folder) == before
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "hydra" in imported and "torch" not in imported  # jobs need it, not the sweep
    assert "2 of 2 done before; 0 to run" in done.stderr and "sweep.resume=none" in done.stderr
    assert "sweep cancer-mlp" in done.stdout


def test_one_changed_value_runs_that_job_in_a_folder_of_its_own(folder: Path) -> None:
    here = only(folder)
    done = sweep(folder, "seed=2,1", TYPED[1], f"sweep.resume={here.relative_to(folder)}")
    assert done.returncode == 0, done.stderr
    assert "1 of 2 done before; 1 to run" in done.stderr
    jobs = told(here)["jobs"]
    assert [(job["folder"], job["status"]) for job in jobs] == [("2", "done"), ("1", "done")]
    assert "left as they are: 0" in done.stderr and (here / "0" / "summary.json").exists()


def test_other_code_of_a_package_that_is_trusted_is_another_job(folder: Path) -> None:
    (folder / "own.py").write_text("WIDTH = 2\n")
    done = sweep(folder, *TYPED)
    assert done.returncode == 0 and "done before" not in done.stderr
    assert [job["folder"] for job in told(only(folder))["jobs"]] == ["0", "1"]
    earlier = [told(only(folder) / ".earlier" / f"{n}-1", "summary.json") for n in (0, 1)]
    assert [record["status"] for record in earlier] == ["done", "done"]  # and was kept, hidden
    assert not list((only(folder) / ".earlier").rglob("events.out*"))


def test_a_damaged_record_is_said_and_the_folders_tell(folder: Path) -> None:
    (only(folder) / "sweep.json").write_text('{"command": "python -m runner')
    done = sweep(folder, *AGAIN)
    assert done.returncode == 0, done.stderr
    assert "sweep.json: damaged" in done.stderr and "judged by their folders" in done.stderr
    assert "2 of 2 done before; 0 to run" in done.stderr
    assert statuses(only(folder)) == ["done", "done"]


def test_two_processes_do_not_write_into_one_sweep(folder: Path) -> None:
    with lock(only(folder)):
        done = sweep(folder, *AGAIN)
    assert done.returncode == 2
    assert f"in use by process {os.getpid()} on" in done.stderr


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("sweep.resume=nowhere", "sweep.resume: there is no folder nowhere"),
        ("sweep.resume=outputs", "outputs is no sweep's folder"),
        ("hydra.launcher.jobs=0", "hydra.launcher.jobs: must be ≥ 1, got 0"),
        ("hydra.launcher.job=2", "did you mean hydra.launcher.jobs"),
        ("hydra.launcher.timeout_s=soon", "hydra.launcher.timeout_s: 'soon' is not a number"),
    ],
)
def test_a_mistake_about_the_sweep_is_one_line(folder: Path, typed: str, says: str) -> None:
    done: subprocess.CompletedProcess[str] = sweep(folder, "seed=0,1", typed)
    assert done.returncode == 2
    assert says in done.stderr and done.stderr.count("\n") == 1, done.stderr
