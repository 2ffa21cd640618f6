"""torch's global switches for kernel selection and precision; `scope` restores each."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import torch

# Makes cuBLAS deterministic with 24 MiB; the alternative, ":16:8", is slower.
CUBLAS_WORKSPACE = ":4096:8"


def set_deterministic(kind: str, scope: ExitStack) -> None:
    """Make results reproducible; an operator without a deterministic kernel raises."""
    scope.callback(
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True)
    # it would fill each new tensor with NaN: 8 ms for 4 MB
    _set_flag(torch.utils.deterministic, "fill_uninitialized_memory", False, scope)
    if kind == "cuda":
        _set_flag(torch.backends.cudnn, "deterministic", True, scope)
        if "CUBLAS_WORKSPACE_CONFIG" not in os.environ:  # torch refuses to run without it
            scope.callback(os.environ.pop, "CUBLAS_WORKSPACE_CONFIG", None)
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = CUBLAS_WORKSPACE


def set_cudnn_benchmark(enabled: bool, scope: ExitStack) -> None:
    """Set whether cuDNN times its convolution kernels once per shape and uses the fastest."""
    _set_flag(torch.backends.cudnn, "benchmark", enabled, scope)


def set_tf32(enabled: bool, scope: ExitStack) -> None:
    """Set whether fp32 products and convolutions may round inputs to 10 mantissa bits.

    The newer `fp32_precision` is not used: after it torch refuses to read these flags, which its
    own compiler reads.
    """
    # the level is restored, since it has three values and the flag only two
    scope.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    torch.backends.cuda.matmul.allow_tf32 = enabled
    _set_flag(torch.backends.cudnn, "allow_tf32", enabled, scope)


def set_memory_fraction(fraction: float, device: torch.device, scope: ExitStack) -> None:
    """Limit torch's allocator to this share of memory; beyond it, it raises out of memory."""
    if device.type == "cuda":
        before = torch.cuda.get_per_process_memory_fraction(device)
        scope.callback(torch.cuda.set_per_process_memory_fraction, before, device)
        torch.cuda.set_per_process_memory_fraction(fraction, device)
    else:  # the current value is unknown; 1.7 is torch's default
        scope.callback(torch.mps.set_per_process_memory_fraction, 1.7)
        torch.mps.set_per_process_memory_fraction(fraction)


def _set_flag(owner: Any, name: str, value: bool, scope: ExitStack) -> None:
    scope.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
