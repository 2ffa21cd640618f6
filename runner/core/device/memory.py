"""Memory of the process and the device: current size, peaks and limits, in bytes.

Process numbers exclude loader workers (`child_bytes` has them). They read one small file or make
one system call, so they are cheap enough for each report (psutil on each step made a tiny training
step 1.16 times as long).
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
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

from runner.core.device import cgroup
from runner.core.device.device import Device

PAGE = os.sysconf("SC_PAGE_SIZE")


def process_bytes() -> int:
    """Return the resident memory of this process; 4 µs."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * PAGE
    except FileNotFoundError:
        return int(psutil.Process().memory_info().rss)


def anonymous_bytes(pid: int | None = None) -> int:
    """Return the resident memory that no file backs, of this process or `pid` (0: ended); 6 µs."""
    try:
        with open(f"/proc/{pid or 'self'}/status", "rb", buffering=0) as file:
            status = file.read()
    except (FileNotFoundError, ProcessLookupError):  # not on Linux, or it has ended
        try:
            return int(psutil.Process(pid).memory_info().rss)
        except psutil.NoSuchProcess:
            return 0
    return sum(_status_field(status, field) or 0 for field in ("RssAnon", "RssShmem"))


def child_bytes() -> int:
    """Return `anonymous_bytes` of data loaders' workers, with pages shared with this process."""
    pids = [child.pid for child in multiprocessing.active_children()]
    return sum(anonymous_bytes(pid) for pid in pids if pid is not None)


def descendant_bytes() -> int:
    """Return the memory of all processes below this one that none of the others shares; 10 ms."""
    total = 0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            total += child.memory_full_info().uss
    return total


def status_bytes(field: str) -> int | None:
    """Return a size from /proc/self/status, or None."""
    try:
        with open("/proc/self/status", "rb", buffering=0) as file:
            return _status_field(file.read(), field)
    except OSError:
        return None


def _status_field(status: bytes, field: str) -> int | None:
    _, mark, rest = status.partition(field.encode() + b":")
    return int(rest.split(None, 1)[0]) * 1024 if mark else None


# -- peaks ------------------------------------------------------------------------------------
#
# The kernel keeps one high-water mark per process, as CUDA does per device. It is read and reset
# whenever a `peak_memory` context begins, and its value is added to all open contexts.

# peaks before the last reset, of the process ("") and of devices
_earlier_peaks: dict[str, int] = {}
_open_peaks: list[MemoryPeak] = []
_lock = threading.RLock()


def peak_process_bytes() -> int:
    """Return the peak resident memory since the process started or `reset_peak`; 6 µs."""
    return max(process_mark(), _earlier_peaks.get("", 0))


def peak_device_bytes(device: Device) -> int:
    """Return the peak of tensors on the accelerator, or 0; on MPS what Metal holds. No sync."""
    return max(device_mark(device), _earlier_peaks.get(str(device.torch), 0))


def process_mark() -> int:
    """Return the high-water mark; VmHWM on Linux, where `getrusage` has the parent's peak; 6 µs."""
    mark = status_bytes("VmHWM")
    if mark is not None:
        return mark
    value = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return value if sys.platform == "darwin" else value * 1024  # macOS counts bytes, not KiB


def device_mark(device: Device) -> int:
    """Return the allocator's high-water mark since its last reset."""
    if device.kind == "cuda":
        return torch.cuda.max_memory_allocated(device.torch)
    return torch.mps.driver_allocated_memory() if device.kind == "mps" else 0


def reset_peak(device: Device | None = None) -> bool:
    """Reset the peaks to the current sizes; False if the process's cannot be reset."""
    _earlier_peaks.pop("", None)
    if device is not None and device.kind == "cuda":
        _earlier_peaks.pop(str(device.torch), None)
        torch.cuda.reset_peak_memory_stats(device.torch)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


