"""Readings of the machine: available memory, swap, disk, CPU and GPU."""

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

from runner.core.device import cgroup, memory
from runner.core.device.device import Device
from runner.core.errors import ConfigError

log = logging.getLogger("runner")

GIB = 2**30
GPU_KEY = "stability.watch.gpu"


@dataclass(frozen=True)
class MemoryLimit:
    """A memory limit under which this process allocates, in bytes."""

    limit: int
    left: int
    name: str  # "this machine's memory" and the like
    own: bool = False  # limit of this process: allocations beyond it fail, without an OOM kill

    @property
    def used_share(self) -> float:
        """The share used by all processes, 0 to 1."""
        return 1 - self.left / self.limit


def tightest_memory_limit() -> MemoryLimit:
    """Return the tightest limit of machine, container and `ulimit`; 300 µs.

    Free swap counts as available, since the kernel kills no process before it is full; so does
    reclaimable file cache.
    """
    ram, swap = psutil.virtual_memory(), psutil.swap_memory()
    total, left = ram.total + swap.total, ram.available + swap.free
    limits = [MemoryLimit(total, left, "this machine's memory")]
    if (group := cgroup.tightest_limit()) is not None:
        limits.append(MemoryLimit(*group, "the memory of this container (control group)"))
    limit, own = resource.getrlimit(resource.RLIMIT_AS)[0], memory.rlimit_bytes_left()
    if own is not None and limit != resource.RLIM_INFINITY:
        name = "the address space that `ulimit -v` allows"
        limits.append(MemoryLimit(limit, own, name, own=True))
    return max(limits, key=lambda limit: limit.used_share)


def swap_bytes() -> int:
    """Return the bytes of swap used by all processes."""
    return int(psutil.swap_memory().used)


def gpu_readings(device: Device) -> dict[str, float]:
    """Return NVML readings of the GPU through torch; {} without the extra `gpu` (pynvml)."""
    readers: dict[str, Callable[[torch.device], float]] = {
        "gpu_percent": torch.cuda.utilization,
        "gpu_gib": lambda torch_device: torch.cuda.device_memory_used(torch_device) / GIB,
        "gpu_celsius": torch.cuda.temperature,
        "gpu_mhz": torch.cuda.clock_rate,
        "gpu_watt": lambda torch_device: torch.cuda.power_draw(torch_device) / 1e3,
    }
    readings = {}
    for name, read in readers.items() if device.kind == "cuda" else ():
        with suppress(Exception):  # a GPU, or a MIG slice, may lack a reading; NVML may be missing
            readings[name] = float(read(device.torch))
    return readings


@dataclass(frozen=True)
class Reading:
    """Readings of the machine at one time."""

    at: float  # time.monotonic()
    cpu_percent: float  # of all cores, since the last reading
    ram_percent: float
    swap_bytes: int
    disk_free_bytes: int | None
    gpu: dict[str, float]

    def row(self) -> dict[str, float]:
        """Return names and values for TensorBoard's `usage`; swap only if in use."""
        values = {"cpu_percent": self.cpu_percent, "ram_percent": self.ram_percent}
        if self.disk_free_bytes is not None:
            values["disk_free_gib"] = self.disk_free_bytes / GIB
        if self.swap_bytes:
            values["swap_gib"] = self.swap_bytes / GIB
        return values | self.gpu


class SystemMonitor:
    """Cached readings of the machine and the disk of `folder`, one per `every_s` seconds."""

    def __init__(
        self, folder: Path | None = None, every_s: float = 5.0, gpu: bool | None = None
    ) -> None:
        self.folder, self.every_s, self.gpu = folder, every_s, gpu
        self.device: Device | None = None
        self.reading: Reading | None = None

    def open(self, device: Device) -> None:
        """Start measuring CPU time; ConfigError if GPU readings are required but unavailable."""
        if self.gpu and not gpu_readings(device):
            problem = f"NVML is missing or does not respond for {device.kind}"
            raise ConfigError(GPU_KEY, problem, f"pip install nvidia-ml-py, or set {GPU_KEY}=null")
        if self.device is None:
            psutil.cpu_percent(None)  # the next call returns the share since this one
        self.device = device

    def sample(self) -> Reading:
        """Return the newest reading; take one if it is older than `every_s`."""
        now = time.monotonic()
        if self.reading is None or now - self.reading.at >= self.every_s:
            self.reading = Reading(
                at=now,
                cpu_percent=psutil.cpu_percent(None),
                ram_percent=psutil.virtual_memory().percent,
                swap_bytes=swap_bytes(),
                disk_free_bytes=_disk_free(self.folder),
                gpu=self._read_gpu(),
            )
        return self.reading

    def _read_gpu(self) -> dict[str, float]:
        """Return NVML's readings unless they are off, and the allocator's failures so far."""
        if self.device is None or self.device.kind != "cuda":
            return {}
        stats = torch.cuda.memory_stats(self.device.torch)
        counts = {f"gpu_{name}": float(stats[f"num_{name}"]) for name in ("alloc_retries", "ooms")}
        return counts if self.gpu is False else gpu_readings(self.device) | counts


def _disk_free(folder: Path | None) -> int | None:
    """Return the free bytes on the disk of `folder` (None: current folder), or None if unknown."""
    try:
        disk = os.statvfs(folder or ".")
    except OSError as error:
        log.debug("free disk space not read: %s", error)
        return None
    return disk.f_bavail * disk.f_frsize
