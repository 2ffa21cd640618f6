"""Outputs for people and programs: finite, in range, shares that sum to one; changes are counted.

Training and validation never see this: a loss must show what a model really puts out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.checks.containers import WHO, as_array, check_dense, inside, rebuilt, wide_of
from runner.errors import UsageError

COUNTED = ("nan", "inf", "limited", "rescaled")


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

    counts: Tensor | None = None  # None: none

    def __add__(self, other: Changes) -> Changes:
        if self.counts is None or other.counts is None:
            return other if self.counts is None else self
        return Changes(self.counts + other.counts.to(self.counts.device, non_blocking=True))

    def __repr__(self) -> str:
        """The counts by name. The host waits for the device."""
        return f"Changes({', '.join(f'{name}={count}' for name, count in self.read().items())})"

    def read(self) -> dict[str, int]:
        """The counts by name: nan, inf, limited, rescaled. The host waits for the device."""
        found = [0] * len(COUNTED) if self.counts is None else self.counts.tolist()
        return dict(zip(COUNTED, found, strict=True))


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

    `values` and `logits` may be nests of tensors: mappings, tuples, lists and dataclasses. Of these
    every tensor of floats is looked at, and every NumPy array, which comes back as one.
    NaN becomes `nan`, and ±Inf becomes ±`inf`, by default the largest number of the type.
    `quantities` are kept from `low` to `high`, NaN being `nan` within these. `classes` are whole
    numbers (in their own type) from `low` to `high`, or below `classes`; NaN is the least. Where a
    type does not hold a limit, the next number inside of it that the type does hold is the limit.
    `probabilities` are kept from 0 to 1, and each row along `dim` is divided by its sum where that
    is not one within the rounding of its type; a row of nothing becomes equal shares, and with
    `dim=None` each value is a probability by itself. What is in order comes back bit for bit.

    Queues work on the device and waits for nothing. Raises UsageError for what cannot be meant, for
    sparse, nested and quantized tensors, iterators (they would be used up) and what holds itself,
    and TypeError for an object with tensors in it that cannot be made anew.
    """
    kind = _known(kind)
    _check(kind, nan, inf, low, high, classes)
    changes = Changes()
    within: set[int] = set()  # containers that are being rebuilt

    def change(value: Any) -> Any:
        nonlocal changes
        if isinstance(value, np.ndarray):
            return as_array(change, value)
        if isinstance(value, Tensor):
            clean, found = _cleaned(value, kind, nan, inf, low, high, classes, dim)
            changes = changes + found
            return clean
        if id(value) in within:
            raise UsageError(f"{WHO}: the output has a {type(value).__name__} that holds itself")
        within.add(id(value))
        made = rebuilt(value, change)
        within.discard(id(value))
        return made

    if not isinstance(output, Tensor | np.ndarray) and kind not in NESTS:
        raise UsageError(
            f"{WHO}: kind={kind.value} is for one tensor, and the output is a "
            f"{type(output).__name__}; name the tensor in it"
        )
    clean = change(output)
    return clean, changes


def _cleaned(
    x: Tensor,
    kind: OutputKind,
    nan: float,
    inf: float | None,
    low: float | None,
    high: float | None,
    classes: int | None,
    dim: int | None,
) -> tuple[Tensor, Changes]:
    if kind not in NESTS or x.is_floating_point() or x.is_complex():
        check_dense(x)
    if kind is OutputKind.probabilities:
        return _probabilities(x, dim)
    if kind is OutputKind.classes:
        return _classes(x, low or 0.0, _highest(high, classes))
    return _numbers(x, nan, inf, low, high)


