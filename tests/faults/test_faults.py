"""Faults of docs/measured/faults.md that no other test makes; whether each test named there is."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from runner.core import fork_server
from tests.faults import processes
from tests.faults.modes import typed
from tests.runs import wait_until

ROOT = Path(__file__).parents[2]
MODE = "BatchNorm, dropout, draws"


def test_each_fault_has_a_test_or_a_proof_that_exists() -> None:
    rows = re.findall(r"^\| (\d+) \|.*`([^`]+)` \|$", _text(), re.M)
    assert [int(number) for number, _ in rows] == [*range(1, 69)]
    missing = [named for _, named in rows if not _exists(named)]
    assert missing == []


def test_the_guarantees_of_security_name_tests_that_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)`", _text().partition("\n## Security\n")[2])
    assert len(named) > 15
    assert [name for name in named if not (ROOT / "tests" / name).is_file()] == []


def _text() -> str:
    return (ROOT / "docs" / "measured" / "faults.md").read_text()


def _exists(named: str) -> bool:
    if "::" not in named:
        return (ROOT / "scripts" / named.split()[0]).exists()
    path, _, function = named.partition("::")
    return f"def {function}(" in (ROOT / "tests" / path).read_text()


@pytest.mark.skipif(not fork_server.available(), reason="forks on Linux alone")
@pytest.mark.slow
def test_a_run_that_was_stopped_for_a_while_ends_in_the_same_bits(tmp_path: Path) -> None:
    from tests.faults.end_state import end_state

    processes.serve()
    ends = []
    for name in ("whole", "stopped"):
        folder = tmp_path / name
        process = processes.start(folder, typed(MODE, folder / "run"))
        if name == "stopped":
            wait_until((folder / "run" / "checkpoints" / "last").exists, process)
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(3)
            assert process.poll() is None
            os.kill(process.pid, signal.SIGCONT)
        assert process.wait(120) == 0
        ends.append(end_state(folder / "run"))
    assert ends[0] == ends[1]
