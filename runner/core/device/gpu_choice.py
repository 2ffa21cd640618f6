"""The GPU with most free memory, for `device.index=auto`."""

from __future__ import annotations

import torch

from runner.core.format import size


def most_free_gpu() -> tuple[int, str]:
    """Return its index, and a text with its free memory; of equal ones the first."""
    free = [_free_bytes(index) for index in range(torch.cuda.device_count())]
    best = free.index(max(free))
    return best, f"GPU {best} of {len(free)} has most free memory, {size(free[best])}"


def _free_bytes(index: int) -> int:
    """Return free bytes by NVML; without it by CUDA, which opens a context on the GPU."""
    try:
        used = torch.cuda.device_memory_used(index)
    except Exception:  # pynvml is missing, or fails in many ways
        return torch.cuda.mem_get_info(index)[0]
    return torch.cuda.get_device_properties(index).total_memory - used