@dataclass(eq=False)
class MemoryPeak:
    """Peak memory in a `peak_memory` context, in bytes; final once it has ended."""

    device: Device | None
    process: int = 0
    on_device: int = 0
    process_before: int = 0  # at its start
    on_device_before: int = 0
    exact: bool = True  # by the kernel's mark; else the larger of start and end

    def read(self) -> None:
        """Update the peaks from the current marks."""
        self.process = max(self.process, process_mark() if self.exact else process_bytes())
        if self.device is not None:
            self.on_device = max(self.on_device, device_mark(self.device))


@contextmanager
def peak_memory(device: Device | None = None) -> Iterator[MemoryPeak]:
    """Measure the peak memory of the process, and of `device`, while entered; 40 µs in all.

    Contexts may nest, and overlap in threads; memory of other threads is included. If the kernel's
    mark cannot be reset (not on Linux, or in some sandboxes), only start and end are measured.
    """
    memory_peak = MemoryPeak(device)
    with _lock:
        memory_peak.exact = _restart_marks(device)
        memory_peak.process = memory_peak.process_before = process_bytes()
        if device is not None:
            memory_peak.on_device = memory_peak.on_device_before = device_mark(device)
        _open_peaks.append(memory_peak)
    try:
        yield memory_peak
    finally:
        with _lock:
            _open_peaks.remove(memory_peak)
            memory_peak.read()


def _restart_marks(device: Device | None) -> bool:
    for memory_peak in _open_peaks:
        memory_peak.read()
    before = {"": peak_process_bytes()}
    if device is not None:
        before[str(device.torch)] = peak_device_bytes(device)
    exact = reset_peak(device)
    _earlier_peaks.update(before)
    return exact


# -- limits -----------------------------------------------------------------------------------


def available_bytes() -> int:
    """Return the bytes that can be allocated: machine, container and `ulimit -v`; 150 µs."""
    limits = (int(psutil.virtual_memory().available), cgroup.memory_left(), rlimit_bytes_left())
    return min(limit for limit in limits if limit is not None)


def rlimit_bytes_left() -> int | None:
    """Return the bytes left until RLIMIT_AS or RLIMIT_DATA; None without these limits.

    An allocation beyond them fails, while one beyond a container's limit ends the process.
    """
    bytes_left = []
    for name, used in (("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")):
        limit = resource.getrlimit(getattr(resource, name))[0]
        size = status_bytes(used)
        if limit != resource.RLIM_INFINITY and size is not None:
            bytes_left.append(max(0, limit - size))
    return min(bytes_left, default=None)


def allocatable_bytes(device: Device) -> int:
    """Return the bytes that can be allocated on the device."""
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
    """Return the share of the device's (or host's) memory that this process uses, 0 to 1.

    On an accelerator that of its tensors: what the allocator caches is reused, and freeing it would
    only make the next step reserve it again.
    """
    share = device.memory_fraction or 1.0
    if device.kind == "cuda":
        return torch.cuda.memory_allocated(device.torch) / (device.memory_bytes * share)
    if device.kind == "mps":
        return torch.mps.current_allocated_memory() / (device.memory_bytes * share)
    resident = process_bytes() / device.memory_bytes
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY or (used := status_bytes("VmSize")) is None:
        return resident
    return max(resident, used / limit)


def free_heap() -> None:
    """Free garbage, and return the unused heap to the system; 50 ms."""
    gc.collect()
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def free_caches(device: Device) -> None:
    """Free garbage, cached blocks of the device, and unused heap; 50 ms."""
    free_heap()
    if device.kind == "cuda":
        torch.cuda.empty_cache()
    elif device.kind == "mps":
        torch.mps.empty_cache()


def shared_memory_bytes() -> int | None:
    """Return the free bytes in /dev/shm, which torch's loader workers use; None without it."""
    try:
        disk = os.statvfs("/dev/shm")  # noqa: S108  # read, never written
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize
