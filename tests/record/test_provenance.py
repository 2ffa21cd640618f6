from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from runner.record import provenance


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["/somewhere/runner/__main__.py", "data=digits"], "python -m runner data=digits"),
        (["/usr/bin/runner", "name=a b"], "python -m runner 'name=a b'"),
        (["study.py", "--quick"], "python study.py --quick"),
    ],
)
def test_the_command_runs_again_in_a_shell(
    argv: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert provenance.command() == expected


def test_each_session_of_a_resumed_run_is_kept_unless_the_record_is_damaged(
    tmp_path: Path,
) -> None:
    for damaged, count in (("", 1), ("", 2), ("[1, 2", 1)):
        if damaged:
            (tmp_path / "provenance.json").write_text(damaged)
        provenance.record(tmp_path)
        sessions = json.loads((tmp_path / "provenance.json").read_text())["sessions"]
        assert len(sessions) == count
    assert sessions[0].keys() == {"started", "command", "git", "versions"}
    names = {"python", "platform", "torch", "numpy", "hydra-core", "omegaconf"}
    assert names <= sessions[0]["versions"].keys()
