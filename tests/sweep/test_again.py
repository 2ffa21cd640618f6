"""A finished sweep: what runs once more when the command, the record or the folder changes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from runner.checkpoint.lock import lock
from runner.cli.arguments import read_arguments
from runner.cli.preflight import check
from runner.errors import StorageError, UsageError
from runner.sweep.plan import JobSpec, Planner, find_sweep, load_previous_jobs
from runner.sweep.state import Job
from runner.training.summary import Summary

from .conftest import NET, SHORT, only, own_folder, sweep, told

SECRETLY = ["security.environment=[HIDDEN]", "+model.how=${oc.env:HIDDEN}"]
NESTED = "hydra.sweep.subdir='g/${hydra.job.num}'"
TYPED = ["seed=0,1", *NET, *SECRETLY, NESTED, "hydra.launcher.jobs=2"]
AGAIN = ["hydra.launcher.jobs=1", *TYPED[-2::-1]]  # how it is run is not what is run
SECRET = "hunter-2"  # noqa: S105


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = own_folder(tmp_path_factory.mktemp("finished"))
    done = sweep(folder, *TYPED, HIDDEN=SECRET)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_secret_is_in_no_file_of_a_sweep_in_nested_folders(finished: Path) -> None:
    files = [path for path in only(finished).rglob("*") if path.is_file()]
    assert len(list(only(finished).glob("g/*/summary.json"))) == 2
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert "oc.env" in told(only(finished))["jobs"][0]["command"]


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
    done = sweep(folder, *AGAIN, HIDDEN=SECRET, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0 and ended(folder) == before
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "hydra" in imported and "torch" not in imported  # jobs need it, not the sweep
    assert "2 of 2 done before; 0 to run" in done.stderr and "sweep.resume=none" in done.stderr
    assert "sweep cancer-Net" in done.stdout


def test_one_changed_value_begins_that_job_in_a_folder_of_its_own(tmp_path: Path) -> None:
    for name in "01":
        (tmp_path / name).mkdir()
        Summary("done").write(tmp_path / name)
    earlier = [Job(n, [f"seed={n}"], str(n), f"hash {n}", "done") for n in range(2)]
    specs = [JobSpec(0, ["seed=2"], "0", "hash 2"), JobSpec(1, ["seed=1"], "1", "hash 1")]
    planner = Planner(tmp_path, earlier, [spec.overrides for spec in specs])
    changed, same = map(planner.plan, specs)
    assert (changed.job.folder, changed.done, changed.replaces) == ("2", False, False)
    assert (same.job.folder, same.done) == ("1", True)
    planner = Planner(tmp_path, earlier, [["seed=0"]])
    again = planner.plan(JobSpec(0, ["seed=0"], "0", "another hash"))
    assert (again.job.folder, again.done, again.replaces) == ("0", False, True)


def test_a_damaged_record_is_another_sweep_unless_it_is_named(folder: Path) -> None:
    here = only(folder)
    flags = told(here)["hash"]
    assert find_sweep(here.parent / "new", False, "auto", flags) == here
    (here / "sweep.json").write_text('{"command": "python -m runner')
    assert find_sweep(here.parent / "new", False, "auto", flags) is None
    with pytest.raises(StorageError, match=r"sweep\.json: damaged"):
        load_previous_jobs(here)


def test_two_processes_do_not_write_into_one_sweep(folder: Path) -> None:
    with lock(only(folder)):
        done = sweep(folder, *AGAIN, HIDDEN=SECRET)
    assert done.returncode == 2
    assert f"in use by process {os.getpid()} on" in done.stderr


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("sweep.resume=nowhere", "sweep.resume: nowhere is no sweep's folder"),
        ("sweep.resume=outputs", "outputs is no sweep's folder"),
        ("hydra.launcher.jobs=0", "hydra.launcher.jobs: must be ≥ 1, got 0"),
        ("hydra.launcher.job=2", "did you mean hydra.launcher.jobs"),
        ("hydra.launcher.timeout_s=soon", "hydra.launcher.timeout_s: Value 'soon' of type"),
    ],
)
def test_a_mistake_about_the_sweep_is_one_line(
    typed: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    with pytest.raises(UsageError, match=says) as refused:
        check(read_arguments(["-m", *SHORT, "seed=0,1", typed]))
    assert "\n" not in str(refused.value)
