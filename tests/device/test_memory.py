from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from runner.device import cgroup, memory, phases
from runner.device.config import DeviceConfig, DeviceKind
from runner.device.device import select

MIB = 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="control groups and /proc are Linux's")
marked = pytest.mark.skipif(not memory.reset_peak(), reason="the mark cannot be restarted here")


def tree(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


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
    code = "from runner.device import memory as m; print(m.peak_process_bytes(), m.process_bytes())"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    peak, now = map(int, answer.stdout.split())
    assert now <= peak + MIB and peak < now + 128 * MIB
    del block


def test_available_memory_is_less_than_all_there_is_and_a_cpu_has_none_of_its_own() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory.available_bytes() < total
    with ExitStack() as scope:
        assert memory.peak_device_bytes(select(DeviceConfig(kind=DeviceKind.cpu), scope)) == 0


# peaks of stretches that nest and overlap


def hold(mib: int) -> None:
    """Hold so much and let go; mapped, since earlier tests may have malloc keep what is freed."""
    with mmap.mmap(-1, mib * MIB) as block:
        for _ in range(mib):
            block.write(b"x" * MIB)


def added(stretch: phases.MemoryPeak) -> float:
    return (stretch.process - stretch.process_before) / MIB


@marked
def test_each_stretch_has_its_own_peak_and_the_outer_one_the_most() -> None:
    with phases.peak() as outer:
        with phases.peak() as first:
            hold(120)
        with phases.peak() as second:
            hold(60)
    assert 115 < added(first) < 140 and 55 < added(second) < 80 and 115 < added(outer) < 140


@marked
def test_the_peak_of_the_process_survives_restarts_until_it_is_reset() -> None:
    hold(120)
    most = memory.peak_process_bytes()
    with phases.peak():
        hold(10)
    assert memory.process_mark() < most - 60 * MIB
    assert memory.peak_process_bytes() >= most - MIB
    memory.reset_peak()
    assert memory.peak_process_bytes() < most - 60 * MIB


@marked
def test_a_stretch_in_another_thread_takes_nothing_from_ours() -> None:
    began, over = threading.Event(), threading.Event()
    theirs: list[phases.MemoryPeak] = []

    def other() -> None:
        with phases.peak() as stretch:
            theirs.append(stretch)
            began.set()
            over.wait(10)

    with phases.peak() as ours:
        hold(70)
        thread = threading.Thread(target=other)
        thread.start()
        assert began.wait(10)  # its beginning restarts the mark
    over.set()
    thread.join()
    assert added(ours) > 65 and added(theirs[0]) < 60


# control groups, on trees laid out as the kernel lays them out


def test_version_2_limits_are_the_tightest_of_the_groups_above(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/jobs/one"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/jobs/one\n",
            f"{group}/memory.max": "max\n",
            f"{group}/memory.current": "5000\n",
            f"{group}/cpu.max": "max 100000\n",
            "sys/fs/cgroup/jobs/memory.max": "10000\n",
            "sys/fs/cgroup/jobs/memory.current": "6000\n",
            "sys/fs/cgroup/jobs/memory.stat": "anon 1000\ninactive_file 2500\n",
            "sys/fs/cgroup/jobs/cpu.max": "150000 100000\n",
        },
    )
    assert cgroup.memory_limit(root) == 10000
    assert cgroup.memory_left(root) == 6500  # the file cache can be dropped
    assert cgroup.cpu_quota(root) == 1.5


def test_version_1_is_read_in_a_container_whose_path_is_the_hosts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "900\n",
        "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 300\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    root = tree(tmp_path, files)
    assert cgroup.memory_left(root) == 400
    assert cgroup.cpu_quota(root) == 0.5
    files["sys/fs/cgroup/memory/memory.limit_in_bytes"] = "9223372036854771712\n"
    files["sys/fs/cgroup/cpu/cpu.cfs_quota_us"] = "-1\n"
    root = tree(tmp_path, files)
    assert cgroup.memory_limit(root) is None
    assert cgroup.cpu_quota(root) is None
    assert cgroup.memory_limit(tmp_path / "elsewhere") is None
