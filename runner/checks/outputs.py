"""Outputs for people and programs: finite, in range, shares that sum to one; changes are counted.

Training and validation never use this: a loss must show what a model really puts out.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runner.errors import UsageError

COUNTED = ("nan", "inf", "limited", "rescaled")
WORDS = ("NaN", "Inf", "beyond their limits", "rows that did not sum to one")


class OutputKind(Enum):
    """The meaning of the numbers, from which their valid range follows."""

    values = "values"  # anything: NaN and Inf become numbers
    logits = "logits"  # the same; -Inf, with which a class is masked, is the least number
    probabilities = "probabilities"  # shares from 0 to 1 that sum to one
    quantities = "quantities"  # regression: within stated limits


@dataclass(frozen=True)
class Changes:
    """How many values were changed, and why: on the device until they are read.

    `counts` is int64 [4]: values that were NaN; that were ±Inf; finite ones that were beyond a
    limit; rows of probabilities that were made to sum to one.
    """

    counts: Tensor | None = None  # None: no changes

    def __add__(self, other: Changes) -> Changes:
        if self.counts is None or other.counts is None:
            return other if self.counts is None else self
        return Changes(self.counts + other.counts.to(self.counts.device, non_blocking=True))

    def read(self) -> dict[str, int]:
        """The counts by name: nan, inf, limited, rescaled. The host waits for the device."""
        counts = [0] * len(COUNTED) if self.counts is None else self.counts.tolist()
        return dict(zip(COUNTED, counts, strict=True))


def sanitise(
    output: Any,
    kind: str | OutputKind = "values",
    *,
    nan: float = 0.0,
    inf: float | None = None,
    low: float | None = None,
    high: float | None = None,
    dim: int | None = -1,
) -> tuple[Any, Changes]:
    """The output with every value in order for its kind, and what was changed.

    `values` and `logits` may be dicts, tuples and lists of tensors. NaN becomes `nan`, and ±Inf
    becomes ±`inf`, by default the largest number of the type. `quantities` are kept from `low` to
    `high`, NaN being `nan` within these. `probabilities` are kept from 0 to 1, and each row along
    `dim` is divided by its sum where that is not one within the rounding of its type; a row of
    nothing becomes equal shares, and with `dim=None` each value is a probability by itself. What is
    in order comes back bit for bit.

    Queues work on the device and waits for nothing. Raises UsageError for arguments that
    contradict each other, and for outputs that are no dense tensors.
    """
    clean, total = _cleaner(kind, nan, inf, low, high, dim), Changes()

    def change(value: Tensor) -> Tensor:
        nonlocal total
        dense = value.layout is torch.strided and not (value.is_nested or value.is_quantized)
        if not dense or value.is_complex():
            raise UsageError(
                "sanitise: an output is not dense and real; give output.to_dense(), "
                "output.dequantize(), list(output.unbind()) or torch.view_as_real(output)"
            )
        value, changes = clean(value)
        total = total + changes
        return value

    if not isinstance(output, Tensor) and OutputKind(kind) not in (
        OutputKind.values,
        OutputKind.logits,
    ):
        raise UsageError(f"sanitise: kind={OutputKind(kind).value} is for one tensor")
    return _rebuild(output, change), total


def described(changes: Mapping[str, int]) -> str:
    """In words, such as `2 NaN, 1 beyond its limits`; empty where nothing was changed."""
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


def _cleaner(
    kind: str | OutputKind,
    nan: float,
    inf: float | None,
    low: float | None,
    high: float | None,
    dim: int | None,
) -> Callable[[Tensor], tuple[Tensor, Changes]]:
    """The function for one tensor. Raises UsageError for arguments that contradict each other."""
    known = [k.value for k in OutputKind]
    if kind not in known and not isinstance(kind, OutputKind):
        raise UsageError(f"sanitise: kind must be one of {', '.join(known)}, got {kind!r}")
    kind = OutputKind(kind)
    for name, value in (("nan", nan), ("inf", inf), ("low", low), ("high", high)):
        if value is not None and not math.isfinite(value):
            raise UsageError(f"sanitise: {name} must be a finite number, got {value}")
    if inf is not None and inf <= 0:
        raise UsageError(f"sanitise: inf must be > 0, got {inf}")
    if kind is OutputKind.probabilities:
        return partial(_probabilities, dim=dim)
    if kind is not OutputKind.quantities and (low, high) != (None, None):
        raise UsageError("sanitise: low and high are for kind=quantities")
    if low is not None and high is not None and low > high:
        raise UsageError(f"sanitise: low must be at most high, got {low} > {high}")
    return partial(_numbers, nan=nan, inf=inf, low=low, high=high)


def _numbers(
    x: Tensor, nan: float, inf: float | None, low: float | None, high: float | None
) -> tuple[Tensor, Changes]:
    """Finite, and within the limits where there are some."""
    limited = low is not None or high is not None
    if limited and not x.is_floating_point():
        raise UsageError(f"sanitise: quantities are floats, not {x.dtype}")
    if not x.is_floating_point():
        return x, Changes()
    wide, largest = _wide(x), torch.finfo(x.dtype).max
    # a number that the type does not hold would be Inf again
    nan = min(max(nan, -largest), largest)
    clean = torch.nan_to_num(wide, nan, inf := min(inf or largest, largest), -inf)
    if limited:
        kept = clean.clamp(low, high)
        clean = torch.where(kept == clean, clean, kept)  # -0 is in order
    return clean.to(x.dtype), _changes(wide, limited=((clean != wide) & wide.isfinite()).sum())


def _probabilities(x: Tensor, dim: int | None) -> tuple[Tensor, Changes]:
    if not x.is_floating_point():
        raise UsageError(f"sanitise: probabilities are floats, not {x.dtype}")
    wide = _wide(x)
    limited = torch.nan_to_num(wide, 0.0, 1.0, 0.0).clamp(0.0, 1.0)
    limited = torch.where(limited == wide, wide, limited)  # -0 is in order
    beyond = ((limited != wide) & wide.isfinite()).sum()
    if dim is None or not x.ndim or not x.numel():
        return limited.to(x.dtype), _changes(wide, limited=beyond)
    if not -x.ndim <= dim < x.ndim:
        raise UsageError(f"sanitise: dim={dim}, and the output has {x.ndim} dimensions")
    total, many = limited.sum(dim, keepdim=True), x.shape[dim]
    # each share is rounded by a part of itself or a least step; so is their sum, the more the more
    own, sums = torch.finfo(x.dtype), torch.finfo(wide.dtype)
    least = min(own.eps, many * own.smallest_normal * own.eps)
    off = (total - 1).abs() > 2 * own.eps + least + math.sqrt(many) * sums.eps
    clean = torch.where(off, torch.where(total > 0, limited / total, 1.0 / many), limited)
    return clean.to(x.dtype), _changes(wide, limited=beyond, rescaled=off.sum())


def _wide(x: Tensor) -> Tensor:
    """In a type that all of torch computes in."""
    return x.float() if x.element_size() < 4 else x


def _changes(x: Tensor, limited: Tensor, rescaled: Tensor | None = None) -> Changes:
    none = limited.new_zeros(())
    nan, inf = (x.isnan().sum(), x.isinf().sum()) if x.is_floating_point() else (none, none)
    return Changes(torch.stack([nan, inf, limited, none if rescaled is None else rescaled]))


def _rebuild(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nest of changed tensors; texts and numbers come back themselves."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        rebuilt = copy.copy(value)  # a defaultdict keeps its default
        for key, item in value.items():
            rebuilt[key] = _rebuild(item, change)
        return rebuilt
    if isinstance(value, tuple | list):
        items = [_rebuild(item, change) for item in value]
        named = isinstance(value, tuple) and hasattr(value, "_fields")  # a namedtuple
        return type(value)(*items) if named else type(value)(items)
    if value is None or isinstance(value, str | int | float):
        return value
    name = type(value).__name__
    raise UsageError(f"sanitise: a {name} is no tensor; give tensors in a dict, tuple or list")
