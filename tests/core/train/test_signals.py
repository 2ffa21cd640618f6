"""Ctrl-C and SIGTERM end in a checkpoint, the documented exit code, and no worker left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.runs import command, read, wait_until

HERE = Path(__file__).parents[2]
STUCK = """
import ctypes
from runner import Hook

class Stuck(Hook):
    def on_step(self, run, step):
        if step.number == 3:
            open("stuck", "w").close()
            mutex = ctypes.create_string_buffer(64)
            for _ in range(2):  # a thread that waits for its own lock
                ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


def start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "runner", f"hydra.run.dir={folder}", "security.trusted=[my_package]",
        "data._target_=my_package.Noisy", "model._target_=my_package.Net", "training.steps=100000",
        "training.batch_size=4", "training.validate_every=100000", "device.threads=1",
        # what looks at samples first would wait for them
        "optimization=basic", "training.sanity=false", *overrides,
    ]  # fmt: skip
    path = os.pathsep.join([str(HERE), str(HERE.parent)])
    return subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path}, cwd=folder.parent, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_a_signal_does_not_wait_for_a_worker_that_is_stuck(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder, "data.workers=1", "+data.seconds=600")
    wait_until(lambda: (folder / "provenance.json").exists(), process)  # git is a child too
    run = psutil.Process(process.pid)
    wait_until(lambda: run.children() and run.status() == psutil.STATUS_SLEEPING, process)
    children = run.children(recursive=True)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)  # the worker would sleep for 600 s
    assert process.returncode == 143, output
    assert not psutil.wait_procs(children, timeout=20)[1]


def test_a_step_that_no_signal_reaches_is_left_after_the_grace_period(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (tmp_path / "own.py").write_text(STUCK)
    process = start(
        folder, "debug.hooks=[own.Stuck]", "security.trusted=[my_package,own]",
        "checkpoint.every=2", "checkpoint.grace_s=3",
    )  # fmt: skip
    wait_until(lambda: (tmp_path / "stuck").exists(), process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    record = read(folder)
    assert (record["status"], record["steps"]) == ("interrupted", 3)
    assert record["checkpoint"]["last"] == "checkpoints/step_00000002"
    assert record["reason"].endswith("its step did not end within checkpoint.grace_s=3")
    assert record["reason"] in output.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_a_signal_does_not_wait_for_a_compiler_and_ends_it(tmp_path: Path, again: bool) -> None:
    compiler, folder = tmp_path / "compiler", tmp_path / "run"
    compiler.write_text(f"#!/bin/sh\ntouch {tmp_path}/compiling\nsleep 600\n")
    compiler.chmod(0o700)
    grace_s = 300 if again else 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", str(compiler))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
        process = start(folder, "optimization=compile", f"checkpoint.grace_s={grace_s}")
    wait_until(lambda: (tmp_path / "compiling").exists(), process)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    if again:
        wait_until(lambda: "again to stop" in (folder / "run.log").read_text(), process)
        process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    record = read(folder)
    assert (record["status"], record["steps"]) == ("interrupted", 0)
    assert len(children) > 1 and not psutil.wait_procs(children, timeout=10)[1]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR2])
def test_a_signal_while_a_run_is_built_is_named(tmp_path: Path, number: int) -> None:
    code = f"import os\n\ndef data():\n    os.kill(os.getpid(), {int(number)})\n"
    (tmp_path / "my_data.py").write_text(code)
    done = command(tmp_path, "data._target_=my_data.data", "security.trusted=[my_data]")
    assert done.returncode == 128 + number
    name = signal.Signals(number).name
    last = done.stderr.splitlines()[-1]
    assert f"interrupted by {name} before the first step; no checkpoint is written" in last
