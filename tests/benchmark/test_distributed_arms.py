"""An arm that several processes train is measured like any other, and none of them outlives it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from runner.benchmark.workers.pool import WorkerPool
from runner.training.summary import Summary
from tests.benchmark.worker_arms import BASE, QUICK, arm, is_gone


@pytest.mark.slow
def test_an_arm_of_two_processes_has_turns_beside_one_of_one(tmp_path: Path) -> None:
    ddp = [*BASE, "optimization=none", "distributed=ddp"]
    one = arm("one", *ddp, "distributed.processes=1")
    two = arm("two", *ddp, "distributed.processes=2")
    with WorkerPool([one, two], QUICK, tmp_path) as pool:
        turns = []
        for name in ("two", "one"):
            pool.start(name)
            turns += [pool.turn(name, 0.1), pool.turn(name, 0.1)]
        assert all(turn.steps >= 3 and turn.samples > 31 * turn.steps for turn in turns)
        pid = pool.workers["two"].pid
        loss = {name: pool.finish(name).losses[0] for name in ("one", "two")}
    assert is_gone(pid)
    assert abs(loss["one"] - loss["two"]) < 1e-5  # the same first batch, in two parts
    summaries = {name: Summary.read(tmp_path / name) for name in ("one", "two")}
    assert summaries["one"].distributed == {}
    assert summaries["two"].distributed["world_size"] == 2
    assert (tmp_path / "two" / "ranks" / "1" / "run.log").exists()


@pytest.mark.slow
def test_no_process_of_an_arm_outlives_a_benchmark_that_ends_early(tmp_path: Path) -> None:
    two = arm("two", *BASE, "optimization=none", "distributed=ddp", "distributed.processes=2")
    with WorkerPool([two], QUICK, tmp_path) as pool:
        pool.start("two")
        pid = pool.workers["two"].pid
        other = next(p for p in psutil.Process(pid).children() if "spawn_main" in str(p.cmdline()))
    assert is_gone(pid) and not other.is_running()
