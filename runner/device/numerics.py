"""Torch's global switches for determinism, TF32 and memory; `scope` undoes each."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import torch

# One of the two sizes with which cuBLAS is deterministic, 24 MiB; the other, ":16:8", is slower.
WORKSPACE = ":4096:8"


def set_deterministic(kind: str, scope: ExitStack) -> None:
    """Make results reproducible; an operator without a deterministic kernel raises."""
    scope.callback(
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True)
    # It fills each new tensor with NaN, which takes 8 ms for 4 MB.
    _switch(torch.utils.deterministic, "fill_uninitialized_memory", False, scope)
    if kind == "cuda":
        _switch(torch.backends.cudnn, "deterministic", True, scope)
        if "CUBLAS_WORKSPACE_CONFIG" not in os.environ:  # torch refuses to run without it
            scope.callback(os.environ.pop, "CUBLAS_WORKSPACE_CONFIG", None)
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = WORKSPACE


def set_cudnn_benchmark(enabled: bool, scope: ExitStack) -> None:
    """Set whether cuDNN benchmarks kernels per convolution shape and uses the fastest."""
    _switch(torch.backends.cudnn, "benchmark", enabled, scope)


def set_tf32(enabled: bool, scope: ExitStack) -> None:
    """Set whether fp32 products and convolutions may round inputs to 10 bits of mantissa.

    The newer `fp32_precision` is not used: after it torch refuses to read these flags, which
    its compiler reads.
    """
    # The precision has three values and the flag two, so the precision is restored.
    scope.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    torch.backends.cuda.matmul.allow_tf32 = enabled
    _switch(torch.backends.cudnn, "allow_tf32", enabled, scope)


def set_memory_fraction(fraction: float, where: torch.device, scope: ExitStack) -> None:
    """Limit torch's allocator to a share of device memory; beyond it allocations fail."""
    if where.type == "cuda":
        before = torch.cuda.get_per_process_memory_fraction(where)
        scope.callback(torch.cuda.set_per_process_memory_fraction, before, where)
        torch.cuda.set_per_process_memory_fraction(fraction, where)
    else:  # Metal has no getter; 1.7 is torch's default
        scope.callback(torch.mps.set_per_process_memory_fraction, 1.7)
        torch.mps.set_per_process_memory_fraction(fraction)


def _switch(owner: Any, name: str, value: bool, scope: ExitStack) -> None:
    scope.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
