"""Outputs for people and programs: finite, in range, shares that sum to one; changes are counted.

Training and validation never see this: a loss must show what a model really puts out.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.errors import UsageError

COUNTED = ("nan", "inf", "limited", "rescaled")
WORDS = ("NaN", "Inf", "beyond their limits", "rows that did not sum to one")


class OutputKind(Enum):
    """What numbers stand for, and so what may be made of them."""

    values = "values"  # anything: NaN and Inf become numbers
    logits = "logits"  # the same; -Inf, with which a class is masked, is the least number
    probabilities = "probabilities"  # shares from 0 to 1 that sum to one
    quantities = "quantities"  # regression: within stated limits
    classes = "classes"  # whole numbers from 0, or between stated limits


NESTS = (OutputKind.values, OutputKind.logits)  # kinds that outputs of several tensors may have


@dataclass(frozen=True)
class Changes:
    """How many values were changed, and why: on the device until they are read.

    `counts` is int64 [4]: values that were NaN; that were ±Inf; finite ones that were beyond a
    limit (or no whole number); rows of probabilities that were made to sum to one.
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
    classes: int | None = None,
    dim: int | None = -1,
) -> tuple[Any, Changes]:
    """The output with nothing in it that a consumer could choke on, and what was changed.

    `values` and `logits` may be dicts, tuples, lists and dataclasses of tensors and NumPy arrays.
    NaN becomes `nan`, and ±Inf becomes ±`inf`, by default the largest number of the type.
    `quantities` are kept from `low` to `high`, NaN being `nan` within these. `classes` are whole
    numbers (in their own type) from `low` to `high`, or below `classes`; NaN is the least.
    `probabilities` are kept from 0 to 1, and each row along `dim` is divided by its sum where that
    is not one within the rounding of its type; a row of nothing becomes equal shares, and with
    `dim=None` each value is a probability by itself. What is in order comes back bit for bit.

    Queues work on the device and waits for nothing. Raises UsageError for arguments that
    contradict each other, tensors that are not dense, and containers that cannot be rebuilt.
    """
    clean = _cleaner(kind, nan, inf, low, high, classes, dim)
    total = Changes()

    def change(value: Any) -> Any:
        nonlocal total
        if isinstance(value, np.ndarray):
            return _change_array(value, change)
        if not isinstance(value, Tensor):
            return _rebuild(value, change)
        dense = value.layout is torch.strided and not (value.is_nested or value.is_quantized)
        if not dense:
            raise UsageError(
                "sanitise: an output is not dense; give output.to_dense(), output.dequantize() "
                "or list(output.unbind())"
            )
        value, changes = clean(value)
        total = total + changes
        return value

    if not isinstance(output, Tensor | np.ndarray) and OutputKind(kind) not in NESTS:
        raise UsageError(f"sanitise: kind={OutputKind(kind).value} is for one tensor")
    return change(output), total


def described(changes: Mapping[str, int]) -> str:
    """In words, such as `2 NaN, 1 beyond its limits`; empty where nothing was changed."""
    words = zip(COUNTED, WORDS, strict=True)
    return ", ".join(f"{changes[name]:,} {word}" for name, word in words if changes.get(name))


def counts_of(value: Any, name: str = "output") -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each tensor of floats in a nest: its name, itself, and int64 [2] of NaN and of ±Inf."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield name, value, torch.stack([value.isnan().sum(), value.isinf().sum()])
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from counts_of(item, f"{name}[{i}]")
    else:
        plain = is_dataclass(value) and not isinstance(value, type)
        items = value if isinstance(value, Mapping) else vars(value) if plain else {}
        for key, item in items.items():
            yield from counts_of(item, f"{name}.{key}")


class Watched:
    """A model's forward whose outputs are counted, and passed on as they are."""

    def __init__(self, forward: Callable[..., Any], order: Callable[[Any], Changes]) -> None:
        self.forward, self.order = forward, order
        self.changes = Changes()

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """What the forward puts out."""
        output = self.forward(*inputs, **named)
        self.changes = self.changes + self.order(output)
        return output


