"""How much a run has taken of what `security.limits` allows: memory, disk and time."""

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
    """A limit that was reached, and what to do about it."""

    key: str  # below security.limits
    taken: str  # and of how much
    way_out: str


def over_memory(limit_mb: float) -> Exceeded | None:
    """Whether this process and its workers hold more; 4 µs, and 0.1 ms a worker."""
    used = memory_bytes()
    if used <= limit_mb * MB:
        return None
    taken = f"this process and its workers hold {used / MB:,.0f} MB of {limit_mb:,.0f}"
    return Exceeded("memory_mb", taken, "a smaller training.batch_size, fewer data.workers")


def over_disk(limit_mb: float, folder: Path, before: int) -> Exceeded | None:
    """Whether `folder` has grown so much that two more checkpoints would be too much.

    One comes before the next look, and one is the last that the run writes, so the limit holds;
    what else is written between two looks (logs, traces) is small, and is not foreseen.
    """
    grown = folder_bytes(folder) - before
    last = max((folder_bytes(p) for p in folder.glob(f"{CHECKPOINTS}/step_*")), default=0)
    if grown + 2 * last <= limit_mb * MB:
        return None
    size = f"{grown / MB:,.1f} MB of {limit_mb:,.1f}, and a checkpoint takes {last / MB:,.1f}"
    taken = f"the run's folder has grown by {size}"
    return Exceeded("disk_mb", taken, "a smaller checkpoint.keep, less to debug")


def over_time(limit_hours: float, seconds: float) -> Exceeded | None:
    """Whether the run has had its time."""
    if seconds < limit_hours * 3600:
        return None
    taken = f"{seconds / 3600:.3g} hours have passed of {limit_hours:.3g}"
    return Exceeded("hours", taken, "nothing else: it has as much time again")


def over_device(limit_mb: float, used: int) -> Exceeded | None:
    """Whether the allocator holds more of the accelerator."""
    if used <= limit_mb * MB:
        return None
    taken = f"{used / MB:,.0f} MB of the device's memory are held, of {limit_mb:,.0f}"
    return Exceeded("device_memory_mb", taken, "a smaller training.batch_size")


def memory_bytes() -> int:
    """Resident memory of this process and of its data workers, shared memory counted once."""
    own, workers = memory.process_bytes(), multiprocessing.active_children()
    processes = [os.getpid(), *(child.pid for child in workers)] if workers else []
    return max(own, sum(_share(pid) for pid in processes if pid is not None))


def _share(pid: int) -> int:
    """A process's part of the memory that several share (PSS); 0 once it has ended."""
    try:
        return int(getattr(psutil.Process(pid).memory_full_info(), "pss", 0))  # Linux alone
    except psutil.Error:
        return 0


def folder_bytes(folder: Path) -> int:
    """Bytes on the disk of all files in a folder; a hard-linked one counts once. 8 µs a file."""
    sizes: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it has just been removed or renamed
                status = os.lstat(os.path.join(parent, name))
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())
