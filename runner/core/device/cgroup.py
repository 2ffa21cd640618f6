"""Limits of a container or batch system for this process: control groups, version 2.

The kernel's totals ignore these limits, so a process that relies on them is killed for memory, or
starts more threads than it has cores. Every function takes the root of the file system that it
reads, and returns None without limits (macOS, and control groups version 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def memory_limit(root: Path = ROOT) -> int | None:
    """Return the bytes that this process may use, the tightest limit of its groups."""
    return min((limit for limit, _ in _memory_limits(root)), default=None)


def memory_left(root: Path = ROOT) -> int | None:
    """Return the bytes until a limit is reached; reclaimable file cache counts as free."""
    return min((left for _, left in _memory_limits(root)), default=None)


def tightest_limit(root: Path = ROOT) -> tuple[int, int] | None:
    """Return limit and bytes left of the group with the smallest share left."""
    return min(_memory_limits(root), key=lambda pair: pair[1] / pair[0], default=None)


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return the CPUs that this process may use, such as 1.5."""
    quotas = []
    for folder in _groups(root):
        quota, _, period = _read_text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():  # "max": no limit
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def oom_kills(root: Path = ROOT) -> int | None:
    """Return the number of OOM kills in these groups and on the machine; None if unknown."""
    files = [root / "proc/vmstat", *(folder / "memory.events" for folder in _groups(root))]
    lines = [line.split() for file in files for line in _read_text(file).splitlines()]
    counts = [int(line[1]) for line in lines if len(line) == 2 and line[0] == "oom_kill"]
    return sum(counts) if counts else None


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and bytes left of each group that has a limit."""
    for folder in _groups(root):
        limit, used = _read_text(folder / "memory.max"), _read_text(folder / "memory.current")
        if limit.isdigit() and used.isdigit() and int(limit):
            lines = _read_text(folder / "memory.stat").splitlines()
            statistics = dict(line.split() for line in lines if " " in line)
            needed = int(used) - int(statistics.get("inactive_file", 0))
            yield int(limit), max(0, int(limit) - needed)


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's group and of its ancestors.

    In a container the path may be the host's while the mount shows only the container's part:
    missing folders are skipped, and the mount itself is the container's group.
    """
    mount = root / "sys/fs/cgroup"
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            group = mount / line.removeprefix("0::").strip("/")
            for folder in (group, *group.parents):
                if folder.is_dir() and folder.is_relative_to(mount):
                    yield folder


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
