"""Jobs that are forked come out as spawned ones do."""

import os
import sys
from pathlib import Path

import pytest

from runner.core import fork_server
from runner.scale.sweep.fork import fork_job
from runner.scale.sweep.job_process import JobProcess
from runner.scale.sweep.job_starter import job_environment
from tests.runs import python

from .conftest import only, read, sweep

pytestmark = pytest.mark.skipif(not fork_server.available(), reason="forks on Linux alone")


@pytest.mark.slow
def test_a_forked_job_has_the_weights_of_a_spawned_one(tmp_path: Path) -> None:
    weights = {}
    for start in ("fork", "spawn"):
        (tmp_path / start).mkdir()
        done = sweep(tmp_path / start, "seed=0", "data.workers=1", f"sweep.start={start}")
        assert done.returncode == 0, done.stderr
        place = only(tmp_path / start)
        assert read(place)["start"] == start
        files = read(place / "0/checkpoints/last", "manifest.json")["files"]
        weights[start] = files["model.safetensors"]["sha256"]
    assert weights["fork"] == weights["spawn"]


def test_a_forked_process_has_its_own_session_environment_output_and_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for typed, code, last in (
        ("--version", 0, "omegaconf "),
        ("trainnig.steps=3", 2, "error: trainnig.steps: no config group or key 'trainnig'; did"),
    ):
        command = [sys.executable, "-P", "-m", "runner", typed]
        variables = {**job_environment(1), "OWN": "1"}
        child = JobProcess.start(command, variables, tmp_path, None, start_process=fork_job)
        assert child.process.wait(60) == code
        assert child.last_line().startswith(last) and os.environ.get("OWN") is None
        child.close()


STARTS_THREAD = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
FORKS = """
import os, signal, sys
from pathlib import Path
from runner.core import fork_server
from runner.scale.sweep.job_process import JobProcess
from runner.scale.sweep.fork import fork_job
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])  # as the agent of ranks does
fork_server.start(["starts_thread", "runner.scale.sweep.fork"], os.environ)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
child = JobProcess.start(["./spawned", "runner", "--version"], dict(os.environ), Path(), None,
                    start_process=fork_job)
child.process.wait(60)
print(child.last_line())
"""


def test_where_the_server_has_another_thread_a_job_is_spawned_and_gets_its_signals(
    tmp_path: Path,
) -> None:
    (tmp_path / "starts_thread.py").write_text(STARTS_THREAD)
    (tmp_path / "spawned").write_text("#!/bin/sh\necho spawned $(grep SigBlk /proc/self/status)\n")
    (tmp_path / "spawned").chmod(0o755)
    path = os.pathsep.join([job_environment(1)["PYTHONPATH"], str(tmp_path)])
    done = python("-c", FORKS, folder=tmp_path, PYTHONPATH=path)
    assert done.stdout == "spawned SigBlk: 0000000000000000\n", done.stderr
