"""Each wait for a process of ours has a limit, names the process, and counts its own polls."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from runner.core import fork_server
from runner.core.errors import StorageError
from runner.core.process_wait import PolledClock, describe_state
from tests import runs

pytestmark = pytest.mark.skipif(not fork_server.available(), reason="forks on Linux alone")


def test_time_in_which_the_waiter_itself_was_stopped_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock, seconds = PolledClock(), []
    for passed in (0.25, 0.5, 3600.0, 0.25):
        now[0] += passed
        seconds.append(clock.poll())
    assert seconds == [0.25, 0.75, 1.75, 2.0]


def test_a_silent_or_killed_fork_server_is_named_and_another_one_can_be_started() -> None:
    code = (
        "import os, signal, sys, multiprocessing, time\n"
        "from runner.core import fork_server as f\n"
        "from runner.core.errors import ProcessLost\n"
        "process = multiprocessing.get_context('forkserver').Process\n"
        "make = lambda: process(target=time.sleep, args=(0,))\n"
        "f.start([], os.environ); p = make(); f.start_process(p); p.join(); print(p.exitcode)\n"
        "for number in (signal.SIGSTOP, signal.SIGKILL):\n"
        "    f.start([], os.environ); f.start_process(make()); os.kill(f.server_pid(), number)\n"
        "    f.ANSWER_S = 60 if number == signal.SIGKILL and f.has_ended(60) else 0.3\n"
        "    try: f.start_process(make())\n"
        "    except ProcessLost as lost: print(lost, f.is_running())\n"
        "    f.ANSWER_S = 60\n"
    )
    done = runs.python("-c", code)
    first, silent, killed = done.stdout.splitlines()
    assert first == "0", done.stderr
    assert silent.startswith("the fork server gave no answer for 0.3 s (pid ")
    assert silent.endswith("state T = stopped): it was killed False")
    assert killed.startswith("the fork server (pid ") and killed.endswith("was killed False")


def test_a_stopped_process_is_described_by_its_state() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        runs.wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        described = describe_state(process.pid)
        process.kill()
    assert described == f" (pid {process.pid}, state T = stopped)"


def long_folder(folder: Path) -> Path:
    (temporary := folder / ("x" * 120)).mkdir()
    return temporary


def test_sockets_are_in_a_short_folder_and_files_are_not(tmp_path: Path) -> None:
    temporary = long_folder(tmp_path)
    code = (
        "import multiprocessing, os, tempfile, time\nfrom runner.core import fork_server as f\n"
        "process = multiprocessing.get_context('forkserver').Process\n"
        "process = process(target=time.sleep, args=(0,))\n"
        "f.start([], os.environ); f.start_process(process); process.join()\n"
        "print(process.exitcode, tempfile.gettempdir())\n"
    )
    done = runs.python("-c", code, TMPDIR=str(temporary))
    assert done.stdout == f"0 {temporary}\n", done.stderr


def test_where_no_folder_is_short_enough_for_sockets_the_variable_is_named(
    tmp_path: Path,
) -> None:
    code = (
        "import os\nfrom runner.core import fork_server as f\nf.SHORT_FOLDERS = ('/nowhere',)\n"
        "print(f.available())\nf.start([], os.environ)\n"
    )
    done = runs.python("-c", code, TMPDIR=str(long_folder(tmp_path)))
    assert done.stdout == "False\n"
    assert "StorageError: TMPDIR: " in done.stderr and "at most 75 bytes" in done.stderr


@pytest.mark.parametrize(("cfg", "said"), [(None, "OSError: AF_UNIX path"), ("job", "stdout")])
def test_an_error_without_a_file_is_that_of_stdout_only_where_the_config_is_printed(
    cfg: str | None, said: str
) -> None:
    from runner.cli.launch import JobResults, _translate_errors

    request: Any = SimpleNamespace(session=None, flags=SimpleNamespace(cfg=cfg))
    with pytest.raises(StorageError, match=said), _translate_errors(request, JobResults()):
        raise OSError("AF_UNIX path too long")
