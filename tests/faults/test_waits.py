"""Each wait for a process of ours has a limit, names the process, and counts its own polls."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from runner.core import fork_server
from runner.core.errors import StorageError
from runner.core.process_wait import PolledClock, describe_state
from tests import runs
from tests.scale.distributed import runs as distributed
from tests.scale.sweep.conftest import NET, SHORT, only, own_folder, read, start_sweep

NO_WORKERS = "data.workers=0"
LONG = ["+model.work=300", "training.steps=60", "training.validate_every=60", "checkpoint.every=9"]
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


def fork_server_of(pid: int) -> psutil.Process:
    """The fork server that a process starts."""

    def servers() -> list[psutil.Process]:
        children = psutil.Process(pid).children()
        return [child for child in children if "forkserver" in " ".join(child.cmdline())]

    runs.wait_until(servers)
    return servers()[0]


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("ddp", signal.SIGTERM),
        pytest.param("ddp", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("fsdp", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_signal_while_the_fork_server_imports_ends_the_run_before_the_first_step(
    kind: str, number: int, tmp_path: Path
) -> None:
    started = distributed.start(tmp_path / "run", "", NO_WORKERS, f"distributed={kind}")
    try:
        fork_server_of(started.process.pid).suspend()  # its imports last
        started.send(number)
        started.end()
    finally:
        started.kill()
    assert started.code == 128 + number, started.output
    assert "before the first step; no checkpoint is written" in started.message
    assert not (started.folder / "pid-0").exists() and started.left() == []


@pytest.mark.slow
def test_a_fork_server_that_is_stopped_while_it_starts_ends_the_run_and_is_named(
    tmp_path: Path,
) -> None:
    started = distributed.start(tmp_path / "run", "", NO_WORKERS, "data.timeout_s=2")
    try:
        fork_server_of(started.process.pid).suspend()
        started.end()
    finally:
        started.kill()
    assert started.code == 1
    assert "the fork server gave no answer for 2 s (pid " in started.message
    assert "state T = stopped" in started.message and started.left() == []


@pytest.mark.slow
def test_ranks_that_are_all_stopped_end_within_the_limit_and_are_named(tmp_path: Path) -> None:
    done = distributed.run(tmp_path / "run", "0:forward:stop:6,1:forward:stop:6", NO_WORKERS)
    assert done.code == 1
    assert "were stopped for distributed.timeout_s=8 s: 0 (pid " in done.message
    assert done.message.count("state T = stopped") == 2


@pytest.mark.slow
def test_a_distributed_run_that_was_stopped_as_a_whole_ends_in_the_same_bits(
    tmp_path: Path,
) -> None:
    whole = distributed.run(
        tmp_path / "whole", "", NO_WORKERS, "distributed.timeout_s=3", steps=200
    )
    stopped = distributed.start(
        tmp_path / "stopped", "", NO_WORKERS, "distributed.timeout_s=3", steps=200
    )
    try:
        stopped.wait_for("checkpoints/step_*4")
        pids = [stopped.process.pid, *(process.pid for process in stopped.ranks(""))]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(6)
        for pid in pids:
            with suppress(ProcessLookupError):  # the first to continue may end another one
                os.kill(pid, signal.SIGCONT)
        stopped.end()
    finally:
        stopped.kill()
    assert (whole.code, stopped.code) == (0, 0), stopped.output
    assert distributed.digest(stopped.folder) == distributed.digest(whole.folder)


@contextmanager
def running_sweep(folder: Path, *typed: str) -> Iterator[subprocess.Popen[bytes]]:
    """A sweep of one job that has begun to train."""
    with start_sweep(folder, *SHORT, *NET, *LONG, *typed) as process:
        try:
            pattern = "outputs/sweeps/*/*/0/checkpoints/step_*9"
            runs.wait_until(lambda: [*folder.glob(pattern)], process)
            yield process
        finally:
            process.kill()


def output(folder: Path) -> str:
    return (folder / "console").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [False, True])
def test_a_job_whose_fork_server_was_killed_says_so_and_is_tried_again(
    stopped: bool, tmp_path: Path
) -> None:
    folder = own_folder(tmp_path)
    with running_sweep(folder) as process:
        server = fork_server_of(process.pid)
        if stopped:
            server.suspend()
        server.kill()
        assert process.wait(300) == 0, output(folder)
    text = output(folder)
    assert "the sweep's fork server was killed" in text and "tried again" in text
    (job,) = read(only(folder))["jobs"]
    assert (job["status"], job["tries"]) == ("done", 2)


@pytest.mark.slow
def test_a_stopped_job_is_named_and_continues_with_its_process(tmp_path: Path) -> None:
    folder = own_folder(tmp_path)
    with running_sweep(folder) as process:
        (job,) = fork_server_of(process.pid).children()
        job.suspend()
        runs.wait_until(lambda: f"pid {job.pid} is stopped (state T)" in output(folder), process)
        job.resume()
        assert process.wait(300) == 0, output(folder)
    assert [job["tries"] for job in read(only(folder))["jobs"]] == [1]


def long_folder(folder: Path) -> Path:
    (temporary := folder / ("x" * 120)).mkdir()
    return temporary


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sweep", "ddp"])
def test_a_path_of_temporary_files_that_is_too_long_for_sockets_is_not_used_for_them(
    kind: str, tmp_path: Path
) -> None:
    typed = ["-m", "seed=0"] if kind == "sweep" else ["distributed=ddp", "distributed.processes=2"]
    long = str(long_folder(tmp_path))
    done = runs.python("-m", "runner", *typed, *SHORT, folder=tmp_path, TMPDIR=long)
    assert done.returncode == 0, done.stderr


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


def test_a_removed_working_folder_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    code = f"import os, sys; os.rmdir({str(folder)!r}); sys.argv = ['runner', 'training.steps=1']\n"
    code += "from runner.__main__ import main; sys.exit(main())"
    done = runs.python("-P", "-c", code, folder=folder)
    assert done.returncode == 5
    assert done.stderr == "error: the working folder was removed: change to one that exists\n"