def _cleaner(
    kind: str | OutputKind,
    nan: float,
    inf: float | None,
    low: float | None,
    high: float | None,
    classes: int | None,
    dim: int | None,
) -> Callable[[Tensor], tuple[Tensor, Changes]]:
    """What cleans one tensor. Raises UsageError for arguments that contradict each other."""
    try:
        kind = OutputKind(kind)
    except ValueError:
        known = ", ".join(k.value for k in OutputKind)
        raise UsageError(f"sanitise: kind must be one of {known}, got {kind!r}") from None
    for name, value in (("nan", nan), ("inf", inf), ("low", low), ("high", high)):
        if value is not None and not math.isfinite(value):
            raise UsageError(f"sanitise: {name} must be a finite number, got {value}")
    if kind is OutputKind.probabilities:
        return partial(_probabilities, dim=dim)
    if kind is OutputKind.classes:
        low = 0.0 if low is None else low
        bounds = [x for x in (high, None if classes is None else classes - 1) if x is not None]
        high = min(bounds, default=-math.inf)
    elif kind is OutputKind.values or kind is OutputKind.logits:
        if low is not None or high is not None:
            raise UsageError("sanitise: low and high are for kind=quantities and classes")
    if low is not None and high is not None and low > high:
        raise UsageError(f"sanitise: low must be at most high (or classes - 1), got {low} > {high}")
    if inf is not None and inf <= 0:
        raise UsageError(f"sanitise: inf must be > 0, got {inf}")
    whole = kind is OutputKind.classes
    return partial(_numbers, nan=nan, inf=inf, low=low, high=high, whole=whole)


def _numbers(
    x: Tensor, nan: float, inf: float | None, low: float | None, high: float | None, whole: bool
) -> tuple[Tensor, Changes]:
    """Finite, and within the limits where there are some."""
    if x.is_complex():
        pairs = torch.view_as_real(x.resolve_conj())
        clean, changes = _numbers(pairs, nan, inf, low, high, whole)
        return torch.view_as_complex(clean), changes
    limited = low is not None or high is not None
    if x.dtype is torch.bool or not (limited or x.is_floating_point()):
        return x, Changes()
    if not x.is_floating_point():
        kind = torch.iinfo(x.dtype)
        least = kind.min if low is None else max(kind.min, math.ceil(low))
        clean = x.clamp(least, kind.max if high is None else min(kind.max, math.floor(high)))
        return clean, _changes(x, limited=(clean != x).sum())
    wide, largest = _wide(x), torch.finfo(x.dtype).max
    # a number that the type does not hold would be Inf again
    nan = min(max(nan, -largest), largest)
    clean = torch.nan_to_num(wide, nan, inf := min(inf or largest, largest), -inf)
    clean = clean.round() if whole else clean
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


def _rebuild(value: Any, change: Callable[[Any], Any]) -> Any:
    """A container of the same kind, of changed items; other values come back themselves."""
    if isinstance(value, dict):
        rebuilt = copy.copy(value)  # a defaultdict keeps its default
        for key, item in value.items():
            rebuilt[key] = change(item)
        return rebuilt
    if isinstance(value, tuple | list):
        items = [change(item) for item in value]
        named = isinstance(value, tuple) and hasattr(value, "_fields")  # a namedtuple
        return type(value)(*items) if named else type(value)(items)
    if is_dataclass(value) and not isinstance(value, type):
        clone = copy.copy(value)
        for one in fields(value):
            object.__setattr__(clone, one.name, change(getattr(value, one.name)))  # frozen or not
        return clone
    held: Iterable[Any] = getattr(value, "__dict__", {}).values()
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Iterator):
        held = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, Iterator) or any(isinstance(x, Tensor | np.ndarray) for x in held):
        raise UsageError(
            f"sanitise: a {type(value).__name__} cannot be rebuilt; "
            "give its tensors in a dict, tuple, list or dataclass"
        )
    return value


def _change_array(array: np.ndarray, change: Callable[[Any], Any]) -> np.ndarray:
    """A new array of changed numbers; texts, times and numbers in order come back themselves."""
    if array.dtype.kind in "SUMm":
        return array
    try:
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError("masked values have no number")
        tensor = torch.from_numpy(np.array(array, order="C"))
    except (TypeError, ValueError) as error:
        raise UsageError(f"sanitise: an array of {array.dtype} is no tensor: {error}") from None
    changed = change(tensor)
    return array if changed is tensor else changed.numpy()
