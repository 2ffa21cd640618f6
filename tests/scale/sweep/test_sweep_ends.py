"""What ends a job or a sweep before its time: time-outs, signals, failures that end all."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from runner.core.checkpoint.lock import lock
from runner.core.errors import Interrupted
from runner.core.record.summary import Summary
from runner.core.schemas.sweep import LauncherConfig
from runner.scale.sweep.job_process import JobProcess
from runner.scale.sweep.launch import PlannedJobs
from runner.scale.sweep.plan import JobPlan, Planner, wait_for_running_jobs
from runner.scale.sweep.schedule import Schedule, write_failed_summary
from runner.scale.sweep.state import Job, Sweep
from tests.runs import wait_until

from .conftest import environment


def child_of(folder: Path, code: str, **settings: bool) -> JobProcess:
    return JobProcess.start([sys.executable, "-c", code], environment(), folder, None, **settings)


def end_of(child: JobProcess) -> tuple[str, str]:
    child.process.wait(30)
    child.close()
    return child.end_status()


def test_a_job_that_does_not_listen_is_ended_at_the_first_deadline_for_the_first_reason(
    tmp_path: Path,
) -> None:
    deaf = "import signal, threading; signal.signal(15, signal.SIG_IGN); print('ready', flush=True)"
    child = child_of(tmp_path, f"{deaf}; threading.Event().wait()")
    wait_until(lambda: child.last_line() == "ready")
    child.request_end(signal.SIGTERM, "timeout", "too long", grace_s=0.2)
    child.request_end(signal.SIGTERM, "interrupted", "Ctrl-C")
    wait_until(child.has_ended)
    assert end_of(child) == ("timeout", "too long")


def test_an_interrupted_sweep_keeps_why_jobs_failed_before_that_it_did_not_begin(
    tmp_path: Path,
) -> None:
    earlier = [
        Job(n, [f"seed={n}"], str(n), f"hash {n}", "failed", "a bad rate", ended="then")
        for n in range(2)
    ]
    planner = Planner(tmp_path, earlier, [])
    jobs = [Job(n, [f"seed={n}"], str(n), f"hash {n}") for n in range(3)]
    source = PlannedJobs([planner.match(JobPlan(job)) for job in jobs])

    def start(plan: JobPlan) -> JobProcess:
        os.kill(os.getpid(), signal.SIGTERM)
        return child_of(tmp_path, "import time; time.sleep(60)")

    with pytest.raises(Interrupted):
        Schedule(Sweep("", "", jobs), tmp_path, LauncherConfig(), start, source).run()
    jobs = Sweep.read(tmp_path).jobs
    assert [job.status for job in jobs] == ["interrupted", "failed", "skipped"]
    assert jobs[1].reason == "a bad rate"


def test_only_a_record_of_this_try_counts_unless_the_run_had_ended(tmp_path: Path) -> None:
    Summary("failed", "of before").write(tmp_path)
    for code, says in (("raise SystemExit('of now')", "of now"), ("", "left no record")):
        status, reason = end_of(child_of(tmp_path, code, writes_summary=True))
        assert status == "failed" and says in reason
        write_failed_summary(tmp_path, status, reason, command="")
        assert says in Summary.read(tmp_path).reason
    Summary("done").write(tmp_path)  # as the sweep was killed: nothing is left to do
    assert end_of(child_of(tmp_path, "", writes_summary=True)) == ("done", "")


def test_a_job_whose_record_is_complete_is_done_however_its_process_ends(tmp_path: Path) -> None:
    code = "from pathlib import Path; from runner.core.record.summary import Summary; "
    code += f"Summary('done').write(Path({str(tmp_path)!r})); import time; time.sleep(60)"
    process = child_of(tmp_path, code, writes_summary=True)
    wait_until((tmp_path / "summary.json").exists)
    process.timeout_s = 0.0
    wait_until(process.has_ended)
    assert process.requested_status == "timeout" and end_of(process) == ("done", "")


def test_a_job_that_outlives_its_sweep_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    waiting = threading.Thread(target=wait_for_running_jobs, args=(tmp_path, [Job(0, [], "0")]))
    with lock(tmp_path / "0"):
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
    waiting.join(30)
    assert not waiting.is_alive()


CONTEXT = "from runner.scale.sweep import job_context; job_context.take_job_context()"


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        (f"{CONTEXT}; job_context.report_end()", "done", ""),
        (f"{CONTEXT}; import os; os._exit(0)", "failed", "left no record of its end"),
        (f"{CONTEXT}; import os; os.fork() or job_context.report_end()", "failed", "no record"),
        (f"{CONTEXT}; import os; os.close(0); job_context.report_end()", "done", ""),
        ("raise SystemExit(0)", "failed", "left no record of its end"),
        ("import os; os.kill(os.getpid(), 11)", "killed", "SIGSEGV"),
        ("import os; os.kill(os.getpid(), 15)", "interrupted", ""),
        ("raise SystemExit('it is broken')", "failed", "it is broken"),
        ("raise SystemExit('error: out of memory (2 MiB more) while training')", "oom", "2 MiB"),
    ],
)
def test_an_ending_without_a_summary_is_told_by_the_exit_code_and_the_last_words(
    tmp_path: Path, code: str, status: str, reason: str
) -> None:
    end = end_of(child_of(tmp_path, code))
    assert end[0] == status and reason in end[1]


def test_a_job_s_log_keeps_its_first_and_last_mb_and_the_reason_of_the_last_try(
    tmp_path: Path,
) -> None:
    log = tmp_path / "console.log"
    code = (
        "import sys\nprint('first')\nfor i in range(300_000): print(f'line {i:06} ' + 'x' * 30)\n"
        "print('error: last words'); sys.exit(1)"
    )
    for _ in (1, 2):
        child = child_of(tmp_path, code)
        assert end_of(child) == ("failed", "error: last words")
        assert 2 * 2**20 < log.stat().st_size < 2 * 2**20 + 100
        text = log.read_text()
        assert text.startswith("first\nline 000000") and text.endswith("error: last words\n")
        assert text.count("bytes of output left out") == 1
    child = child_of(tmp_path, "pass")  # a try that prints nothing
    child.process.wait(30)
    assert child.last_line() == ""
    child.close()


def test_the_log_of_a_running_job_is_trimmed_while_it_writes(tmp_path: Path) -> None:
    code = (
        "import time\nfor i in range(400_000): print(f'line {i:06} ' + 'x' * 30)\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    child = child_of(tmp_path, code)
    wait_until(lambda: child.last_line() == "ready")
    assert not child.has_ended()
    assert (tmp_path / "console.log").stat().st_size < 2.1 * 2**20
    child.close()
