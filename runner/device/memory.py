"""How much memory there is, and how much was held at most; everything in bytes.

Process numbers are of this process alone: loader workers are not in them. They read one small
file or make one system call, so they are cheap enough for each report (the cost is beside
each); psutil on each step made a tiny training step 1.16 times as long.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

from runner.device import cgroup
from runner.device.device import Device

PAGE = os.sysconf("SC_PAGE_SIZE")


def process_bytes() -> int:
    """Resident memory of this process now; 4 µs."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * PAGE
    except FileNotFoundError:  # not Linux
        import psutil

        return int(psutil.Process().memory_info().rss)


def peak_process_bytes() -> int:
    """Most resident memory of this process since it started or since `reset_peak`; 6 µs.

    On Linux from VmHWM: `getrusage` there hands a process the peak of the one that started
    it, so the small child of a large parent reads large.
    """
    peak = _status("VmHWM")
    if peak is not None:
        return peak
    value = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return value if sys.platform == "darwin" else value * 1024  # macOS counts bytes, not KiB


def reset_peak(device: Device | None = None) -> bool:
    """Start measuring a stretch: the peaks restart from what is held now.

    Returns whether the process's peak could be restarted: Linux alone, and not in every
    sandbox. Where it could not, `peak_process_bytes` stays the peak since the start.
    """
    if device is not None and device.kind == "cuda":
        torch.cuda.reset_peak_memory_stats(device.torch)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_device_bytes(device: Device) -> int:
    """Most memory that tensors held on the accelerator; 0 on a CPU.

    CUDA: what was allocated, not what the caching allocator reserved; no wait for the device.
    MPS keeps no peak: what Metal has handed out so far, which shrinks only on request.
    """
    if device.kind == "cuda":
        return torch.cuda.max_memory_allocated(device.torch)
    if device.kind == "mps":
        return torch.mps.driver_allocated_memory()
    return 0


def available_bytes() -> int:
    """What can still be allocated: the machine's, or the container's where that is less; 150 µs."""
    import psutil

    free = int(psutil.virtual_memory().available)
    left = cgroup.memory_left()
    return free if left is None else min(free, left)


def shared_memory_bytes() -> int | None:
    """Free space in /dev/shm, through which loader workers hand over batches; None without one."""
    try:
        found = os.statvfs("/dev/shm")  # noqa: S108  # read, never written
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _status(field: str) -> int | None:
    """A size from /proc/self/status."""
    try:
        with open("/proc/self/status", "rb", buffering=0) as file:
            _, found, rest = file.read().partition(field.encode() + b":")
    except OSError:
        return None
    return int(rest.split(None, 1)[0]) * 1024 if found else None
