"""Jobs that are forked come out as spawned ones do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner import fork_server
from runner.sweep.child import Child
from runner.sweep.fork import fork
from runner.sweep.job_starter import environment
from tests.sweep.conftest import sweep

pytestmark = pytest.mark.skipif(not fork_server.available(), reason="forks on Linux alone")


def weights(folder: Path) -> dict[str, str]:
    manifests = sorted(folder.glob("outputs/sweeps/*/*/*/checkpoints/step_*/manifest.json"))
    files = [json.loads(path.read_text())["files"] for path in manifests]
    return {
        str(path.relative_to(folder).parts[4:]): each["model.safetensors"]["sha256"]
        for path, each in zip(manifests, files, strict=True)
    }


@pytest.mark.slow
def test_a_forked_job_has_the_weights_of_a_spawned_one(tmp_path: Path) -> None:
    found = {}
    for start in ("fork", "spawn"):
        (tmp_path / start).mkdir()
        done = sweep(tmp_path / start, "seed=0", "data.workers=1", f"sweep.start={start}")
        assert done.returncode == 0, done.stderr
        (record,) = (tmp_path / start).glob("outputs/sweeps/*/*/sweep.json")
        assert json.loads(record.read_text())["start"] == start
        found[start] = weights(tmp_path / start)
    assert len(found["fork"]) > 0 and found["fork"] == found["spawn"]


def test_a_forked_process_has_its_own_session_environment_output_and_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    variables = {**environment(1), "OWN": "1"}
    command = [sys.executable, "-P", "-m", "runner", "--version"]
    child = Child.start(command, variables, tmp_path, None, start_process=fork)
    assert child.process.wait(60) == 0
    assert child.last_line().startswith("omegaconf ")
    assert os.environ.get("OWN") is None
    child.close()
    wrong = [sys.executable, "-P", "-m", "runner", "trainnig.steps=3"]
    child = Child.start(wrong, variables, tmp_path, None, start_process=fork)
    assert child.process.wait(60) == 2
    assert "did you mean training.steps" in child.last_line()
    child.close()


STARTS_THREAD = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
FORKS = """
import os, sys
from pathlib import Path
from runner import fork_server
from runner.sweep.child import Child
from runner.sweep.fork import fork
fork_server.start([*sys.argv[1:], "runner.sweep.fork"], os.environ)
child = Child.start(["./spawned", "runner", "--version"], dict(os.environ), Path(), None,
                    start_process=fork)
child.process.wait(60)
print(child.last_line())
"""


@pytest.mark.parametrize(("preload", "last"), [(["starts_thread"], "spawned"), ([], "omegaconf")])
def test_where_the_server_has_another_thread_a_job_is_spawned(
    tmp_path: Path, preload: list[str], last: str
) -> None:
    (tmp_path / "starts_thread.py").write_text(STARTS_THREAD)
    (tmp_path / "spawned").write_text("#!/bin/sh\necho spawned\n")
    (tmp_path / "spawned").chmod(0o755)
    variables = environment(1)
    variables["PYTHONPATH"] += os.pathsep + str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", FORKS, *preload],
        cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.startswith(last)
