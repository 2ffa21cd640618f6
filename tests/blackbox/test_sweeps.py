"""Sweeps whose jobs end in every way, and then the same command again; other launchers."""

import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.runs import wait_until
from tests.scale.sweep.conftest import (
    NET,
    SHORT,
    only,
    own_folder,
    read,
    start_sweep,
    statuses,
    sweep,
)  # fmt: skip

TYPED = [*NET, "+model.how=big,fine,fail,die", "hydra.launcher.jobs=2"]
ENDS = ["done", "done", "failed", "killed"]
ROW = {
    "overrides", "status", "reason", "summary", "speedup", "speedup_interval", "parity", "command",
}  # fmt: skip
LONG = ["+model.work=300", "training.steps=400", "training.validate_every=400",
        "monitoring.every=5"]  # fmt: skip
Mixed = tuple[Path, Path, subprocess.CompletedProcess[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return own_folder(tmp_path)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    folder = own_folder(tmp_path_factory.mktemp("mixed"))
    done = sweep(folder, *TYPED)
    return folder, only(folder), done


def test_a_job_that_fails_or_is_killed_is_a_row_and_the_others_finish(mixed: Mixed) -> None:
    folder, place, done = mixed
    assert statuses(place) == ENDS and done.returncode == 7, done.stderr
    assert "2 of 4 jobs failed:" in done.stderr
    started = re.findall(r" #\d (\S+) data=cancer .*: started\n", done.stderr)
    assert sorted(started) == [f"+model.how={how}" for how in ("big", "die", "fail", "fine")]
    assert re.search(r"\n  #2 .*\+model.how=fail.*: told to fail", done.stderr)
    assert re.search(r"\n  #3 .*\+model.how=die.*was killed by SIGKILL", done.stderr)
    for word in ("Traceback", "Error executing job", "HYDRA_FULL_ERROR"):
        assert word not in done.stderr + done.stdout
    rows = read(place, "comparison.json")["rows"]
    assert [row["status"] for row in rows] == ENDS
    assert all(row["speedup_interval"] is None and row["parity"] is None for row in rows)
    assert all(row.keys() >= ROW for row in rows)
    assert [job["exit_code"] for job in read(place)["jobs"]] == [0, 0, 1, -9]
    for name in ("comparison.md", "comparison.html"):
        assert (place / name).stat().st_size > 0
    assert "sweep cancer-Net" in done.stdout and "killed" in done.stdout
    # what lies in the current folder is no plugin
    assert (folder / "hydra_plugins" / "trap.py").exists() and not (folder / "trapped").exists()


def test_every_job_has_a_process_and_a_record_of_its_own(mixed: Mixed) -> None:
    _, place, _ = mixed
    records = [read(place / str(n), "summary.json") for n in range(4)]
    logs = [(place / str(n) / "console.log").read_text() for n in range(4)]
    pids = [match.groups() for text in logs if (match := re.search(r"pid (\d+) of (\d+)", text))]
    assert len({pid for pid, _ in pids}) == 4 and len({parent for _, parent in pids}) == 1
    big, fine = (record["memory"]["peak_process_bytes"] for record in records[:2])
    assert big - fine > 2**28
    assert [record["status"] for record in records] == ENDS
    assert "told to fail" in records[2]["reason"] and "killed by SIGKILL" in records[3]["reason"]
    assert "Traceback" in (place / "2" / "run.log").read_text()
    for number, how in enumerate(["big", "fine", "fail", "die"]):
        assert f"how={how}" in (place / str(number) / ".hydra" / "overrides.yaml").read_text()
        typed = records[number]["command"]
        assert typed.startswith("python -P -m runner ") and f"+model.how={how}" in typed
        assert "hydra." not in typed and "monitoring" not in typed  # it can be typed as it is


def test_the_same_command_again_runs_what_failed_and_nothing_else(mixed: Mixed) -> None:
    folder, place, _ = mixed
    damaged = Path("checkpoints") / "step_00000003" / "manifest.json"  # of the one that was killed
    (place / "3" / damaged).parent.mkdir(parents=True)
    (place / "3" / damaged).write_text("{}")
    before = {n: (place / n / "summary.json").stat().st_mtime_ns for n in "0123"}
    (folder / "spared").touch()
    again = sweep(folder, *TYPED)
    assert "2 of 4 done before; 2 to run, 1 of them from a checkpoint" in again.stderr
    assert "no usable checkpoint" in again.stderr  # so it begins afresh, and they are kept
    assert (place / ".earlier" / "3-1" / damaged).exists()
    assert not list((place / ".earlier").rglob("events.out*"))  # it is one curve
    assert again.returncode == 7 and "1 of 4 jobs failed:" in again.stderr
    after = {n: (place / n / "summary.json").stat().st_mtime_ns for n in "0123"}
    assert [n for n in "0123" if after[n] != before[n]] == ["2", "3"]
    rows = read(place, "comparison.json")["rows"]
    assert statuses(place) == [*ENDS[:3], "done"]
    assert sorted(row["status"] for row in rows) == sorted(statuses(place))  # the best is first


@pytest.mark.slow
def test_values_typed_twice_run_twice_with_a_notice(folder: Path) -> None:
    done = sweep(folder, "optimizer.lr=1e-3,0.001,1e-2")
    assert statuses(only(folder)) == ["done"] * 3 and done.returncode == 0
    assert done.stderr.count("typed more than once, and run as often: ") == 1
    notice = done.stderr.partition("typed more")[2].partition("\n")[0]
    assert "optimizer.lr=0.001" in notice and notice.count("optimizer.lr=") == 1


@pytest.mark.slow
def test_hydras_own_launcher_ends_in_the_same_table(folder: Path) -> None:
    done = sweep(folder, *NET, "+model.how=fine,fail", "hydra/launcher=basic")
    assert done.returncode == 7 and "1 of 2 jobs failed" in done.stderr
    rows = read(only(folder), "comparison.json")["rows"]
    assert [row["status"] for row in rows] == ["done", "failed"]
    assert "sweep cancer-Net" in done.stdout


@pytest.mark.slow
def test_another_sweeper_gets_the_value_of_each_job_and_its_failures(folder: Path) -> None:
    done = sweep(folder, *NET, "hydra/sweeper=two_rounds")
    value, failure = (only(folder) / "seen.txt").read_text().splitlines()
    assert float(value) == pytest.approx(read(only(folder) / "0", "summary.json")["best"])
    assert failure.startswith("learned: #1") and "model.how: no such key" in failure
    assert [job["number"] for job in read(only(folder))["jobs"]] == [0, 1]
    assert done.returncode == 7 and "1 of 2 jobs failed" in done.stderr


@pytest.mark.slow
def test_a_job_that_takes_too_long_is_ended_and_tried_again(folder: Path) -> None:
    done = sweep(folder, *NET, *LONG, "hydra.launcher.timeout_s=0.5", "hydra.launcher.retries=1")
    (job,) = read(only(folder))["jobs"]
    assert (job["status"], job["tries"]) == ("timeout", 2)
    assert "not done within 0.5 s" in job["reason"] and done.returncode == 7
    assert "tried again" in done.stderr
    assert read(only(folder) / "0", "summary.json")["status"] == "timeout"


@pytest.mark.slow
def test_want_of_memory_has_a_name_of_its_own_and_fail_fast_skips_the_rest(folder: Path) -> None:
    done = sweep(folder, *NET, "+model.how=memory,fine,big", "hydra.launcher.fail_fast=true")
    assert statuses(only(folder)) == ["oom", "skipped", "skipped"]
    assert done.returncode == 7 and "1 of 3 jobs failed" in done.stderr
    assert "fail_fast: #0 oom" in read(only(folder))["jobs"][2]["reason"]
    rows = read(only(folder), "comparison.json")["rows"]
    assert [row["status"] for row in rows] == ["oom", "skipped", "skipped"]


def start_until_trained(folder: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A sweep of one long job that has begun to train, and the processes it has started."""
    process, pattern = (
        start_sweep(folder, *SHORT, *NET, *LONG),
        "outputs/sweeps/*/*/0/metrics.jsonl",
    )
    wait_until(lambda: any(path.stat().st_size for path in folder.glob(pattern)), process)
    return process, psutil.Process(process.pid).children(recursive=True)


@pytest.mark.slow
def test_ctrl_c_leaves_checkpoints_and_the_same_command_goes_on(folder: Path) -> None:
    process, children = start_until_trained(folder)
    process.send_signal(signal.SIGINT)
    code, output = process.wait(60), (folder / "console").read_text()
    assert code == 130, output
    assert statuses(only(folder)) == ["interrupted"]
    assert "the same command" in output and "interrupted" in output
    assert not psutil.wait_procs(children, timeout=20)[1]
    first = max(only(folder).glob("0/checkpoints/step_*/manifest.json"))
    done = sweep(folder, *NET, *LONG)
    assert "0 of 1 done before; 1 to run, 1 of them from a checkpoint" in done.stderr
    assert done.returncode == 0, done.stderr
    steps = int(first.parent.name.removeprefix("step_"))
    assert f"continues at step {steps}" in (only(folder) / "0" / "report.md").read_text()
    assert read(only(folder) / "0", "summary.json")["steps"] == 400


@pytest.mark.slow
def test_jobs_end_with_a_checkpoint_when_the_sweep_is_killed(folder: Path) -> None:
    process, children = start_until_trained(folder)
    process.kill()
    process.wait(60)
    assert not psutil.wait_procs(children, timeout=20)[1]
    assert read(only(folder) / "0", "summary.json")["status"] == "interrupted"
    assert list(only(folder).glob("0/checkpoints/step_*/manifest.json"))
