"""Outputs for people and programs: finite, and within limits; changes are counted.

Training and validation never use this: a loss must show what a model really puts out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.data.nested import tree_map
from runner.errors import UsageError

COUNTED = ("nan", "inf", "limited")
WORDS = ("NaN", "Inf", "beyond their limits")


@dataclass(frozen=True)
class Changes:
    """How many values were changed, and why: on the device until they are read.

    `counts` is int64 [3]: values that were NaN; that were ±Inf; finite ones beyond a limit.
    """

    counts: Tensor | None = None  # None: no changes

    def __add__(self, other: Changes) -> Changes:
        if self.counts is None or other.counts is None:
            return other if self.counts is None else self
        return Changes(self.counts + other.counts.to(self.counts.device, non_blocking=True))

    def read(self) -> dict[str, int]:
        """The counts by name: nan, inf, limited. The host waits for the device."""
        counts = [0] * len(COUNTED) if self.counts is None else self.counts.tolist()
        return dict(zip(COUNTED, counts, strict=True))


def sanitise(
    output: Any,
    *,
    nan: float = 0.0,
    inf: float | None = None,
    low: float | None = None,
    high: float | None = None,
) -> tuple[Any, Changes]:
    """The output (a tensor, or tensors in dicts, tuples and lists), and what was changed.

    NaN becomes `nan`, and ±Inf becomes ±`inf`, by default the largest number of the type. Values
    are kept from `low` to `high`. What is in order comes back bit for bit.

    Queues work on the device and waits for nothing. Raises UsageError for limits that contradict
    each other, and for tensors that are not dense and real.
    """
    for name, value in (("nan", nan), ("inf", inf), ("low", low), ("high", high)):
        if value is not None and not math.isfinite(value):
            raise UsageError(f"sanitise: {name} must be a finite number, got {value}")
    if inf is not None and inf <= 0:
        raise UsageError(f"sanitise: inf must be > 0, got {inf}")
    if low is not None and high is not None and low > high:
        raise UsageError(f"sanitise: low must be at most high, got {low} > {high}")
    total = Changes()

    def change(value: Tensor) -> Tensor:
        nonlocal total
        dense = value.layout is torch.strided and not (value.is_nested or value.is_quantized)
        if not dense or value.is_complex():
            raise UsageError(
                "sanitise: an output is not dense and real; give output.to_dense(), "
                "output.dequantize(), list(output.unbind()) or torch.view_as_real(output)"
            )
        if not value.is_floating_point():
            return value
        value, changes = _clean(value, nan, inf, low, high)
        total = total + changes
        return value

    return tree_map(output, change), total


def described(changes: Mapping[str, int]) -> str:
    """In words, such as `2 NaN, 1 beyond their limits`; empty where nothing was changed."""
    words = zip(COUNTED, WORDS, strict=True)
    return ", ".join(f"{changes[name]:,} {word}" for name, word in words if changes.get(name))


class Watched:
    """A model's forward whose outputs are counted, and passed on as they are."""

    def __init__(self, forward: Callable[..., Any], order: Callable[[Any], Changes]) -> None:
        self.forward, self.order = forward, order
        self.changes = Changes()

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The output of the forward."""
        output = self.forward(*inputs, **named)
        self.changes = self.changes + self.order(output)
        return output


def _clean(
    x: Tensor, nan: float, inf: float | None, low: float | None, high: float | None
) -> tuple[Tensor, Changes]:
    wide = x.float() if x.element_size() < 4 else x  # a type that all of torch computes in
    largest = torch.finfo(x.dtype).max
    # a number that the type does not hold would be Inf again
    nan = min(max(nan, -largest), largest)
    clean = torch.nan_to_num(wide, nan, inf := min(inf or largest, largest), -inf)
    if low is not None or high is not None:
        limited = clean.clamp(low, high)
        clean = torch.where(limited == clean, clean, limited)  # -0 is in order
    counts = [wide.isnan().sum(), wide.isinf().sum(), ((clean != wide) & wide.isfinite()).sum()]
    return clean.to(x.dtype), Changes(torch.stack(counts))
