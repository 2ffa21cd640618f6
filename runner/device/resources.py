"""What the machine has left, and what it is doing: memory that may be had, swap, disk, CPU, GPU."""

from __future__ import annotations

import logging
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from runner.device import cgroup, memory
from runner.device.device import Device

if TYPE_CHECKING:
    from runner.device.nvml import Gpu, GpuReading

log = logging.getLogger("runner")

GIB = 2**30
MEMINFO = (b"MemTotal", b"MemAvailable", b"SwapTotal", b"SwapFree")


@dataclass(frozen=True)
class Room:
    """The tightest of the limits under which this process allocates, in bytes."""

    limit: int
    left: int
    whose: str  # "this machine's memory" and the like
    own: bool = False  # a limit of this process: allocations beyond it fail, and nothing is killed

    @property
    def used_share(self) -> float:
        """Share that is taken, 0 to 1, by whichever process."""
        return 1 - self.left / self.limit


def room() -> Room:
    """The limit that is nearest, of the machine, the container and `ulimit`; 150 µs.

    Free swap counts as left, since the kernel ends no process before it is full; so does file
    cache that can be dropped.
    """
    total, left, swap, swap_left = _meminfo()
    limits = [Room(total + swap, left + swap_left, "this machine's memory")]
    if (group := cgroup.tightest()) is not None:
        limits.append(Room(*group, "the memory of this container (control group)"))
    limit, own = resource.getrlimit(resource.RLIMIT_AS)[0], memory.limit_left()
    if own is not None and limit != resource.RLIM_INFINITY:
        limits.append(Room(limit, own, "the address space that `ulimit -v` allows", own=True))
    return max(limits, key=lambda limit: limit.used_share)


def swap_bytes() -> int | None:
    """Swap in use, by all processes; 0 where the system does not tell (not Linux)."""
    *_, total, left = _meminfo()
    return total - left


def _meminfo() -> tuple[int, ...]:
    """Memory and swap, each in all and available; 10 µs, where psutil takes 150."""
    try:
        with open("/proc/meminfo", "rb", buffering=0) as file:
            lines = dict(line.split(b":") for line in file.read().splitlines())
        return tuple(int(lines[name].split()[0]) * 1024 for name in MEMINFO)
    except (OSError, KeyError, ValueError):  # not Linux
        found = psutil.virtual_memory()
        return int(found.total), int(found.available), 0, 0


@dataclass(frozen=True)
class Reading:
    """The machine at one time."""

    at: float  # time.monotonic()
    cpu_percent: float  # of all cores, since the reading before
    ram_percent: float
    swap_bytes: int | None
    disk_free_bytes: int | None
    gpu: GpuReading | None

    def row(self) -> dict[str, float]:
        """Names and values for TensorBoard's `usage`; swap where there is any in use."""
        values = {"cpu_percent": self.cpu_percent, "ram_percent": self.ram_percent}
        if self.disk_free_bytes is not None:
            values["disk_free_gib"] = self.disk_free_bytes / GIB
        if self.swap_bytes:
            values["swap_gib"] = self.swap_bytes / GIB
        return values | (self.gpu.row() if self.gpu else {})


class Machine:
    """Readings of the machine, at most one in `every_s` seconds, for all who ask.

    `folder` is on the disk that counts. A reading takes a quarter of a millisecond, and as much
    again where there is a GPU.
    """

    def __init__(
        self, folder: Path | None = None, every_s: float = 5.0, gpu: bool | None = None
    ) -> None:
        self.folder, self.every_s, self.asked = folder, every_s, gpu
        self.gpu: Gpu | None = None
        self.reading: Reading | None = None
        self.opened = False

    def open(self, device: Device) -> None:
        """Find the GPU, and begin to count the CPU's time. Raises ConfigError, see `nvml.find`."""
        if self.opened:
            return
        self.opened = True
        psutil.cpu_percent(None)  # the first answer is about the time since this one
        if device.kind == "cuda" or self.asked:
            from runner.device import nvml

            self.gpu = nvml.find(device, self.asked)

    def sample(self) -> Reading:
        """The newest reading; made now, if the last one is older than `every_s`."""
        now = time.monotonic()
        if self.reading is None or now - self.reading.at >= self.every_s:
            self.reading = Reading(
                at=now,
                cpu_percent=psutil.cpu_percent(None),
                ram_percent=psutil.virtual_memory().percent,
                swap_bytes=swap_bytes(),
                disk_free_bytes=_disk_free(self.folder),
                gpu=self.gpu.read() if self.gpu else None,
            )
        return self.reading


def _disk_free(folder: Path | None) -> int | None:
    """Bytes that may still be written where `folder` is (None: here); None if it does not tell."""
    try:
        found = os.statvfs(folder or ".")
    except OSError as error:
        log.debug("no reading of the disk: %s", error)
        return None
    return found.f_bavail * found.f_frsize
