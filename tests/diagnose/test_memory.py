"""Peaks of phases, leaks and a table, for a loop that is not ours."""

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from runner import Memory
from runner.core.device import memory as device_memory
from runner.core.errors import DeviceError, UsageError

MIB = 2**20


@pytest.fixture
def memory() -> Memory:
    return Memory("cpu")


def hold(mib: int) -> None:
    block = torch.ones(mib * MIB, dtype=torch.uint8)
    del block


def test_the_address_space_of_the_process_and_what_is_swapped_out(memory: Memory) -> None:
    before, size = memory.stats(), 512 * MIB
    assert before.virtual == pytest.approx(psutil.Process().memory_info().vms, rel=0.02)
    assert before.virtual > before.process and before.swap >= 0
    with mmap.mmap(-1, size):  # never touched: not resident
        during = memory.stats()
    assert during.virtual - before.virtual == pytest.approx(size, rel=0.05)
    assert during.process - before.process < size / 4
    assert any(line.startswith("virtual ") for line in str(memory).splitlines())


def test_stats_are_plain_numbers_that_fit_together(memory: Memory) -> None:
    stats = memory.stats()
    assert 0 < stats.process <= stats.peak_process + MIB
    assert 0 < stats.available < stats.limit and stats.limited_by
    assert stats.device_allocated == stats.peak_device == stats.device_total == 0


@pytest.mark.skipif(not device_memory.reset_peak(), reason="the mark cannot be restarted here")
def test_phases_nest_and_add_up_over_the_times_that_they_run_in_any_thread(memory: Memory) -> None:
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

    def work(_: int) -> None:
        for _ in range(20):
            with memory.track("save"):
                hold(1)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert memory.phases["save"].times == 83


def test_a_leak_in_a_loop_is_reported_and_none_in_a_healthy_loop(
    memory: Memory, mapped: Callable[[int], mmap.mmap]
) -> None:
    healthy = Memory("cpu")
    for step in range(1, 501):
        hold(1)
        assert healthy.sample(step) is None
    kept, trends = [], []
    for step in range(1, 501):
        kept.append(mapped(256 * 1024))
        if (trend := memory.sample(step)) is not None:
            trends.append(trend)
    assert not healthy.leaking and memory.leaking
    assert trends and trends[0].last <= 500
    assert trends[0].slope == pytest.approx(256 * 1024, rel=0.1)
    assert "a leak: growing" in str(memory) and "too few samples" not in str(healthy)


def test_clear_gives_back_what_only_garbage_held(memory: Memory) -> None:
    ring: list[object] = [bytearray(b"x") * (64 * MIB)]
    ring.append(ring)
    del ring
    assert memory.clear() > 50 * MIB


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there_is_an_error_at_once() -> None:
    with pytest.raises(DeviceError):
        Memory("cuda")


def test_a_step_that_is_no_number_is_refused(memory: Memory) -> None:
    with pytest.raises(UsageError, match="Memory.sample: step must be a whole number ≥ 0, got 'a'"):
        memory.sample("a")  # type: ignore[arg-type]


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
