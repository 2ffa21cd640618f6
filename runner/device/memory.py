"""How much memory there is, and how much was held at most; everything in bytes.

Process numbers are of this process alone: loader workers are not in them. They read one small
file or make one system call, so they are cheap enough for each report (psutil on each step made
a tiny training step 1.16 times as long).
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from runner.device import cgroup
from runner.device.device import Device

PAGE = os.sysconf("SC_PAGE_SIZE")


def process_bytes() -> int:
    """Resident memory of this process now; 4 µs."""
    return _pages()[0]


def anonymous_bytes() -> int:
    """The part of `process_bytes` that is no file's: what could leak; 4 µs."""
    resident, shared = _pages()
    return resident - shared


def _pages() -> tuple[int, int]:
    """Resident bytes, and those of files, which only Linux tells apart."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            _, resident, shared, *_ = file.read().split()
    except FileNotFoundError:
        return int(psutil.Process().memory_info().rss), 0
    return int(resident) * PAGE, int(shared) * PAGE


def status_bytes(field: str) -> int | None:
    """A size from /proc/self/status; None where there is none."""
    try:
        with open("/proc/self/status", "rb", buffering=0) as file:
            _, mark, rest = file.read().partition(field.encode() + b":")
    except OSError:
        return None
    return int(rest.split(None, 1)[0]) * 1024 if mark else None


# -- peaks ------------------------------------------------------------------------------------
#
# The kernel keeps one high-water mark for the whole process, as CUDA does for a device. It is read
# and restarted whenever a stretch begins, and what it said goes to all stretches that are open.

_earlier: dict[str, int] = {}  # peaks of the process ("") and of devices before the last restart
_open: list[MemoryPeak] = []
_lock = threading.RLock()


def peak_process_bytes() -> int:
    """Most resident memory of this process since it started or since `reset_peak`; 6 µs."""
    return max(process_mark(), _earlier.get("", 0))


def peak_device_bytes(device: Device) -> int:
    """Most memory that tensors held on the accelerator; 0 on a CPU. No wait for the device.

    MPS keeps no peak: what Metal has handed out so far, which shrinks only on request.
    """
    return max(device_mark(device), _earlier.get(str(device.torch), 0))


def process_mark() -> int:
    """The kernel's high-water mark since it was restarted; 6 µs.

    On Linux VmHWM: `getrusage` there hands a process the peak of the one that started it.
    """
    mark = status_bytes("VmHWM")
    if mark is not None:
        return mark
    value = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return value if sys.platform == "darwin" else value * 1024  # macOS counts bytes, not KiB


def device_mark(device: Device) -> int:
    """The allocator's high-water mark since it was restarted."""
    if device.kind == "cuda":
        return torch.cuda.max_memory_allocated(device.torch)
    return torch.mps.driver_allocated_memory() if device.kind == "mps" else 0


def reset_peak(device: Device | None = None) -> bool:
    """Restart the peaks from what is held now; False where the kernel keeps the process's."""
    _earlier.pop("", None)
    if device is not None and device.kind == "cuda":
        _earlier.pop(str(device.torch), None)
        torch.cuda.reset_peak_memory_stats(device.torch)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


@dataclass(eq=False)
class MemoryPeak:
    """The most that was held in a stretch of work, in bytes; complete once that is over."""

    device: Device | None
    process: int = 0
    on_device: int = 0
    process_before: int = 0  # held when it began
    on_device_before: int = 0
    exact: bool = True  # by the kernel's mark; else by what is held at both ends

    def read(self) -> None:
        """Take over the marks."""
        self.process = max(self.process, process_mark() if self.exact else process_bytes())
        if self.device is not None:
            self.on_device = max(self.on_device, device_mark(self.device))


@contextmanager
def peak(device: Device | None = None) -> Iterator[MemoryPeak]:
    """The most memory that the process, and `device`, hold meanwhile; 40 µs in all.

    Stretches may nest, and overlap in threads; what other threads hold counts too. Where the
    kernel's mark cannot be restarted (not on Linux, or in some sandboxes) only both ends are read.
    """
    stretch = MemoryPeak(device)
    with _lock:
        stretch.exact = _restart_marks(device)
        stretch.process = stretch.process_before = process_bytes()
        if device is not None:
            stretch.on_device = stretch.on_device_before = device_mark(device)
        _open.append(stretch)
    try:
        yield stretch
    finally:
        with _lock:
            _open.remove(stretch)
            stretch.read()


def _restart_marks(device: Device | None) -> bool:
    for stretch in _open:
        stretch.read()
    before = {"": peak_process_bytes()}
    if device is not None:
        before[str(device.torch)] = peak_device_bytes(device)
    exact = reset_peak(device)
    _earlier.update(before)
    return exact


# -- limits -----------------------------------------------------------------------------------


def available_bytes() -> int:
    """Bytes that can still be allocated: of the machine, the container, `ulimit -v`; 150 µs."""
    lefts = (int(psutil.virtual_memory().available), cgroup.memory_left(), limit_left())
    return min(left for left in lefts if left is not None)


def limit_left() -> int | None:
    """Address space until this process's own limits (RLIMIT_AS, RLIMIT_DATA); None without any.

    An allocation beyond them fails, where one beyond a container's limit ends the process.
    """
    lefts = []
    for name, used in (("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")):
        limit = resource.getrlimit(getattr(resource, name))[0]
        size = status_bytes(used)
        if limit != resource.RLIM_INFINITY and size is not None:
            lefts.append(max(0, limit - size))
    return min(lefts, default=None)


def room(device: Device) -> int:
    """Bytes that can still be allocated where the model is."""
    share = device.memory_fraction or 1.0
    if device.kind == "cuda":
        free, total = torch.cuda.mem_get_info(device.torch)
        allocated = torch.cuda.memory_allocated(device.torch)
        cached = torch.cuda.memory_reserved(device.torch) - allocated
        return max(0, min(free + cached, round(total * share) - allocated))
    if device.kind == "mps":
        return max(0, round(device.memory_bytes * share) - torch.mps.driver_allocated_memory())
    return available_bytes()


def used_share(device: Device) -> float:
    """Share of its memory that this process holds, 0 to 1: reserved on the device, or its own."""
    share = device.memory_fraction or 1.0
    if device.kind == "cuda":
        return torch.cuda.memory_reserved(device.torch) / (device.memory_bytes * share)
    if device.kind == "mps":
        return torch.mps.driver_allocated_memory() / (device.memory_bytes * share)
    resident = process_bytes() / device.memory_bytes
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY or (used := status_bytes("VmSize")) is None:
        return resident
    return max(resident, used / limit)


def clean(device: Device) -> None:
    """Give back what is not needed: garbage, cached blocks of the device, freed heap; 50 ms."""
    gc.collect()
    if device.kind == "cuda":
        torch.cuda.empty_cache()
    elif device.kind == "mps":
        torch.mps.empty_cache()
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def shared_memory_bytes() -> int | None:
    """Free space in /dev/shm, through which loader workers hand over batches; None without one."""
    try:
        disk = os.statvfs("/dev/shm")  # noqa: S108  # read, never written
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize
