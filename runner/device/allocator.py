"""The allocators: what serves `malloc` in this process, and what each does with freed memory."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from contextlib import ExitStack
from pathlib import Path

import torch

PRELOADED = ("jemalloc", "tcmalloc", "mimalloc")
# mallopt(3)
TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4
NEVER_TRIM = -1  # as a size, the largest one
# glibc's limits on the number of mapped blocks and on a threshold that it moves by itself; once
# any is set it moves none, so what is put back is where a training process gets to: the limit
USUAL_MAPS = 65536
USUAL_THRESHOLD = 32 << 20
OWN_SETTINGS = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def name() -> str:
    """What serves malloc here: one that was preloaded, or the C library's."""
    loaded = libraries()
    found = next((one for one in PRELOADED for path in loaded if one in Path(path).name), None)
    return found or platform.libc_ver()[0] or f"that of {sys.platform}"


def keep_freed_memory(scope: ExitStack) -> str | None:
    """Have glibc keep what is freed for the next step, or say why it does not.

    It maps large blocks one by one and gives them back when they are freed, so a step with large
    activations has every page of them filled with zeros by the kernel anew: 12,000 to 15,000
    faults a step on a small CNN. Kept, the process holds its peak until `scope` ends (on that CNN
    4 % more than before).
    """
    serving = name()
    if serving != "glibc":
        return f"{serving} serves malloc and is left as it is"
    if any(key in os.environ for key in OWN_SETTINGS) or "glibc.malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return "the environment sets glibc's malloc"
    libc = ctypes.CDLL(None)

    def restore() -> None:
        libc.mallopt(MMAP_MAX, USUAL_MAPS)
        libc.mallopt(MMAP_THRESHOLD, USUAL_THRESHOLD)
        libc.mallopt(TRIM_THRESHOLD, 2 * USUAL_THRESHOLD)
        libc.malloc_trim(0)

    scope.callback(restore)
    libc.mallopt(MMAP_MAX, 0)
    libc.mallopt(TRIM_THRESHOLD, NEVER_TRIM)
    return None


def expand_segments(scope: ExitStack) -> str | None:
    """Have torch's CUDA allocator grow its segments, so that sizes that vary leave no holes.

    Holds for segments made from now on. Returns why not, where it cannot be had.
    """
    for key in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        if key in os.environ:
            return f"{key} is set"
    setting = torch.cuda.memory._set_allocator_settings
    try:
        setting("expandable_segments:True")
    except (RuntimeError, ValueError) as error:
        return " ".join(str(error).split())[:200]
    scope.callback(setting, "expandable_segments:False")
    return None


def expandable_segments() -> tuple[int, int]:
    """How many of the CUDA allocator's segments can grow, and how many there are."""
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return sum(bool(segment.get("is_expandable")) for segment in segments), len(segments)


def libraries() -> list[str]:
    """The files of the shared libraries in this process; empty where the system does not tell."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    found = (line.split(maxsplit=5)[5] for line in lines if line.count("/"))
    return list(dict.fromkeys(path for path in found if ".so" in Path(path).name))
