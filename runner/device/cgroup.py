"""What a container or a batch system allows this process: control groups, version 1 and 2.

The kernel's own totals know nothing of these limits, so a process that trusts them is killed
for memory, or starts more threads than it may run. Every function takes the root of the file
system it reads, and answers None where nothing is limited (macOS always).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
UNLIMITED = 1 << 60  # version 1 writes about 2**63 where there is no limit
MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes this process may hold, the tightest limit of its groups."""
    return min((limit for limit, _ in _memory(root)), default=None)


def memory_left(root: Path = ROOT) -> int | None:
    """Bytes until a limit is reached; file cache that the kernel can drop counts as free."""
    return min((left for _, left in _memory(root)), default=None)


def tightest(root: Path = ROOT) -> tuple[int, int] | None:
    """Limit and bytes left of the group that is fullest, by its share; None without a limit."""
    return min(_memory(root), key=lambda pair: pair[1] / pair[0], default=None)


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPUs' worth of time this process may use, such as 1.5."""
    quotas = []
    for version, folder in _groups(root, "cpu"):
        if version == 2:
            quota, _, period = _text(folder / "cpu.max").partition(" ")
        else:
            quota = _text(folder / "cpu.cfs_quota_us")
            period = _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period) > 0:  # "max" and -1: none
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def oom_kills(root: Path = ROOT) -> int | None:
    """A count that grows when the kernel kills for want of memory, in these groups or on the whole
    machine; None where it does not tell.
    """
    files = [root / "proc/vmstat"]
    for version, folder in _groups(root, "memory"):
        files.append(folder / ("memory.events" if version == 2 else "memory.oom_control"))
    lines = [line.split() for file in files for line in _text(file).splitlines()]
    counts = [int(line[1]) for line in lines if len(line) == 2 and line[0] == "oom_kill"]
    return sum(counts) if counts else None


def _memory(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and bytes left of each group that has a limit."""
    for version, folder in _groups(root, "memory"):
        limit, usage, cache = MEMORY_FILES[version]
        allowed, used = _text(folder / limit), _text(folder / usage)
        if allowed.isdigit() and used.isdigit() and 0 < int(allowed) < UNLIMITED:
            lines = _text(folder / "memory.stat").splitlines()
            statistics = dict(line.split() for line in lines if " " in line)
            held = int(used) - int(statistics.get(cache, 0))
            yield int(allowed), max(0, int(allowed) - held)


def _groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Version and folder of this process's group and of each group above it.

    In a container the path may be the host's while the mount shows the container's own part:
    folders that do not exist are passed over, and the mount itself is the container's group.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            version, mount = 2, root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            version, mount = 1, root / "sys/fs/cgroup" / controller
        else:
            continue
        group = mount / path.strip("/")
        for folder in (group, *group.parents):
            if folder.is_dir() and folder.is_relative_to(mount):
                yield version, folder


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
