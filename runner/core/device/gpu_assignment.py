"""Assign the GPUs of this machine to processes, without torch and without opening a GPU."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
NVML = "libnvidia-ml.so.1"  # of the driver


def list_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that a process may use, as entries of CUDA_VISIBLE_DEVICES.

    Like CUDA: entries are indices, or UUIDs of GPUs or MIG slices; an invalid one hides those after
    it, and one that occurs twice hides all. Without the variable, all GPUs by index.
    """
    visible, count = environ.get(VISIBLE_DEVICES), count_gpus()
    if visible is None:
        return [str(index) for index in range(count or 0)]
    entries = [entry.strip() for entry in visible.split(",")]
    uuid = re.match("GPU-|MIG-", entries[0])
    gpus: list[str] = []
    for entry in entries:
        if uuid is None and (index := re.match(r"\+?(\d+)", entry)):
            entry = str(int(index[1]))
            is_valid = count is None or int(entry) < count
        else:
            is_valid = uuid is not None and entry.startswith(uuid[0])
        if not is_valid:
            break
        if entry in gpus:
            return []
        gpus.append(entry)
    return gpus


def count_gpus() -> int | None:
    """Return the number of NVIDIA GPUs, as the driver's library says; None without it."""
    number = ctypes.c_uint()
    with suppress(OSError, AttributeError):
        nvml = ctypes.CDLL(NVML)
        if nvml.nvmlInit_v2() == 0:
            failed = nvml.nvmlDeviceGetCount_v2(ctypes.byref(number))
            nvml.nvmlShutdown()
            return None if failed else number.value
    return None


def assign_gpus(gpus: Sequence[str], job: int, processes: int) -> list[str]:
    """Return the GPUs of a job with so many processes: jobs take the next ones, in turn."""
    first = job * processes
    return [gpus[n % len(gpus)] for n in range(first, first + min(processes, len(gpus)))]


def describe_gpus(gpus: Sequence[str]) -> str:
    """Return names of GPUs for a table: `cuda:1, cuda:2`, or UUIDs."""
    return ", ".join(f"cuda:{gpu}" if gpu.isdigit() else gpu for gpu in gpus)
