"""However an arm ends, it costs itself alone, and nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from runner.benchmark.blocks import ArmEnded
from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.crew import crew as crews
from runner.benchmark.crew.crew import Crew
from tests.benchmark.crew.arms import BASE, OWN, PARTS, QUICK, arm, is_gone, own

ROOT = Path(__file__).resolve().parents[3]


def test_a_killed_arm_is_said_to_be_and_the_others_go_on(tmp_path: Path) -> None:
    arms = [
        arm("one", *BASE, "data.workers=1"),
        own("two", "Ends", "optimization=none", "+model.how=killed", "+model.at=30"),
    ]
    with Crew(arms, QUICK, tmp_path) as crew:
        for name in ("one", "two"):
            crew.start(name)
        pids = {name: member.pid for name, member in crew.members.items()}
        with pytest.raises(ArmEnded, match="killed by SIGKILL; see .*worker.log") as ended:
            crew.turn("two", 30.0)  # in the midst of a turn
        assert ended.value.status == "killed"
        assert is_gone(pids["two"])
        assert json.loads((tmp_path / "two/summary.json").read_text())["status"] == "killed"
        assert crew.turn("one", 0.05).steps >= 3
        os.kill(pids["one"], signal.SIGKILL)  # while it waits
        with pytest.raises(ArmEnded) as ended:
            crew.turn("one", 0.05)
        assert ended.value.status == "killed"
        with pytest.raises(ArmEnded, match="was not started, or has ended"):
            crew.turn("one", 0.05)
    assert is_gone(pids["one"])


def test_what_an_arm_raises_is_its_reason(tmp_path: Path) -> None:
    arms = [
        own("raises", "Ends"),
        arm("nan", *OWN, f"data._target_={PARTS}.Broken", "model=mlp", "monitoring.every=1"),
        own("huge", "Huge"),
    ]
    with Crew(arms, QUICK, tmp_path) as crew:
        with pytest.raises(ArmEnded, match=r"ValueError: my own mistake \(arm_parts") as ended:
            crew.start("raises")
        assert ended.value.status == "failed"
        assert "Traceback" in (tmp_path / "raises/worker.log").read_text()
        with pytest.raises(ArmEnded) as ended:
            crew.start("nan")
            while True:
                crew.turn("nan", 0.1)
        assert ended.value.status == "failed"
        assert "the loss was nan" in ended.value.reason
        with pytest.raises(ArmEnded, match="out of memory") as ended:
            crew.start("huge")
        assert ended.value.status == "oom"
        assert not crew.members
    kept = {n: json.loads((tmp_path / n / "summary.json").read_text()) for n in crew.arms}
    assert kept["raises"]["status"] == "failed"
    assert kept["huge"]["status"] in ("failed", "oom")


def test_an_arm_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = [
        own("late", "Ends", "optimization=none", "+model.how=hangs", "+model.at=20"),
        own("never", "Ends"),
    ]
    monkeypatch.setattr(crews, "SLOW_S", 1.0)
    monkeypatch.setattr(crews, "SLOW", 0.0)
    with Crew(arms, QUICK, tmp_path) as crew:
        crew.start("late")
        pid = crew.members["late"].pid
        with pytest.raises(ArmEnded, match="not done within 1 s") as ended:
            crew.turn("late", 30.0)
        assert ended.value.status == "timeout"
        assert is_gone(pid)
        assert json.loads((tmp_path / "late/summary.json").read_text())["status"] == "timeout"
    soon = BenchmarkConfig(timeout_s=0.01)
    with Crew(arms, soon, None) as crew, pytest.raises(ArmEnded) as ended:
        crew.start("never")
    assert ended.value.status == "timeout"


def test_arms_that_wait_are_let_go_with_their_files_closed(tmp_path: Path) -> None:
    with pytest.raises(KeyError), Crew([arm("one", *BASE)], QUICK, tmp_path) as crew:
        crew.start("one")
        pid = crew.members["one"].pid
        raise KeyError
    assert is_gone(pid)
    kept = json.loads((tmp_path / "one/summary.json").read_text())
    assert kept["status"] == "interrupted" and "of the benchmark" in kept["reason"]


SCRIPT = """
import signal
from runner.benchmark.arms import Arm
from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.crew.crew import Crew
from tests.benchmark.crew.arms import BASE, OWN, PARTS, QUICK, arm, is_gone, own
from runner.composing import compose

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    arms = [Arm("one", compose(["data=digits", "model=mlp", "data.workers=1", "data.prefetch=2"]))]
    with Crew(arms, BenchmarkConfig(), None) as crew:
        crew.start("one")
        print(crew.members["one"].pid, flush=True)
        crew.turn("one", 600.0)
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A parent whose arm is in the midst of a long turn, and the arm's process."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    parent = subprocess.Popen(
        [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
    )  # fmt: skip
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    yield parent, pid
    parent.kill()
    parent.communicate()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_arm_outlives_its_parent(script: tuple[subprocess.Popen[str], int], how: int) -> None:
    parent, pid = script
    group = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    assert len(group) >= 2  # a data worker too
    os.killpg(parent.pid, how)  # as a terminal does it: to the whole group of the parent
    _, said = parent.communicate(timeout=60)
    gone, left = psutil.wait_procs(group, timeout=30)
    # who lost his parent waits for somebody to collect him, which nobody does in some containers
    assert [p for p in left if p.status() != psutil.STATUS_ZOMBIE] == []
    if how == signal.SIGINT:
        assert "KeyboardInterrupt" in said
