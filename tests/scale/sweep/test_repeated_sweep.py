"""A finished sweep: what runs once more when the command, the record or the folder changes."""

import os
import shutil
from pathlib import Path

import pytest

from runner.core.checkpoint.lock import lock
from runner.core.errors import ConfigError, StorageError, UsageError
from runner.core.record.summary import Summary
from runner.scale.sweep.identity import sweep_hash
from runner.scale.sweep.plan import JobPlan, Planner, find_sweep, load_previous_jobs
from runner.scale.sweep.state import Job
from tests.runs import checked

from .conftest import NET, SHORT, only, own_folder, read, sweep

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
    assert "oc.env" in read(only(finished))["jobs"][0]["command"]


def test_a_finished_sweep_runs_nothing_shows_the_table_and_the_command_for_a_new_one(
    finished: Path,
) -> None:
    def ends() -> list[str]:
        return [job["ended"] + job["hash"] for job in read(only(finished))["jobs"]]

    before = ends()
    with lock(only(finished)):
        refused = sweep(finished, *AGAIN, HIDDEN=SECRET)
    assert refused.returncode == 2 and f"in use by process {os.getpid()} on" in refused.stderr
    done = sweep(finished, *AGAIN, HIDDEN=SECRET, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0 and ends() == before
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "hydra" in imported and "torch" not in imported  # jobs need it, not the sweep
    assert "2 of 2 done before; 0 to run" in done.stderr and "sweep.resume=none" in done.stderr
    assert "sweep cancer-Net" in done.stdout


def test_one_changed_value_begins_that_job_in_a_folder_of_its_own(tmp_path: Path) -> None:
    for name in "01":
        (tmp_path / name).mkdir()
        Summary("done").write(tmp_path / name)
    earlier = [Job(n, [f"seed={n}"], str(n), f"hash {n}", "done") for n in range(2)]
    jobs = [Job(0, ["seed=2"], "0", "hash 2"), Job(1, ["seed=1"], "1", "hash 1")]
    planner = Planner(tmp_path, earlier, [job.overrides for job in jobs])
    changed, same = (planner.match(JobPlan(job)) for job in jobs)
    assert (changed.job.folder, changed.done, changed.replaces) == ("2", False, False)
    assert (same.job.folder, same.done) == ("1", True)
    planner = Planner(tmp_path, earlier, [["seed=0"]])
    again = planner.match(JobPlan(Job(0, ["seed=0"], "0", "another hash")))
    assert (again.job.folder, again.done, again.replaces) == ("0", False, True)


def test_a_damaged_record_is_another_sweep_unless_it_is_named(
    finished: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(only(finished), tmp_path / "sweep")
    typed_hash = read(folder)["hash"]
    assert find_sweep(tmp_path / "new", False, "auto", typed_hash) == folder
    (folder / "sweep.json").write_text('{"command": "python -m runner')
    assert find_sweep(tmp_path / "new", False, "auto", typed_hash) is None
    with pytest.raises(StorageError, match=r"sweep\.json: damaged"):
        load_previous_jobs(folder)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("sweep.resume=nowhere", "sweep.resume: nowhere is not a sweep's folder"),
        ("hydra.launcher.jobs=0", "hydra.launcher.jobs: must be ≥ 1, got 0"),
        ("hydra.launcher.job=2", "did you mean hydra.launcher.jobs"),
        ("hydra.launcher.timeout_s=soon", "hydra.launcher.timeout_s: must be a number, got 'soon'"),
    ],
)
def test_a_mistake_about_the_sweep_is_one_line(
    typed: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=says) as refused:
        checked("-m", *SHORT, "seed=0,1", typed)
    assert "\n" not in str(refused.value)


def test_a_sweep_of_benchmarks_is_refused_with_the_key_that_compares_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^job: .*leave -m out.*benchmark\.arms=\[none,basic\]"):
        checked("-m", "job=benchmark", "optimization=none,basic")


def test_a_command_is_recognised_in_any_order_and_with_any_launcher() -> None:
    one = sweep_hash(["seed=0,1", "data=cancer", "hydra.launcher.jobs=2"])
    assert one == sweep_hash(["data=cancer", "seed=2", "seed=0,1", "sweep.resume=auto"])
    assert one != sweep_hash(["data=cancer", "seed=0,2"])
    assert one != sweep_hash(["data=cancer", "seed=0,1"], ["--config-dir=mine"])
