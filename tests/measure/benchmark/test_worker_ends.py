"""However an arm ends, it costs itself alone, and nothing of it is left."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from runner.core.errors import WorkerFailure
from runner.core.schemas.jobs import BenchmarkConfig
from runner.measure.benchmark.workers import pool as pools
from runner.measure.benchmark.workers.pool import WorkerPool
from tests.measure.benchmark.arm_parts import BASE, OWN, PARTS, QUICK, arm, is_gone, own

ROOT = Path(__file__).resolve().parents[3]


def test_a_killed_arm_is_reported_as_killed_and_the_others_continue(tmp_path: Path) -> None:
    arms = [
        arm("one", *BASE, "data.workers=1"),
        own("two", "Ends", "optimization=none", "+model.how=killed", "+model.at=30"),
    ]
    with WorkerPool(arms, QUICK, tmp_path) as pool:
        for name in ("one", "two"):
            pool.start(name)
        pids = {name: worker.pid for name, worker in pool.workers.items()}
        with pytest.raises(WorkerFailure, match="killed by SIGKILL; see .*worker.log") as ended:
            pool.turn("two", 30.0)  # in the midst of a turn
        assert ended.value.status == "killed"
        assert is_gone(pids["two"])
        assert json.loads((tmp_path / "two/summary.json").read_text())["status"] == "killed"
        assert pool.turn("one", 0.05).steps >= 3
        os.kill(pids["one"], signal.SIGKILL)  # while it waits
        with pytest.raises(WorkerFailure) as ended:
            pool.turn("one", 0.05)
        assert ended.value.status == "killed"
        with pytest.raises(WorkerFailure, match="was not started, or has ended"):
            pool.turn("one", 0.05)
    assert is_gone(pids["one"])


@pytest.mark.slow
def test_the_error_of_an_arm_is_its_reason(tmp_path: Path) -> None:
    arms = [
        own("raises", "Ends"),
        arm("nan", *OWN, f"data._target_={PARTS}.Slow", "model=mlp", "monitoring.every=1"),
        own("huge", "Huge"),
    ]
    with WorkerPool(arms, QUICK, tmp_path) as pool:
        with pytest.raises(WorkerFailure, match=r"ValueError: my own mistake \(arm_parts") as ended:
            pool.start("raises")
        assert ended.value.status == "failed"
        assert "Traceback" in (tmp_path / "raises/worker.log").read_text()
        with pytest.raises(WorkerFailure) as ended:
            pool.start("nan")
            while True:
                pool.turn("nan", 0.1)
        assert ended.value.status == "failed"
        assert "the loss was nan" in ended.value.reason
        with pytest.raises(WorkerFailure, match="out of memory") as ended:
            pool.start("huge")
        assert ended.value.status == "oom"
        assert not pool.workers
    kept = {n: json.loads((tmp_path / n / "summary.json").read_text()) for n in pool.arms}
    assert kept["raises"]["status"] == "failed"
    assert kept["huge"]["status"] in ("failed", "oom")


@pytest.mark.slow
def test_an_arm_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = [
        own("late", "Ends", "optimization=none", "+model.how=hangs", "+model.at=20"),
        own("never", "Ends"),
    ]
    monkeypatch.setattr(pools, "TURN_TIMEOUT_S", 1.0)
    monkeypatch.setattr(pools, "TURN_TIMEOUT_FACTOR", 0.0)
    with WorkerPool(arms, QUICK, tmp_path) as pool:
        pool.start("late")
        pid = pool.workers["late"].pid
        with pytest.raises(WorkerFailure, match="not done within 1 s") as ended:
            pool.turn("late", 30.0)
        assert ended.value.status == "timeout"
        assert is_gone(pid)
        assert json.loads((tmp_path / "late/summary.json").read_text())["status"] == "timeout"
    soon = BenchmarkConfig(timeout_s=0.01)
    with WorkerPool(arms, soon, None) as pool, pytest.raises(WorkerFailure) as ended:
        pool.start("never")
    assert ended.value.status == "timeout"


SCRIPT = """
import signal
from runner.measure.benchmark.arms import Arm
from runner.core.schemas.jobs import BenchmarkConfig
from runner.measure.benchmark.workers.pool import WorkerPool
from runner.core.config.composing import compose

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    arms = [Arm("one", compose(["data=digits", "model=mlp", "data.workers=1", "data.prefetch=2"]))]
    with WorkerPool(arms, BenchmarkConfig(), None) as pool:
        pool.start("one")
        print(pool.workers["one"].pid, flush=True)
        pool.turn("one", 600.0)
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


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_no_arm_outlives_its_parent(script: tuple[subprocess.Popen[str], int], how: int) -> None:
    parent, pid = script
    group = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    assert len(group) >= 2  # a data worker too
    os.killpg(parent.pid, how)  # as a terminal does it: to the whole group of the parent
    _, errors = parent.communicate(timeout=60)
    gone, left = psutil.wait_procs(group, timeout=30)
    # who lost his parent waits for somebody to collect him, which nobody does in some containers
    assert [p for p in left if p.status() != psutil.STATUS_ZOMBIE] == []
    if how == signal.SIGINT:
        assert "KeyboardInterrupt" in errors
