"""What the machine has left, and what it is doing: memory that may be had, swap, disk, CPU, GPU."""

from __future__ import annotations

import logging
import os
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from runner.device import cgroup, memory
from runner.device.device import Device
from runner.errors import ConfigError

log = logging.getLogger("runner")

GIB = 2**30
GPU_KEY = "stability.watch.gpu"


@dataclass(frozen=True)
class Room:
    """The tightest of the limits under which this process allocates, in bytes."""

    limit: int
    left: int
    name: str  # "this machine's memory" and the like
    own: bool = False  # a limit of this process: allocations beyond it fail, and nothing is killed

    @property
    def used_share(self) -> float:
        """Share that is taken, 0 to 1, by all processes."""
        return 1 - self.left / self.limit


def room() -> Room:
    """The limit that is nearest, of the machine, the container and `ulimit`; 300 µs.

    Free swap counts as left, since the kernel ends no process before it is full; so does file
    cache that can be dropped.
    """
    ram, swap = psutil.virtual_memory(), psutil.swap_memory()
    limits = [Room(ram.total + swap.total, ram.available + swap.free, "this machine's memory")]
    if (group := cgroup.tightest()) is not None:
        limits.append(Room(*group, "the memory of this container (control group)"))
    limit, own = resource.getrlimit(resource.RLIMIT_AS)[0], memory.limit_left()
    if own is not None and limit != resource.RLIM_INFINITY:
        limits.append(Room(limit, own, "the address space that `ulimit -v` allows", own=True))
    return max(limits, key=lambda limit: limit.used_share)


def swap_bytes() -> int:
    """Swap in use, by all processes."""
    return int(psutil.swap_memory().used)


def gpu_readings(device: Device) -> dict[str, float]:
    """What NVML tells of the GPU, through torch; nothing without the extra `gpu` (pynvml)."""
    questions: dict[str, Callable[[torch.device], float]] = {
        "gpu_percent": torch.cuda.utilization,
        "gpu_gib": lambda where: torch.cuda.device_memory_used(where) / GIB,
        "gpu_celsius": torch.cuda.temperature,
        "gpu_mhz": torch.cuda.clock_rate,
        "gpu_watt": lambda where: torch.cuda.power_draw(where) / 1e3,
    }
    answers = {}
    for name, ask in questions.items() if device.kind == "cuda" else ():
        with suppress(Exception):  # a GPU, or a slice of one, need not tell; NVML may be missing
            answers[name] = float(ask(device.torch))
    return answers


@dataclass(frozen=True)
class Reading:
    """The machine at one time."""

    at: float  # time.monotonic()
    cpu_percent: float  # of all cores, since the reading before
    ram_percent: float
    swap_bytes: int
    disk_free_bytes: int | None
    gpu: dict[str, float]

    def row(self) -> dict[str, float]:
        """Names and values for TensorBoard's `usage`; swap where there is any in use."""
        values = {"cpu_percent": self.cpu_percent, "ram_percent": self.ram_percent}
        if self.disk_free_bytes is not None:
            values["disk_free_gib"] = self.disk_free_bytes / GIB
        if self.swap_bytes:
            values["swap_gib"] = self.swap_bytes / GIB
        return values | self.gpu


class Machine:
    """Readings of the machine, at most one in `every_s` seconds, for all who ask.

    `folder` is on the disk that counts. A reading takes a quarter of a millisecond, and as much
    again where there is a GPU.
    """

    def __init__(
        self, folder: Path | None = None, every_s: float = 5.0, gpu: bool | None = None
    ) -> None:
        self.folder, self.every_s, self.gpu = folder, every_s, gpu
        self.device: Device | None = None
        self.reading: Reading | None = None

    def open(self, device: Device) -> None:
        """Begin to count the CPU's time. Raises ConfigError where a GPU's state cannot be had."""
        if self.gpu and not gpu_readings(device):
            problem = f"a {device.kind} device has no NVML, or it does not answer"
            raise ConfigError(GPU_KEY, problem, f"pip install nvidia-ml-py, or set {GPU_KEY}=null")
        if self.device is None:
            psutil.cpu_percent(None)  # the first answer is about the time since this one
        self.device = device

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
                gpu=gpu_readings(self.device) if self.device and self.gpu is not False else {},
            )
        return self.reading


def _disk_free(folder: Path | None) -> int | None:
    """Bytes that may still be written where `folder` is (None: here); None if it does not tell."""
    try:
        disk = os.statvfs(folder or ".")
    except OSError as error:
        log.debug("no reading of the disk: %s", error)
        return None
    return disk.f_bavail * disk.f_frsize
