"""Which numbers a type of tensor holds, and which tensors all of torch computes with."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from runner.errors import UsageError

WHO = "sanitise"


def check_dense(x: Tensor) -> None:
    """Raise UsageError for a tensor whose values torch does not change one by one."""
    if x.is_nested:
        raise UsageError(f"{WHO}: the output is a nested tensor; give list(output.unbind())")
    if x.is_quantized:
        raise UsageError(f"{WHO}: the output is a quantized tensor; give output.dequantize()")
    if x.layout is not torch.strided:
        kind = str(x.layout).removeprefix("torch.")
        raise UsageError(f"{WHO}: the output is of layout {kind}; give output.to_dense()")


def wide_of(x: Tensor) -> Tensor:
    """In a type that all of torch computes in, and that holds every number of the tensor's own."""
    if x.dtype is torch.float8_e8m0fnu:
        raise UsageError(f"{WHO}: {x.dtype} holds neither 0 nor Inf; give the numbers it scales")
    return x.float() if x.element_size() < 4 else x


def inside(
    dtype: torch.dtype, low: float | None, high: float | None
) -> tuple[float | None, float | None]:
    """The limits as numbers of that type, from which casting goes no further out."""
    kind = torch.finfo(dtype)

    def nearest(limit: float, whole: Callable[[float], int]) -> float:
        if kind.bits >= 32:
            return min(max(limit, -kind.max), kind.max)  # as torch rounds it when it compares
        normal = max(abs(limit), kind.smallest_normal)
        step = math.ldexp(kind.eps, math.frexp(normal)[1] - 1)
        return whole(limit / step) * step

    least = None if low is None else nearest(low, math.ceil)
    most = None if high is None else nearest(high, math.floor)
    if most is not None:
        most = min(most, kind.max)
    if least is not None:
        least = max(least, -kind.max)
    if (-kind.max if least is None else least) > (kind.max if most is None else most):
        raise UsageError(f"{WHO}: {dtype} holds no number from {low} to {high}")
    return least, most
