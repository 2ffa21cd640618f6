"""An attempt in a process of its own answers, and leaves nothing running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runner.jobs.replay import ChildAttempts
from tests.replay.replays import HERE, POISON, Captured


def attempts(path: Path, trusted: list[str], limit_s: float, folder: Path) -> ChildAttempts:
    return ChildAttempts(path, trusted, limit_s, folder / "log")


@pytest.mark.slow  # waits for a time-out
def test_one_that_hangs_is_ended_with_all_that_it_started(
    captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, note = captured(POISON, "+model.part=hangs"), tmp_path / "pid"
    monkeypatch.setenv("FAULTY_HANGS", str(note))
    result = attempts(path, ["faulty_models"], 30, tmp_path)([])
    assert "not done within replay.timeout_s=30" in result.failed
    assert not _alive(int(note.read_text()))


@pytest.mark.slow  # waits for a process to get going
def test_one_whose_parent_is_killed_ends_too(captured: Captured, tmp_path: Path) -> None:
    path, note = captured(POISON, "+model.part=hangs"), tmp_path / "pid"
    code = (
        "from pathlib import Path; from runner.jobs.replay import ChildAttempts; "
        f"ChildAttempts(Path({str(path)!r}), ['faulty_models'], 100, Path('log'))([])"
    )
    paths = os.pathsep.join([str(HERE), *sys.path])
    parent = subprocess.Popen(  # noqa: S603  # fixed arguments, no shell
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "FAULTY_HANGS": str(note), "PYTHONPATH": paths},
    )
    while not note.exists() or not note.read_text():
        assert parent.poll() is None
    started = int(note.read_text())
    assert _alive(started)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while _alive(started):  # at once, as the kernel goes
        pass


def _alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
