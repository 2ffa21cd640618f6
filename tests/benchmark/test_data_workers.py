"""Data workers of an arm: what a turn with them says, and what they do while others are at work."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import psutil
import pytest

from runner.benchmark.arms import Arm
from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.workers.pool import WorkerPool
from runner.composing import compose

PARTS = "tests.benchmark.arm_parts"
SLOW = [
    "device=cpu", "device.threads=1", f"security.trusted=[{PARTS}]", "model=mlp",
    f"data._target_={PARTS}.Slow", "+data.seconds=0.012", "training.batch_size=5",
]  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """An arm that fetches by itself, and one with two workers; 60 ms a batch, asleep, which is
    what a crowded machine does not make longer.
    """
    arms = [Arm(f"w{n}", compose([*SLOW, f"data.workers={n}"]), []) for n in (0, 2)]
    with WorkerPool(arms, BenchmarkConfig(warmup_steps=4), None) as pool:
        for arm in arms:
            pool.start(arm.name)
        workers = psutil.Process(pool.workers["w2"].pid).children()
        yield pool
    assert not any(worker.is_running() for worker in workers)  # who is stopped ends all the same


def test_two_workers_are_twice_as_fast_and_no_more(pool: WorkerPool) -> None:
    ratios = []
    for _ in range(3):
        turns = {name: pool.turn(name, 0.1) for name in ("w0", "w2")}
        assert turns["w2"].steps >= 8 and turns["w2"].steps % 2 == 0  # whole rounds of batches
        for turn in turns.values():
            assert turn.per_sample_ms == pytest.approx(1e3 * turn.seconds / turn.samples)
        ratios.append(turns["w0"].per_sample_ms / turns["w2"].per_sample_ms)
    assert 1.3 < median(ratios) < 2.7


def test_workers_stand_still_while_another_arm_is_at_work(pool: WorkerPool) -> None:
    workers = psutil.Process(pool.workers["w2"].pid).children()
    assert len(workers) == 2
    assert {worker.status() for worker in workers} == {psutil.STATUS_STOPPED}
    pool.turn("w2", 0.05)  # and then go on
