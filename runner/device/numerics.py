"""Torch's global switches that decide which kernel computes a result; `scope` undoes each."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import torch

# One of the two sizes with which cuBLAS is deterministic, 24 MiB; the other, ":16:8", is slower.
WORKSPACE = ":4096:8"


def set_deterministic(kind: str, scope: ExitStack) -> None:
    """The same numbers on every run; an operator that has no such kernel raises."""
    scope.callback(
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True)
    # It would write NaN into each new tensor, which takes 8 ms for 4 MB.
    _switch(torch.utils.deterministic, "fill_uninitialized_memory", False, scope)
    if kind == "cuda":
        _switch(torch.backends.cudnn, "deterministic", True, scope)
        if "CUBLAS_WORKSPACE_CONFIG" not in os.environ:  # torch refuses to run without it
            scope.callback(os.environ.pop, "CUBLAS_WORKSPACE_CONFIG", None)
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = WORKSPACE


def set_cudnn_benchmark(enabled: bool, scope: ExitStack) -> None:
    """Try each convolution kernel once per shape and keep the fastest."""
    _switch(torch.backends.cudnn, "benchmark", enabled, scope)


def set_tf32(enabled: bool, scope: ExitStack) -> None:
    """Whether fp32 products and convolutions may round their inputs to 10 bits of mantissa.

    Not by the newer `fp32_precision`: once that is used, torch refuses to read these flags,
    and its own compiler reads them.
    """
    # The level has three values where the flag has two, so it is the level that is restored.
    scope.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    torch.backends.cuda.matmul.allow_tf32 = enabled
    _switch(torch.backends.cudnn, "allow_tf32", enabled, scope)


def set_memory_fraction(fraction: float, where: torch.device, scope: ExitStack) -> None:
    """Let torch's allocator take no more than this share; beyond it, it raises out of memory."""
    if where.type == "cuda":
        before = torch.cuda.get_per_process_memory_fraction(where)
        scope.callback(torch.cuda.set_per_process_memory_fraction, before, where)
        torch.cuda.set_per_process_memory_fraction(fraction, where)
    else:  # Metal does not tell what is set; 1.7 is torch's default
        scope.callback(torch.mps.set_per_process_memory_fraction, 1.7)
        torch.mps.set_per_process_memory_fraction(fraction)


def _switch(owner: Any, name: str, value: bool, scope: ExitStack) -> None:
    scope.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