def counts_of(value: Any, name: str = "output") -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each tensor of floats in a nest: its name, itself, and int64 [2] of NaN and of ±Inf."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            check_dense(value)
            yield name, value, torch.stack([value.isnan().sum(), value.isinf().sum()])
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from counts_of(item, f"{name}.{key}")
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from counts_of(item, f"{name}[{i}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from counts_of(getattr(value, one.name), f"{name}.{one.name}")


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


def described(changes: Mapping[str, int]) -> str:
    """In words, such as `2 NaN, 1 beyond its limits`; empty where nothing was changed."""
    words = {
        "nan": "NaN",
        "inf": "Inf",
        "limited": "beyond their limits",
        "rescaled": "rows that did not sum to one",
    }
    return ", ".join(f"{changes[name]:,} {words[name]}" for name in COUNTED if changes.get(name))


def _known(kind: str | OutputKind) -> OutputKind:
    try:
        return OutputKind(kind)
    except ValueError:
        known = ", ".join(k.value for k in OutputKind)
        raise UsageError(f"{WHO}: no kind {kind!r}; one of {known}") from None


def _check(
    kind: OutputKind,
    nan: float,
    inf: float | None,
    low: float | None,
    high: float | None,
    classes: int | None,
) -> None:
    for name, value in (("nan", nan), ("inf", inf), ("low", low), ("high", high)):
        if value is not None and not math.isfinite(value):
            raise UsageError(f"{WHO}: {name}={value} is no number that could stand for another")
    if inf is not None and inf <= 0:
        raise UsageError(f"{WHO}: inf={inf} is not above 0")
    limited = kind in (OutputKind.quantities, OutputKind.classes)
    if (low is not None or high is not None) and not limited:
        raise UsageError(f"{WHO}: low and high are for kind=quantities and classes")
    if low is not None and high is not None and low > high:
        raise UsageError(f"{WHO}: low={low} is above high={high}")
    if kind is OutputKind.classes and classes is None and high is None:
        raise UsageError(f"{WHO}: kind=classes needs to know how many there are: classes=N")
    if kind is OutputKind.classes and _highest(high, classes) < (low or 0.0):
        limits = f"low={low or 0.0:g}, high={high}, classes={classes}"
        raise UsageError(f"{WHO}: kind=classes has no class within {limits}")


def _highest(high: float | None, classes: int | None) -> float:
    if classes is not None:
        return classes - 1 if high is None else min(high, classes - 1)
    return -math.inf if high is None else high


def _numbers(
    x: Tensor, nan: float, inf: float | None, low: float | None, high: float | None
) -> tuple[Tensor, Changes]:
    """Finite, and within the limits where there are some."""
    if x.is_complex():
        clean, changes = _numbers(torch.view_as_real(x.resolve_conj()), nan, inf, low, high)
        return torch.view_as_complex(clean), changes
    if not x.is_floating_point():
        if low is None and high is None or x.dtype is torch.bool:
            return x, Changes()
        return _whole(x, -math.inf if low is None else low, math.inf if high is None else high)
    wide, largest = wide_of(x), torch.finfo(x.dtype).max
    # a number that the type does not hold would be Inf again
    nan = min(max(nan, -largest), largest)
    inf = largest if inf is None else min(inf, largest)
    clean = torch.nan_to_num(wide, nan, inf, -inf)
    if low is not None or high is not None:
        kept = clean.clamp(*inside(x.dtype, low, high))
        clean = torch.where(kept == clean, clean, kept)  # -0 is in order
    return clean.to(x.dtype), _changes(wide, limited=((clean != wide) & wide.isfinite()).sum())


def _probabilities(x: Tensor, dim: int | None) -> tuple[Tensor, Changes]:
    if not x.is_floating_point():
        raise UsageError(f"{WHO}: probabilities are floats, not {x.dtype}")
    if dim is not None and x.ndim and not -x.ndim <= dim < x.ndim:
        raise UsageError(f"{WHO}: dim={dim}, and the output has {x.ndim} dimensions")
    wide = wide_of(x)
    limited = torch.nan_to_num(wide, 0.0, 1.0, 0.0).clamp(0.0, 1.0)
    limited = torch.where(limited == wide, wide, limited)  # -0 is in order
    beyond = ((limited != wide) & wide.isfinite()).sum()
    if dim is None or not x.ndim:
        return limited.to(x.dtype), _changes(wide, limited=beyond)
    many = x.shape[dim]
    if not many:
        return x, Changes()
    total = limited.sum(dim, keepdim=True)
    # Each share is rounded by a part of itself, or by a step of the least numbers that there are;
    # so is their sum, by more the more there are.
    own, sums = torch.finfo(x.dtype), torch.finfo(wide.dtype)
    least = many * own.smallest_normal * own.eps
    off = (total - 1).abs() > 2 * own.eps + min(own.eps, least) + math.sqrt(many) * sums.eps
    shares = torch.where(total > 0, limited / total, 1.0 / many)
    clean = torch.where(off, shares, limited)
    return clean.to(x.dtype), _changes(wide, limited=beyond, rescaled=off.sum())


def _classes(x: Tensor, low: float, high: float) -> tuple[Tensor, Changes]:
    if x.is_complex():
        raise UsageError(f"{WHO}: classes are whole numbers, not {x.dtype}")
    if x.dtype is torch.bool:
        return x, Changes()
    if not x.is_floating_point():
        return _whole(x, low, high)
    wide = wide_of(x)
    least, most = inside(x.dtype, math.ceil(low), math.floor(high))
    clean = torch.nan_to_num(wide, least, most, least).round().clamp(least, most)
    return clean.to(x.dtype), _changes(wide, limited=((clean != wide) & wide.isfinite()).sum())


def _whole(x: Tensor, low: float, high: float) -> tuple[Tensor, Changes]:
    """Whole numbers within limits, and within what their type holds."""
    kind = torch.iinfo(x.dtype)
    least = max(kind.min, math.ceil(low)) if low > -math.inf else kind.min
    most = min(kind.max, math.floor(high)) if high < math.inf else kind.max
    if least > most:
        raise UsageError(f"{WHO}: {x.dtype} holds no number from {low} to {high}")
    if x.dtype is torch.uint64:  # in order as signed ones, that much lower
        shift = torch.iinfo(torch.int64).min
        signed = x.view(torch.int64) ^ shift
        clean = signed.clamp(least + shift, most + shift)
        return (clean ^ shift).view(x.dtype), _changes(x, limited=(clean != signed).sum())
    wide = x.long() if x.dtype in (torch.uint16, torch.uint32) else x
    clean = wide.clamp(least, most)
    return clean.to(x.dtype), _changes(x, limited=(clean != wide).sum())


def _changes(x: Tensor, limited: Tensor, rescaled: Tensor | None = None) -> Changes:
    none = limited.new_zeros(())
    nan, inf = (x.isnan().sum(), x.isinf().sum()) if x.is_floating_point() else (none, none)
    return Changes(torch.stack([nan, inf, limited, none if rescaled is None else rescaled]))
