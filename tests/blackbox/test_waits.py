"""Processes of a run or sweep that are stopped or killed, at any time, are named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests import runs
from tests.scale.distributed import runs as distributed
from tests.scale.sweep.conftest import NET, SHORT, only, own_folder, read, start_sweep

NO_WORKERS = "data.workers=0"
LONG = ["+model.work=300", "training.steps=60", "training.validate_every=60", "checkpoint.every=9"]


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sweep", "ddp"])
def test_a_path_of_temporary_files_that_is_too_long_for_sockets_is_not_used_for_them(
    kind: str, tmp_path: Path
) -> None:
    typed = ["-m", "seed=0"] if kind == "sweep" else ["distributed=ddp", "distributed.processes=2"]
    (temporary := tmp_path / ("x" * 120)).mkdir()
    done = runs.python("-m", "runner", *typed, *SHORT, folder=tmp_path, TMPDIR=str(temporary))
    assert done.returncode == 0, done.stderr


def test_a_removed_working_folder_is_named(tmp_path: Path) -> None:
    typed = f"cd {tmp_path}; mkdir gone; cd gone; rmdir ../gone; exec {sys.executable} -P -m runner"
    environment = {**os.environ, "PYTHONPATH": str(runs.TESTS.parent)}
    done = subprocess.run(["sh", "-c", typed], env=environment, capture_output=True, text=True)
    assert done.returncode == 5
    assert done.stderr == "error: the working folder was removed: change to one that exists\n"
