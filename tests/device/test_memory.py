from __future__ import annotations

import mmap
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from runner.device import cgroup, memory
from runner.device.config import DeviceConfig, DeviceKind
from runner.device.device import select

MIB = 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="control groups and /proc are Linux's")


def tree(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_the_process_grows_by_what_it_holds():
    before = memory.process_bytes()
    block = bytearray(os.urandom(1)) * (64 * MIB)
    grown = memory.process_bytes() - before
    assert 60 * MIB < grown < 80 * MIB
    assert memory.peak_process_bytes() >= before + 60 * MIB
    del block


def held(size: int) -> mmap.mmap:
    """So many bytes that are the system's again once they are let go, whatever the heap keeps."""
    block = mmap.mmap(-1, size)
    for page in range(0, size, mmap.PAGESIZE):
        block[page] = 1
    return block


def test_a_peak_covers_a_stretch_once_it_is_reset():
    block = held(64 * MIB)
    high = memory.peak_process_bytes()
    assert high >= memory.process_bytes() - MIB
    del block
    if not memory.reset_peak():
        pytest.skip("the peak cannot be reset here")
    low = memory.peak_process_bytes()
    assert low < high - 48 * MIB
    block = held(32 * MIB)
    del block
    assert memory.peak_process_bytes() > low + 24 * MIB


@linux
def test_the_peak_of_a_small_child_is_not_its_large_parents():
    block = bytearray(b"x") * (256 * MIB)
    code = "from runner.device import memory as m; print(m.peak_process_bytes(), m.process_bytes())"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    peak, now = map(int, answer.stdout.split())
    assert now <= peak + MIB and peak < now + 128 * MIB
    del block


@pytest.mark.skipif(memory.shared_memory_bytes() is None, reason="no /dev/shm")
def test_shared_memory_shrinks_by_what_is_shared():
    before = memory.shared_memory_bytes()
    tensor = torch.ones(32 * MIB, dtype=torch.uint8).share_memory_()
    after = memory.shared_memory_bytes()
    assert before is not None and after is not None
    assert before - after > 24 * MIB
    del tensor


# control groups, on trees laid out as the kernel lays them out


def test_version_2_limits_are_the_tightest_of_the_groups_above(tmp_path):
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


def test_version_1_is_read_in_a_container_whose_path_is_the_hosts(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "900\n",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 300\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert cgroup.memory_left(root) == 400
    assert cgroup.cpu_quota(root) == 0.5


def test_no_limit_is_none(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n3:cpu:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "900\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert cgroup.memory_limit(root) is None
    assert cgroup.cpu_quota(root) is None
    assert cgroup.memory_limit(tmp_path / "elsewhere") is None


def test_a_cpu_has_no_memory_of_its_own():
    with ExitStack() as scope:
        assert memory.peak_device_bytes(select(DeviceConfig(kind=DeviceKind.cpu), scope)) == 0


def test_available_memory_is_less_than_all_there_is():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory.available_bytes() < total
