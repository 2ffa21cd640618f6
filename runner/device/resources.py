"""Free resources and load of the machine: memory, swap, disk, CPU and GPU."""

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
    name: str  # such as "this machine's memory"
    own: bool = False  # of this process: allocations beyond it fail, and nothing is killed

    @property
    def used_share(self) -> float:
        """Share used by all processes, 0 to 1."""
        return 1 - self.left / self.limit


def room() -> Room:
    """Return the limit with the largest used share: machine, container or `ulimit`; 300 µs.

    Free swap counts as left, since the kernel kills no process before it is full, and so does
    file cache that can be dropped.
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
    """Return the swap used by all processes."""
    return int(psutil.swap_memory().used)


def gpu_readings(device: Device) -> dict[str, float]:
    """Return NVML's readings of the GPU by name; empty without the extra `gpu` (pynvml)."""
    questions: dict[str, Callable[[torch.device], float]] = {
        "gpu_percent": torch.cuda.utilization,
        "gpu_gib": lambda where: torch.cuda.device_memory_used(where) / GIB,
        "gpu_celsius": torch.cuda.temperature,
        "gpu_mhz": torch.cuda.clock_rate,
        "gpu_watt": lambda where: torch.cuda.power_draw(where) / 1e3,
    }
    answers = {}
    for name, ask in questions.items() if device.kind == "cuda" else ():
        with suppress(Exception):  # a GPU or MIG slice may lack a reading; NVML may be missing
            answers[name] = float(ask(device.torch))
    return answers


@dataclass(frozen=True)
class Reading:
    """One reading of the machine."""

    at: float  # time.monotonic()
    cpu_percent: float  # of all cores, since the last reading
    ram_percent: float
    swap_bytes: int
    disk_free_bytes: int | None
    gpu: dict[str, float]

    def row(self) -> dict[str, float]:
        """Return values by name for TensorBoard's `usage`; swap only if in use."""
        values = {"cpu_percent": self.cpu_percent, "ram_percent": self.ram_percent}
        if self.disk_free_bytes is not None:
            values["disk_free_gib"] = self.disk_free_bytes / GIB
        if self.swap_bytes:
            values["swap_gib"] = self.swap_bytes / GIB
        return values | self.gpu


class Machine:
    """Shared readings of the machine, at most one per `every_s` seconds.

    `folder` is on the disk to monitor. A reading takes 0.25 ms, and twice that with a GPU.
    """

    def __init__(
        self, folder: Path | None = None, every_s: float = 5.0, gpu: bool | None = None
    ) -> None:
        self.folder, self.every_s, self.gpu = folder, every_s, gpu
        self.device: Device | None = None
        self.reading: Reading | None = None

    def open(self, device: Device) -> None:
        """Start measuring CPU load. Raises ConfigError if `gpu` is on and has no readings."""
        if self.gpu and not gpu_readings(device):
            problem = f"a {device.kind} device has no NVML, or it does not answer"
            raise ConfigError(GPU_KEY, problem, f"pip install nvidia-ml-py, or set {GPU_KEY}=null")
        if self.device is None:
            psutil.cpu_percent(None)  # the next call measures the time since this one
        self.device = device

    def sample(self) -> Reading:
        """Return the last reading, or a new one if that is older than `every_s`."""
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
    """Return the free bytes on the disk of `folder` (None: current folder); None on errors."""
    try:
        disk = os.statvfs(folder or ".")
    except OSError as error:
        log.debug("no reading of the disk: %s", error)
        return None
    return disk.f_bavail * disk.f_frsize
