"""A try in a process of its own answers, and leaves nothing running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.replay.attempt import attempt_apart, with_settings


def test_whom_to_trust_is_never_taken_from_the_capture(captured: Any) -> None:
    path = captured("+data.poison=[3,17,20,33,41,50]", "+model.part=log")
    refused = attempt_apart(path, [], [], {}, 120)
    assert "security.trusted" in refused.failed
    assert not refused.bad


@pytest.mark.slow  # waits for a time-out
def test_one_that_hangs_is_ended_with_all_that_it_started(captured: Any, tmp_path: Path) -> None:
    path = captured("+data.poison=[3,17,20,33,41,50]", "+model.part=hangs")
    note = tmp_path / "pid"
    os.environ["FAULTY_HANGS"] = str(note)
    try:
        found = attempt_apart(path, ["faulty_models"], [], {}, 20)
    finally:
        del os.environ["FAULTY_HANGS"]
    assert "not done within" in found.failed
    assert not _alive(int(note.read_text()))


@pytest.mark.slow  # waits for a process to get going
def test_one_whose_parent_is_killed_ends_too(captured: Any, tmp_path: Path) -> None:
    path = captured("+data.poison=[3,17,20,33,41,50]", "+model.part=hangs")
    note = tmp_path / "pid"
    code = (
        "import sys; from pathlib import Path; from runner.replay.attempt import attempt_apart; "
        f"attempt_apart(Path({str(path)!r}), ['faulty_models'], [], {{}}, 100)"
    )
    paths = os.pathsep.join(sys.path)
    parent = subprocess.Popen(  # noqa: S603  # fixed arguments, no shell
        [sys.executable, "-c", code],
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


def test_a_key_of_a_technique_can_be_set_otherwise() -> None:
    from runner import compose

    config = compose(["optimization.amp.enabled=true"])
    amp = with_settings(config, {"optimization.amp.dtype": "fp16"}).optimization.amp
    assert (amp.enabled, amp.dtype.value) == (True, "fp16")


def _alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
