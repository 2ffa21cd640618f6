"""Sanitised outputs: finite and within limits, with counts of the changes.

Training and validation never use this: a loss must see the model's raw output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from runner.core.errors import UsageError
from runner.core.interfaces.nested import describe, tensors, tree_map

CAUSES = ("nan", "inf", "limited")
CAUSE_NAMES = ("NaN", "Inf", "beyond their limits")


@dataclass(frozen=True)
class Changes:
    """Counts of values that were NaN, ±Inf, or beyond a limit: int64 [3], until `read`."""

    counts: Tensor | None = None  # None: no changes

    def __add__(self, other: Changes) -> Changes:
        if self.counts is None or other.counts is None:
            return other if self.counts is None else self
        return Changes(self.counts + other.counts.to(self.counts.device, non_blocking=True))

    def read(self) -> dict[str, int]:
        """Return the counts by name: nan, inf, limited; a host sync."""
        counts = [0] * len(CAUSES) if self.counts is None else self.counts.tolist()
        return dict(zip(CAUSES, counts, strict=True))


def sanitise(
    output: Any,
    *,
    nan: float = 0.0,
    inf: float | None = None,
    low: float | None = None,
    high: float | None = None,
) -> tuple[Any, Changes]:
    """Return the sanitised output (a tensor, or tensors in dicts, tuples, lists) and the changes.

    NaN becomes `nan`, and ±Inf becomes ±`inf`, by default the largest number of the dtype. Values
    are clamped to `low` and `high`. Other values are unchanged bit for bit.

    Takes no host sync. Raises UsageError for contradictory limits, for an output without a tensor,
    and for tensors that are not dense and real.
    """
    options: dict[str, Any] = {"nan": nan, "inf": inf, "low": low, "high": high}
    for name, value in options.items():
        is_default = value is None and name != "nan"
        if not is_default and not (isinstance(value, Real) and math.isfinite(value)):
            raise UsageError(f"sanitise: {name} must be a finite number, got {value!r}")
    if inf is not None and inf <= 0:
        raise UsageError(f"sanitise: inf must be > 0, got {inf}")
    if low is not None and high is not None and low > high:
        raise UsageError(f"sanitise: low must be at most high, got {low} > {high}")
    if not tensors(output):
        problem = f"must be a tensor, or tensors in dicts, tuples or lists, got {describe(output)}"
        raise UsageError(f"sanitise: output {problem}")
    total = Changes()

    def sanitise_leaf(value: Tensor) -> Tensor:
        nonlocal total
        dense = value.layout is torch.strided and not (value.is_nested or value.is_quantized)
        if not dense or value.is_complex():
            fix = "to_dense(), dequantize(), list(output.unbind()) or torch.view_as_real(output)"
            raise UsageError(f"sanitise: an output is not dense and real; give its {fix}")
        if not value.is_floating_point():
            return value
        value, changes = _sanitise_tensor(value, nan, inf, low, high)
        total = total + changes
        return value

    return tree_map(output, sanitise_leaf), total


def describe_changes(changes: Mapping[str, int]) -> str:
    """Return a text such as `2 NaN, 1 beyond their limits`; empty without changes."""
    names = zip(CAUSES, CAUSE_NAMES, strict=True)
    return ", ".join(f"{changes[name]:,} {cause}" for name, cause in names if changes.get(name))


def _sanitise_tensor(
    x: Tensor, nan: float, inf: float | None, low: float | None, high: float | None
) -> tuple[Tensor, Changes]:
    wide = x.float() if x.element_size() < 4 else x  # as not all kernels take narrow dtypes
    largest = torch.finfo(x.dtype).max
    # a value beyond the dtype's range would become Inf again
    nan = min(max(nan, -largest), largest)
    clean = torch.nan_to_num(wide, nan, inf := min(inf or largest, largest), -inf)
    if low is not None or high is not None:
        limited = clean.clamp(low, high)
        clean = torch.where(limited == clean, clean, limited)  # keeps -0
    counts = [wide.isnan().sum(), wide.isinf().sum(), ((clean != wide) & wide.isfinite()).sum()]
    return clean.to(x.dtype), Changes(torch.stack(counts))
