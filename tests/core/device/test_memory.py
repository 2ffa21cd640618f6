from __future__ import annotations

import mmap
import os
import platform
import resource
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from runner.core.device import allocator, cgroup, memory
from runner.core.techniques import system
from tests import runs

MIB = 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="control groups and /proc are Linux's")
marked = pytest.mark.skipif(not memory.reset_peak(), reason="the mark cannot be restarted here")


def test_the_process_grows_by_what_it_holds() -> None:
    before = memory.process_bytes()
    block = bytearray(os.urandom(1)) * (64 * MIB)
    grown = memory.process_bytes() - before
    assert 60 * MIB < grown < 80 * MIB
    assert memory.peak_process_bytes() >= before + 60 * MIB
    del block


@linux
def test_the_peak_of_a_small_child_is_not_its_large_parents() -> None:
    block = bytearray(b"x") * (256 * MIB)
    code = "from runner.core.device import memory as m\n"
    code += "print(m.peak_process_bytes(), m.process_bytes())"
    peak, now = map(int, runs.printed_by(code).split())
    assert now <= peak + MIB and peak < now + 128 * MIB
    del block


def hold(mib: int) -> None:
    """Hold so much and let go; mapped, since earlier tests may have malloc keep what is freed."""
    with mmap.mmap(-1, mib * MIB) as block:
        for _ in range(mib):
            block.write(b"x" * MIB)


def added(stretch: memory.MemoryPeak) -> float:
    return (stretch.process - stretch.process_before) / MIB


@marked
def test_each_stretch_has_its_own_peak_and_the_outer_one_the_most() -> None:
    with memory.peak_memory() as outer:
        with memory.peak_memory() as first:
            hold(120)
        with memory.peak_memory() as second:
            hold(60)
    assert 115 < added(first) < 140 and 55 < added(second) < 80 and 115 < added(outer) < 140


@marked
def test_the_peak_of_the_process_survives_restarts_until_it_is_reset() -> None:
    hold(120)
    most = memory.peak_process_bytes()
    with memory.peak_memory():
        hold(10)
    assert memory.process_mark() < most - 60 * MIB
    assert memory.peak_process_bytes() >= most - MIB
    memory.reset_peak()
    assert memory.peak_process_bytes() < most - 60 * MIB


@marked
def test_a_stretch_in_another_thread_takes_nothing_from_ours() -> None:
    began, over = threading.Event(), threading.Event()
    theirs: list[memory.MemoryPeak] = []

    def other() -> None:
        with memory.peak_memory() as stretch:
            theirs.append(stretch)
            began.set()
            over.wait(10)

    with memory.peak_memory() as ours:
        hold(70)
        thread = threading.Thread(target=other)
        thread.start()
        assert began.wait(10)  # its beginning restarts the mark
    over.set()
    thread.join()
    assert added(ours) > 65 and added(theirs[0]) < 60


# control groups, on a tree laid out as the kernel lays it out


def test_limits_are_the_tightest_of_the_groups_above(tmp_path: Path) -> None:
    jobs = tmp_path / "sys/fs/cgroup/jobs"
    files = {
        tmp_path / "proc/self/cgroup": "4:memory:/of/version/1\n0::/jobs/one\n",
        jobs / "one/memory.max": "max\n",
        jobs / "one/memory.current": "5000\n",
        jobs / "one/cpu.max": "max 100000\n",
        jobs / "memory.max": "10000\n",
        jobs / "memory.current": "6000\n",
        jobs / "memory.stat": "anon 1000\ninactive_file 2500\n",
        jobs / "cpu.max": "150000 100000\n",
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cgroup.memory_limit(tmp_path) == 10000
    assert cgroup.memory_left(tmp_path) == 6500  # the file cache can be dropped
    assert cgroup.cpu_quota(tmp_path) == 1.5
    assert cgroup.memory_limit(tmp_path / "elsewhere") is None


# freed memory that stays in the process, and denormals that are zero in each of its threads

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
PAGES = 40 << 20  # bytes: more than glibc keeps by itself


def faults() -> int:
    """Page faults of 40 MiB that are allocated and freed again and again; holes settle at first."""
    for _ in range(20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(PAGES, dtype=torch.uint8)
        torch.ones(PAGES, dtype=torch.uint8)
        count = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return count


CODE = """
from contextlib import ExitStack
import torch
from tests.core.device.test_memory import faults
from runner.core.device import allocator, memory
before = faults()
with ExitStack() as scope:
    assert allocator.keep_freed_memory(scope) is None
    kept = faults()
    torch.ones(200 << 20, dtype=torch.uint8)
    held = memory.process_bytes()
print(before, kept, held - memory.process_bytes())
"""


@pytest.mark.slow
@glibc
def test_memory_that_is_kept_is_not_faulted_in_again_and_given_back_at_the_end() -> None:
    before, kept, given_back = map(int, runs.printed_by(CODE).split())
    assert before > 1000 and kept < 100 and given_back > 150 << 20


@glibc
@pytest.mark.parametrize(
    "setting", ["MALLOC_TRIM_THRESHOLD_=1000", "GLIBC_TUNABLES=glibc.malloc.arena_max=1"]
)
def test_the_environments_own_settings_win(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv(*setting.split("=", 1))
    with ExitStack() as scope:
        assert "environment" in (allocator.keep_freed_memory(scope) or "")


def product() -> torch.Tensor:
    """Of matrices, whose every element is a denormal; another library's threads make it."""
    return torch.full((512, 512), 1e-20) @ torch.full((512, 512), 1e-22)


@linux
def test_denormals_are_zero_in_every_thread_until_the_scope_ends() -> None:
    torch.set_num_threads(2)
    assert not system.denormals_flushed()
    weight = torch.full((1 << 20,), 0.5, requires_grad=True)
    with ExitStack() as scope:
        assert system.flush_denormals(scope) is None
        assert system.denormals_flushed()
        assert not product().count_nonzero()
        (weight * torch.finfo(torch.float32).tiny).mul(0.5).sum().backward()
        assert not weight.grad.count_nonzero()
        assert np.finfo(np.float32).eps > 0  # without a warning of numpy's
        torch.set_num_threads(3)
        scope.callback(torch.set_num_threads, 2)
        assert system.denormals_flushed()  # threads that come later do as the others
    assert not system.denormals_flushed()
    assert product().count_nonzero() == 512 * 512
