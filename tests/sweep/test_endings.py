"""What ends a job or a sweep before its time: time-outs, signals, failures that end all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from runner.errors import Interrupted
from runner.sweep.child import Child
from runner.sweep.config import LauncherConfig
from runner.sweep.plan import JobPlan, JobSpec, Planner, wait_for_running_jobs
from runner.sweep.schedule import Schedule, write_failed_summary
from runner.sweep.state import Job, Sweep
from runner.training.summary import Summary

from .conftest import NET, SHORT, environment, only, statuses, sweep, told

LONG = ["+model.work=300", "training.steps=400", "training.validate_every=400",
        "monitoring.every=5"]  # fmt: skip


def test_a_job_that_takes_too_long_is_ended_and_tried_again(folder: Path) -> None:
    done = sweep(folder, "hydra.launcher.timeout_s=0.5", "hydra.launcher.retries=1")
    (job,) = told(only(folder))["jobs"]
    assert (job["status"], job["tries"]) == ("timeout", 2)
    assert "not done within 0.5 s" in job["reason"] and done.returncode == 7
    assert told(only(folder) / "0", "summary.json")["status"] == "timeout"


@pytest.mark.slow
def test_a_failure_that_was_bad_luck_is_made_good_by_another_try(folder: Path) -> None:
    done = sweep(folder, *NET, "+model.how=fail_once", "hydra.launcher.retries=1")
    assert done.returncode == 0, done.stderr
    (job,) = told(only(folder))["jobs"]
    assert (job["status"], job["tries"], job["reason"]) == ("done", 2, "")
    assert "tried again" in done.stderr
    assert not list((only(folder) / ".earlier").rglob("events.out*"))  # it is one curve


def test_want_of_memory_has_a_name_of_its_own_and_fail_fast_skips_the_rest(folder: Path) -> None:
    done = sweep(folder, *NET, "+model.how=memory,fine,big", "hydra.launcher.fail_fast=true")
    assert statuses(only(folder)) == ["oom", "skipped", "skipped"]
    assert done.returncode == 7 and "1 of 3 jobs failed" in done.stderr
    assert "fail_fast: #0 oom" in told(only(folder))["jobs"][2]["reason"]
    rows = told(only(folder), "comparison.json")["rows"]
    assert [row["status"] for row in rows] == ["oom", "skipped", "skipped"]


def test_ctrl_c_leaves_checkpoints_and_the_same_command_goes_on(folder: Path) -> None:
    process = started(folder)
    wait_until(lambda: bool(trained(folder)), process)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert statuses(only(folder)) == ["interrupted"]
    assert "the same command" in said and "interrupted" in said
    assert not psutil.wait_procs(children, timeout=20)[1]
    first = max(only(folder).glob("0/checkpoints/step_*/manifest.json"))
    done = sweep(folder, *NET, *LONG)
    assert "0 of 1 done before; 1 to run, 1 of them from a checkpoint" in done.stderr
    assert done.returncode == 0, done.stderr
    steps = int(first.parent.name.removeprefix("step_"))
    assert f"continues at step {steps}" in (only(folder) / "0" / "report.md").read_text()
    assert told(only(folder) / "0", "summary.json")["steps"] == 400


@pytest.mark.slow
def test_jobs_end_with_a_checkpoint_when_the_sweep_is_killed(folder: Path) -> None:
    process = started(folder)
    wait_until(lambda: bool(trained(folder)), process)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=60)
    assert not psutil.wait_procs(children, timeout=20)[1]
    assert told(only(folder) / "0", "summary.json")["status"] == "interrupted"
    assert list(only(folder).glob("0/checkpoints/step_*/manifest.json"))


def child_of(folder: Path, code: str, **settings: bool) -> Child:
    return Child.start([sys.executable, "-c", code], environment(), folder, None, **settings)


def test_a_job_that_does_not_listen_is_ended_at_the_first_deadline_for_the_first_reason(
    tmp_path: Path,
) -> None:
    deaf = "import signal, threading; signal.signal(15, signal.SIG_IGN); print('ready', flush=True)"
    child = child_of(tmp_path, f"{deaf}; threading.Event().wait()")
    try:
        deadline = time.monotonic() + 30
        while child.last_line() != "ready":
            assert time.monotonic() < deadline
        assert not child.is_due(60) and child.is_due(0)  # for a line about it
        child.ask(signal.SIGTERM, "timeout", "too long", grace_s=0.2)
        child.ask(signal.SIGTERM, "interrupted", "Ctrl-C")
        while not child.has_ended():
            assert time.monotonic() < deadline
        assert child.ending() == ("timeout", "too long")
    finally:
        child.close()


def test_an_interrupted_sweep_keeps_why_jobs_failed_before_that_it_did_not_begin(
    tmp_path: Path,
) -> None:
    reasons = ["a bad rate", "a bad width"]
    earlier = [
        Job(n, [f"seed={n}"], str(n), f"hash {n}", "failed", reason, ended="then", exit_code=2)
        for n, reason in enumerate(reasons)
    ]
    specs = [JobSpec(n, [f"seed={n}"], str(n), f"hash {n}") for n in range(3)]
    planner = Planner(tmp_path, earlier, [spec.overrides for spec in specs])
    plans = [planner.plan(spec) for spec in specs]
    sweep = Sweep("", "", [plan.job for plan in plans])
    started: list[Child] = []

    def start(plan: JobPlan) -> Child:
        started.append(child_of(tmp_path, "import time; time.sleep(60)"))
        os.kill(os.getpid(), signal.SIGTERM)
        return started[-1]

    with pytest.raises(Interrupted):
        Schedule(sweep, tmp_path, LauncherConfig(), start).run(plans)
    assert len(started) == 1
    jobs = Sweep.read(tmp_path).jobs
    assert [job.status for job in jobs] == ["interrupted", "failed", "skipped"]
    assert (jobs[1].reason, jobs[1].exit_code) == ("a bad width", 2)


def test_only_a_record_of_this_try_counts(tmp_path: Path) -> None:
    Summary("failed", "of before").write(tmp_path)
    for code, says in (("raise SystemExit('of now')", "of now"), ("", "left no record")):
        child = child_of(tmp_path, code, records=True)
        child.process.wait(30)
        assert child.ending()[0] == "failed" and says in child.ending()[1]
        write_failed_summary(tmp_path, *child.ending(), command="")
        assert says in Summary.read(tmp_path).reason
        child.close()


def test_a_run_that_had_ended_before_the_sweep_was_killed_is_done(tmp_path: Path) -> None:
    Summary("done").write(tmp_path)
    child = child_of(tmp_path, "", records=True)  # it finds that nothing is left to do
    child.process.wait(30)
    assert child.ending() == ("done", "")
    child.close()


@pytest.mark.slow
def test_a_terminal_that_goes_away_leaves_a_comparison(folder: Path) -> None:
    process = started(folder, "seed=0,1")
    wait_until(lambda: bool(trained(folder)), process)
    process.send_signal(signal.SIGHUP)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 129, said
    assert statuses(only(folder)) == ["interrupted", "skipped"]
    rows = told(only(folder), "comparison.json")["rows"]
    assert [row["status"] for row in rows] == ["interrupted", "skipped"]


def test_a_job_that_outlives_its_sweep_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    code = "import sys; from pathlib import Path; from runner.checkpoint.lock import lock\n"
    code += (
        "with lock(Path('0')): print('held', flush=True); sys.stdin.read(); Path('ended').touch()"
    )
    held = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert held.stdout is not None and held.stdin is not None
    assert held.stdout.readline() == b"held\n"
    waiting = threading.Thread(target=wait_for_running_jobs, args=(tmp_path, [Job(0, [], "0")]))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    held.communicate(timeout=30)
    waiting.join(30)
    assert not waiting.is_alive() and (tmp_path / "ended").exists()


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("raise SystemExit(0)", "done", ""),
        ("import os; os.kill(os.getpid(), 11)", "killed", "SIGSEGV"),
        ("import os; os.kill(os.getpid(), 15)", "interrupted", ""),
        ("import os; os.kill(os.getpid(), 1)", "interrupted", ""),
        ("raise SystemExit('it is broken')", "failed", "it is broken"),
        ("raise SystemExit('error: out of memory (2 MiB more) while training')", "oom", "2 MiB"),
    ],
)
def test_an_ending_without_a_summary_is_told_by_the_exit_code_and_the_last_words(
    tmp_path: Path, code: str, status: str, reason: str
) -> None:
    child = child_of(tmp_path, code)
    child.process.wait(30)
    found = child.ending()
    child.close()
    assert found[0] == status and reason in found[1]


def started(folder: Path, *typed: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "runner", "-m", *SHORT, *NET, *LONG, *typed], cwd=folder,
        env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip


def trained(folder: Path) -> list[Path]:
    found = folder.glob("outputs/sweeps/*/*/0/metrics.jsonl")
    return [path for path in found if path.stat().st_size]


def wait_until(condition: object, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
