from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from runner.record import provenance


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (
            ["/somewhere/runner/__main__.py", "data=digits"],
            ["python", "-m", "runner", "data=digits"],
        ),
        (["/usr/bin/runner", "name=a b"], ["python", "-m", "runner", "name=a b"]),
        (["study.py", "--quick"], ["python", "study.py", "--quick"]),
    ],
)
def test_the_command_runs_again_in_a_shell(
    argv: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert shlex.split(provenance.command()) == expected


def test_the_versions_name_what_a_result_depends_on() -> None:
    found = provenance.versions()
    assert {"python", "platform", "torch", "numpy", "hydra-core", "omegaconf"} <= found.keys()


def test_each_session_of_a_resumed_run_is_kept(tmp_path: Path) -> None:
    provenance.record(tmp_path)
    provenance.record(tmp_path)
    sessions = json.loads((tmp_path / "provenance.json").read_text())["sessions"]
    assert len(sessions) == 2
    assert sessions[0].keys() == {"started", "command", "git", "versions"}


def test_a_damaged_record_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "provenance.json").write_text("[1, 2")
    provenance.record(tmp_path)
    assert len(json.loads((tmp_path / "provenance.json").read_text())["sessions"]) == 1
