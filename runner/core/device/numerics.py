"""torch's global switches for kernel selection and precision; `scope` restores each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

# Makes cuBLAS deterministic with 24 MiB; the alternative, ":16:8", is slower.
CUBLAS_WORKSPACE = ":4096:8"
_BACKENDS: Any = torch.backends  # its stubs lack parts of these modules
FP32_SWITCHES: dict[str, Any] = {
    "cuda.matmul": _BACKENDS.cuda.matmul,
    "cudnn.conv": _BACKENDS.cudnn.conv,
    "cudnn.rnn": _BACKENDS.cudnn.rnn,
    "mkldnn.matmul": _BACKENDS.mkldnn.matmul,
    "mkldnn.conv": _BACKENDS.mkldnn.conv,
    "mkldnn.rnn": _BACKENDS.mkldnn.rnn,
}
"""Owners of an `fp32_precision`: ieee, tf32 or bf16; none if unset, which computes as ieee."""
GPU_SWITCHES = ("cuda.matmul", "cudnn.conv", "cudnn.rnn")


def set_deterministic(kind: str, scope: ExitStack) -> None:
    """Make results reproducible; an operator without a deterministic kernel raises."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    scope.callback(torch.use_deterministic_algorithms, before, warn_only=warns)
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
    """Set whether fp32 products and convolutions of a GPU may round inputs to 10 mantissa bits."""
    set_fp32_precision(dict.fromkeys(GPU_SWITCHES, "tf32" if enabled else "ieee"), scope)


def read_fp32_precision() -> dict[str, str]:
    """Return each of FP32_SWITCHES as it applies now. Reading them never raises.

    The older flags (`allow_tf32`, `get_float32_matmul_precision`) raise after any code of the
    process has set an `fp32_precision` that they cannot express.
    """
    return {name: switch.fp32_precision for name, switch in FP32_SWITCHES.items()}


def set_fp32_precision(values: Mapping[str, str], scope: ExitStack) -> None:
    """Set some of FP32_SWITCHES; `scope` restores all."""
    before = read_fp32_precision()
    scope.callback(_write_fp32_precision, before)
    _write_fp32_precision(before | dict(values))


def _write_fp32_precision(values: Mapping[str, str]) -> None:
    """Write the older flags, too: torch's compiler reads them, and raises where they differ."""
    level = "medium" if values["mkldnn.matmul"] == "bf16" else "high"
    uses_tf32 = values["cuda.matmul"] == "tf32"
    torch.set_float32_matmul_precision(level if uses_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = values["cudnn.conv"] == values["cudnn.rnn"] == "tf32"
    for name, switch in FP32_SWITCHES.items():
        switch.fp32_precision = "none"  # follows `torch.backends.fp32_precision`, if that is set
        if switch.fp32_precision != values[name]:
            switch.fp32_precision = values[name]


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
