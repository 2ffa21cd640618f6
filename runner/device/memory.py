"""How much memory there is, and how much was held at most; everything in bytes.

Process numbers are of this process alone: loader workers are not in them. They read one small
file or make one system call, so they are cheap enough for each report (the cost is beside
each); psutil on each step made a tiny training step 1.16 times as long.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from runner.device import allocator, cgroup
from runner.device.device import Device

ARENA_MAX = -8  # mallopt(3)
LARGE = 1 << 20  # bytes of a block that is mapped by itself, where memory is short
PAGE = os.sysconf("SC_PAGE_SIZE")

earlier: dict[str, int] = {}  # peaks of the process ("") and devices that `phases` put aside


def anonymous_bytes() -> int:
    """The part of `process_bytes` that is no file's: what could leak; 4 µs.

    Where the system does not tell them apart (not Linux), all of it.
    """
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            _, resident, shared, *_ = file.read().split()
    except FileNotFoundError:
        return process_bytes()
    return (int(resident) - int(shared)) * PAGE


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
    return max(process_mark(), earlier.get("", 0))


def process_mark() -> int:
    """What the kernel's mark says, which `phases` restarts too; 6 µs."""
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
    earlier.pop("", None)
    if device is not None and device.kind == "cuda":
        earlier.pop(str(device.torch), None)
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
    return max(device_mark(device), earlier.get(str(device.torch), 0))


def device_mark(device: Device) -> int:
    """What the allocator's mark says, which `phases` restarts too."""
    if device.kind == "cuda":
        return torch.cuda.max_memory_allocated(device.torch)
    if device.kind == "mps":
        return torch.mps.driver_allocated_memory()
    return 0


def available_bytes() -> int:
    """What can still be allocated; 150 µs.

    The machine's, or the container's, or what `ulimit -v` leaves, whichever is least.
    """
    import psutil

    lefts = (int(psutil.virtual_memory().available), cgroup.memory_left(), limit_left())
    return min(left for left in lefts if left is not None)


def limit_left() -> int | None:
    """Address space until this process's own limits (RLIMIT_AS, RLIMIT_DATA); None without any.

    An allocation beyond them fails, where one beyond a container's limit ends the process.
    """
    lefts = []
    for name, used in (("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")):
        limit = resource.getrlimit(getattr(resource, name))[0]
        held = _status(used)
        if limit != resource.RLIM_INFINITY and held is not None:
            lefts.append(max(0, limit - held))
    return min(lefts, default=None)


def room(device: Device) -> int:
    """Bytes that can still be allocated where the model is."""
    share = device.memory_fraction or 1.0
    if device.kind == "cuda":
        free, total = torch.cuda.mem_get_info(device.torch)
        held = torch.cuda.memory_allocated(device.torch)
        kept = torch.cuda.memory_reserved(device.torch) - held  # in the allocator's own hands
        return max(0, min(free + kept, round(total * share) - held))
    if device.kind == "mps":
        return max(0, round(device.memory_bytes * share) - torch.mps.driver_allocated_memory())
    return available_bytes()


def share_held(device: Device) -> float:
    """How much of its memory this process holds, 0 to 1: on the device, or its own on a CPU.

    Of an accelerator what the caching allocator has reserved counts; 10 µs on a CPU.
    """
    share = device.memory_fraction or 1.0
    if device.kind == "cuda":
        return torch.cuda.memory_reserved(device.torch) / (device.memory_bytes * share)
    if device.kind == "mps":
        return torch.mps.driver_allocated_memory() / (device.memory_bytes * share)
    held = process_bytes() / device.memory_bytes
    limit, used = resource.getrlimit(resource.RLIMIT_AS)[0], _status("VmSize")
    if limit == resource.RLIM_INFINITY or used is None:
        return held
    return max(held, used / limit)


def clean(device: Device) -> None:
    """Give back what nothing needs: garbage, cached blocks of the device, freed heap; 50 ms."""
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
        found = os.statvfs("/dev/shm")  # noqa: S108  # read, never written
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def keep_to_one_heap(scope: ExitStack) -> None:
    """Have glibc begin no second heap, where this process's address space is limited.

    When the first cannot grow it reserves 64 MiB for another, and never gives them back: after
    a few allocations that failed there is no room left for small ones either.
    """
    if allocator.name() == "glibc" and limit_left() is not None:
        libc = ctypes.CDLL(None)
        scope.callback(libc.mallopt, ARENA_MAX, 0)  # 0: as many as glibc sees fit
        libc.mallopt(ARENA_MAX, 1)


def give_back_at_once(scope: ExitStack) -> None:
    """Have glibc map every large block by itself and unmap it when it is freed, until `scope` ends.

    Its heap otherwise has holes, by which a training process was seen to hold up to twice
    what its tensors take. Costs a fault for each page: a step was 1.3 to 1.8 times as long.
    """
    if allocator.name() != "glibc":
        return
    libc = ctypes.CDLL(None)
    scope.callback(libc.mallopt, allocator.TRIM_THRESHOLD, 2 * allocator.USUAL_THRESHOLD)
    scope.callback(libc.mallopt, allocator.MMAP_THRESHOLD, allocator.USUAL_THRESHOLD)
    libc.mallopt(allocator.MMAP_MAX, allocator.USUAL_MAPS)
    libc.mallopt(allocator.MMAP_THRESHOLD, LARGE)
    libc.mallopt(allocator.TRIM_THRESHOLD, LARGE)


def _status(field: str) -> int | None:
    """A size from /proc/self/status."""
    try:
        with open("/proc/self/status", "rb", buffering=0) as file:
            _, found, rest = file.read().partition(field.encode() + b":")
    except OSError:
        return None
    return int(rest.split(None, 1)[0]) * 1024 if found else None
