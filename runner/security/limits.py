"""Compare a run's memory, disk and time with `security.limits`."""

from __future__ import annotations

import multiprocessing
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from runner.device import memory

MB = 1e6
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Exceeded:
    """A limit that was reached, with the usage and a way out."""

    key: str  # below security.limits
    taken: str  # used, of how much
    way_out: str


def over_memory(limit_mb: float) -> Exceeded | None:
    """Check the memory of this process and its workers; 4 µs, plus 0.1 ms per worker."""
    used = memory_bytes()
    if used <= limit_mb * MB:
        return None
    taken = f"this process and its workers use {used / MB:,.0f} MB of {limit_mb:,.0f}"
    return Exceeded("memory_mb", taken, "a smaller training.batch_size, fewer data.workers")


def over_disk(limit_mb: float, folder: Path, before: int) -> Exceeded | None:
    """Check whether `folder` has grown so much that two more checkpoints would exceed the limit.

    One may be written before the next check, and one is the run's last. Other files written between
    two checks (logs, traces) are small and ignored.
    """
    grown = folder_bytes(folder) - before
    last = max((folder_bytes(p) for p in folder.glob(f"{CHECKPOINTS}/step_*")), default=0)
    if grown + 2 * last <= limit_mb * MB:
        return None
    size = f"{grown / MB:,.1f} MB of {limit_mb:,.1f}, and a checkpoint takes {last / MB:,.1f}"
    taken = f"the run's folder has grown by {size}"
    return Exceeded("disk_mb", taken, "a smaller checkpoint.keep, fewer debug tools")


def over_time(limit_hours: float, seconds: float) -> Exceeded | None:
    """Check the run's wall time."""
    if seconds < limit_hours * 3600:
        return None
    taken = f"{seconds / 3600:.3g} hours have passed of {limit_hours:.3g}"
    return Exceeded("hours", taken, "no change: the time counts from 0 again")


def over_device(limit_mb: float, used: int) -> Exceeded | None:
    """Check the allocator's bytes on the accelerator."""
    if used <= limit_mb * MB:
        return None
    taken = f"the process uses {used / MB:,.0f} MB of device memory of {limit_mb:,.0f}"
    return Exceeded("device_memory_mb", taken, "a smaller training.batch_size")


def memory_bytes() -> int:
    """Return the resident bytes of this process and its workers; shared memory counts once."""
    own, workers = memory.process_bytes(), multiprocessing.active_children()
    processes = [os.getpid(), *(child.pid for child in workers)] if workers else []
    return max(own, sum(_share(pid) for pid in processes if pid is not None))


def _share(pid: int) -> int:
    """Return a process's proportional set size (PSS); 0 if it has ended."""
    try:
        return int(getattr(psutil.Process(pid).memory_full_info(), "pss", 0))  # Linux only
    except psutil.Error:
        return 0


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder, hard links counted once. 8 µs per file."""
    sizes: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it has just been removed or renamed
                status = os.lstat(os.path.join(parent, name))
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())
