"""Peaks of phases, leaks and a table, for a loop that is not ours."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch

from runner import Memory
from runner.device import memory as device_memory
from runner.errors import DeviceError

MIB = 2**20


@pytest.fixture
def memory() -> Memory:
    return Memory("cpu")


def hold(mib: int) -> None:
    block = torch.ones(mib * MIB, dtype=torch.uint8)
    del block


def test_stats_are_plain_numbers_that_fit_together(memory: Memory) -> None:
    stats = memory.stats()
    assert 0 < stats.process <= stats.peak_process + MIB
    assert 0 < stats.available < stats.limit and stats.limited_by
    assert stats.device_allocated == stats.peak_device == stats.device_total == 0


@pytest.mark.skipif(not device_memory.reset_peak(), reason="the mark cannot be restarted here")
def test_phases_nest_and_add_up_over_the_times_that_they_run(memory: Memory) -> None:
    for size in (20, 90, 40):
        with memory.track("epoch"), memory.track("evaluate"):
            hold(size)
        with memory.track("save"):
            pass
    evaluate, epoch = memory.phases["evaluate"], memory.phases["epoch"]
    assert list(memory.phases) == ["epoch", "evaluate", "save"]
    assert evaluate.times == epoch.times == 3
    assert 85 * MIB < evaluate.added_process < 110 * MIB
    assert epoch.peak_process >= evaluate.peak_process
    assert memory.phases["save"].added_process < 20 * MIB


def test_a_leak_in_a_loop_is_found_and_a_healthy_loop_is_not(
    memory: Memory, mapped: Callable[[int], mmap.mmap]
) -> None:
    healthy = Memory("cpu")
    for step in range(1, 501):
        hold(1)
        assert healthy.sample(step) is None
    kept, found = [], []
    for step in range(1, 501):
        kept.append(mapped(256 * 1024))
        if (trend := memory.sample(step)) is not None:
            found.append(trend)
    assert not healthy.leaking and memory.leaking
    assert found and found[0].last <= 500 and found[0].slope == pytest.approx(256 * 1024, rel=0.1)
    assert "a leak: growing" in str(memory) and "too few samples" not in str(healthy)


def test_clear_gives_back_what_only_garbage_held(memory: Memory) -> None:
    ring: list[object] = [bytearray(b"x") * (64 * MIB)]
    ring.append(ring)
    del ring
    assert memory.clear() > 50 * MIB


def test_a_device_that_is_not_there_is_said_at_once() -> None:
    with ExitStack() as stack:
        if torch.cuda.is_available():
            pytest.skip("there is one")
        stack.enter_context(pytest.raises(DeviceError))
        Memory("cuda")


@pytest.mark.gpu
def test_on_a_gpu_a_phase_has_the_peak_of_its_tensors() -> None:
    memory = Memory("cuda")
    with memory.track("big"):
        torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    with memory.track("small"):
        torch.ones(MIB, dtype=torch.uint8, device="cuda")
    assert memory.phases["big"].added_device == 64 * MIB
    assert memory.phases["small"].added_device == MIB
    assert memory.stats().peak_device >= 64 * MIB
    assert memory.clear() >= 64 * MIB


def test_threads_may_track_at_the_same_time(memory: Memory) -> None:
    def work(name: str) -> None:
        for _ in range(20):
            with memory.track(name):
                hold(1)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: phase.times for name, phase in memory.phases.items()} == dict.fromkeys("abcd", 20)
