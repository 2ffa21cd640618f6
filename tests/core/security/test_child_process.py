"""A process that another one starts: its end, signals and state."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from runner.core.process_wait import describe_exit
from runner.core.security.child_process import ChildProcess
from tests.runs import wait_until

STARTS_ANOTHER = """
import subprocess, sys
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], {how})
print(other.pid, flush=True)
{then}
"""


@contextmanager
def started(code: str) -> Iterator[ChildProcess]:
    """A process, which is ended."""
    command = [sys.executable, "-c", code]
    process = ChildProcess(
        subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    )
    try:
        yield process
    finally:
        process.end()
        process.handle.stdout.close()


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_the_end_of_a_process_is_that_of_all_its_descendants() -> None:
    then = "import time; time.sleep(600)"
    with started(STARTS_ANOTHER.format(how="start_new_session=True", then=then)) as process:
        other = int(process.handle.stdout.readline())
        assert process.poll() is None and process.wait(0.01) is None
    assert process.exit_code == -signal.SIGKILL
    wait_until(lambda: is_gone(other), seconds=30)


def test_what_a_process_leaves_behind_ends_with_its_group() -> None:
    with started(STARTS_ANOTHER.format(how="", then="")) as process:
        other = int(process.handle.stdout.readline())
        assert process.wait(60) == 0 and psutil.pid_exists(other)
    wait_until(lambda: is_gone(other), seconds=30)


def test_a_process_that_is_stopped_is_told_from_one_that_runs() -> None:
    with started("import time; time.sleep(600)") as process:
        process.poll()
        assert process.stopped_s == 0
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: process.stopped_s >= 0.2, process, 30)
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: not process.stopped_s, process, 30)


@pytest.mark.parametrize(
    ("code", "end", "status", "text"),
    [
        ("raise SystemExit(3)", 3, "failed", "ended with exit code 3"),
        ("import os; os.kill(os.getpid(), 11)", -11, "killed", "was killed by SIGSEGV"),
    ],
)
def test_how_a_process_ended_is_told_by_its_exit_code(
    code: str, end: int, status: str, text: str
) -> None:
    with started(code) as process:
        assert process.wait(60) == end
        assert process.describe_end() == (status, text) and describe_exit(end) == text
