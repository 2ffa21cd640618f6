"""Settings of glibc's malloc and torch's CUDA allocator for freed memory."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from contextlib import ExitStack
from pathlib import Path

import torch

PRELOADED = ("jemalloc", "tcmalloc", "mimalloc")
TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -3, -4, -8  # mallopt(3)
# glibc's. It adapts the thresholds up to these values, until one is set; a training process reaches
# them, so they are restored. 0 arenas: as many as glibc chooses.
GLIBC_DEFAULTS = {MMAP_THRESHOLD: 32 << 20, MMAP_MAX: 65536, TRIM_THRESHOLD: 64 << 20, ARENA_MAX: 0}
LARGE_BLOCK = 1 << 20  # bytes of a block that gets its own mapping when memory is short
TUNING_VARIABLES = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def malloc_name() -> str:
    """Return the malloc implementation: a preloaded one, or the C library."""
    loaded = [os.path.basename(path) for path in loaded_libraries()]
    preloaded = next((key for key in PRELOADED for path in loaded if key in path), None)
    return preloaded or platform.libc_ver()[0] or f"that of {sys.platform}"


def keep_freed_memory(scope: ExitStack) -> str | None:
    """Make glibc keep freed memory for the next step until `scope` ends, or return why not.

    By default it maps large blocks one by one and unmaps them when freed: 12,000 to 15,000 page
    faults a step on a small CNN. Keeping memory holds the process at its peak (4 % more there).
    """
    malloc = malloc_name()
    if malloc != "glibc":
        return f"{malloc} provides malloc and is not tuned"
    tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if tuned or any(key in os.environ for key in TUNING_VARIABLES):
        return "the environment sets glibc's malloc"
    scope.callback(ctypes.CDLL(None).malloc_trim, 0)
    largest = -1  # as an unsigned size
    threshold = GLIBC_DEFAULTS[MMAP_THRESHOLD]
    _set_malloc_options({MMAP_MAX: 0, MMAP_THRESHOLD: threshold, TRIM_THRESHOLD: largest}, scope)
    return None


def limit_malloc_arenas(scope: ExitStack) -> None:
    """Limit glibc to one arena, where address space is short: each other one reserves 64 MiB."""
    if malloc_name() == "glibc":
        _set_malloc_options({ARENA_MAX: 1}, scope)


def return_freed_memory(scope: ExitStack) -> None:
    """Make glibc map each large block separately and unmap it when freed, until `scope` ends.

    Heap fragmentation otherwise made a training process use up to twice the memory of its tensors.
    Costs a fault for each page: steps took 1.3 to 1.8 times as long.
    """
    if malloc_name() == "glibc":
        max_maps = GLIBC_DEFAULTS[MMAP_MAX]
        options = {MMAP_MAX: max_maps, MMAP_THRESHOLD: LARGE_BLOCK, TRIM_THRESHOLD: LARGE_BLOCK}
        _set_malloc_options(options, scope)


def _set_malloc_options(options: dict[int, int], scope: ExitStack) -> None:
    """Set options of glibc's malloc until `scope` ends."""
    libc = ctypes.CDLL(None)
    for option, value in options.items():
        scope.callback(libc.mallopt, option, GLIBC_DEFAULTS[option])
        libc.mallopt(option, value)


def expand_segments(scope: ExitStack) -> str | None:
    """Make torch's CUDA segments expandable, against fragmentation, or return why not."""
    for key in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        if key in os.environ:
            return f"{key} is set"
    setting = torch._C._accelerator_setAllocatorSettings  # in torch 2.11 and later
    try:
        setting("expandable_segments:True")
    except (RuntimeError, ValueError) as error:
        return " ".join(str(error).split())[:200]
    scope.callback(setting, "expandable_segments:False")
    return None


def expandable_segments() -> tuple[int, int]:
    """Return the number of expandable segments of the CUDA allocator, and of all segments."""
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return sum(bool(segment.get("is_expandable")) for segment in segments), len(segments)


def loaded_libraries() -> list[str]:
    """Return the paths of loaded shared libraries; [] if the system does not list them."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if "/" in line)
    return [path for path in paths if ".so" in os.path.basename(path)]
