"""What the machine has left, and what it is doing: memory that may be had, swap, disk, CPU, GPU."""

from __future__ import annotations

import logging
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from runner.device import cgroup, memory, nvml
from runner.device.device import Device
from runner.device.nvml import Gpu, GpuReading

log = logging.getLogger("runner")

GIB = 2**30


@dataclass(frozen=True)
class Room:
    """The tightest of the limits under which this process allocates, in bytes."""

    limit: int
    left: int
    whose: str  # "this machine's memory" and the like
    own: bool = False  # a limit of this process: allocations beyond it fail, and nothing is killed

    @property
    def taken(self) -> float:
        """Share that is taken, 0 to 1, by whomever."""
        return 1 - self.left / self.limit


def room() -> Room:
    """The limit that is nearest, of the machine, the container and `ulimit`; 150 µs.

    Free swap counts as left, since the kernel ends no process before it is full; so does file
    cache that can be dropped.
    """
    limits = [_machine()]
    if (found := cgroup.tightest()) is not None:
        limits.append(Room(*found, "the memory of this container (control group)"))
    limits += _own()
    return max(limits, key=lambda limit: limit.taken)


def _machine() -> Room:
    try:
        # 10 µs, where psutil takes 150
        with open("/proc/meminfo", "rb", buffering=0) as file:
            lines = dict(line.split(b":") for line in file.read().splitlines())
        size = {name: int(lines[name].split()[0]) * 1024 for name in lines if name in FIELDS}
        total, left, swap, swap_left = (size[name] for name in FIELDS)
    except (OSError, KeyError, ValueError):  # not Linux
        found = psutil.virtual_memory()
        return Room(int(found.total), int(found.available), "this machine's memory")
    return Room(total + swap, left + swap_left, "this machine's memory")


FIELDS = (b"MemTotal", b"MemAvailable", b"SwapTotal", b"SwapFree")


def _own() -> list[Room]:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    left = memory.limit_left()
    if left is None or limit == resource.RLIM_INFINITY:
        return []
    return [Room(limit, left, "the address space that `ulimit -v` allows", own=True)]


def swap_bytes() -> int | None:
    """Swap in use, by whomever; None where it is not told in passing (not Linux)."""
    try:
        with open("/proc/meminfo", "rb", buffering=0) as file:
            lines = dict(line.split(b":") for line in file.read().splitlines())
        total, free = (int(lines[name].split()[0]) * 1024 for name in FIELDS[2:])
    except (OSError, KeyError, ValueError):
        return None
    return total - free


@dataclass(frozen=True)
class Reading:
    """One look at the machine."""

    at: float  # time.monotonic()
    cpu_percent: float  # of all cores, since the look before
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
    """Looks at the machine, at most once in `every_s` seconds, for all who ask.

    `folder` is on the disk that counts. A look takes a quarter of a millisecond, and as much again
    where there is a GPU.
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
        if not self.opened:
            self.opened = True
            self.gpu = nvml.find(device, self.asked)
            psutil.cpu_percent(None)  # the first answer is about the time since this one

    def look(self) -> Reading:
        """The newest reading; made now, if the last one is older than `every_s`."""
        now = time.monotonic()
        if self.reading is None or now - self.reading.at >= self.every_s:
            self.reading = Reading(
                at=now,
                cpu_percent=psutil.cpu_percent(None),
                ram_percent=psutil.virtual_memory().percent,
                swap_bytes=swap_bytes(),
                disk_free_bytes=disk_free(self.folder),
                gpu=self.gpu.read() if self.gpu else None,
            )
        return self.reading


def disk_free(folder: Path | None) -> int | None:
    """Bytes that may still be written where `folder` is (None: here); None if it does not tell."""
    try:
        found = os.statvfs(folder or ".")
    except OSError as error:
        log.debug("no reading of the disk: %s", error)
        return None
    return found.f_bavail * found.f_frsize
