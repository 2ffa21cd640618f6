"""Containers that outputs come in, rebuilt from changed items, and the numbers a dtype holds."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set, ValuesView
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.errors import UsageError

WHO = "sanitise"


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """A container of the same kind, of changed items; what is no container comes back itself."""
    if isinstance(value, dict):
        made = {} if type(value) is dict else copy.copy(value)  # a defaultdict keeps its default
        for key, item in value.items():
            made[key] = change(item)
        return made
    if isinstance(value, Mapping):
        items = {key: change(item) for key, item in value.items()}
        try:
            built: Any = type(value)(items)  # type: ignore[call-arg]
            if list(built) == list(items):
                return built
        except TypeError:
            pass
        raise _opaque(value)
    if isinstance(value, tuple | list):
        parts = [change(item) for item in value]
        named = isinstance(value, tuple) and hasattr(value, "_fields")  # a namedtuple
        return type(value)(*parts) if named else type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        clone = copy.copy(value)
        for one in fields(value):
            object.__setattr__(clone, one.name, change(getattr(value, one.name)))  # frozen or not
        return clone
    if isinstance(value, Iterator):
        kind = type(value).__name__
        raise UsageError(f"{WHO}: a {kind} would be used up by a look at it; give a list of it")
    plain = isinstance(value, Set | ValuesView | deque)
    inside = value if plain else getattr(value, "__dict__", {}).values()
    if any(isinstance(item, Tensor | np.ndarray) for item in inside):
        raise _opaque(value)
    return value


def as_array(change: Callable[[Any], Any], array: np.ndarray) -> np.ndarray:
    """A new array of changed numbers; one of texts, times or numbers in order comes back itself."""
    if array.dtype.kind in "SUMm":
        return array
    try:
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError("what is masked has no value")
        tensor = torch.from_numpy(np.array(array, order="C"))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{WHO}: an array of {array.dtype} is no tensor ({error}); give numbers such as float32"
        ) from None
    changed = change(tensor)
    return array if changed is tensor else changed.numpy()


def _opaque(value: Any) -> TypeError:
    return TypeError(
        f"{WHO}: a {type(value).__name__} holds tensors and cannot be made of changed ones; "
        "give them in a tensor, dict, tuple, list or dataclass"
    )


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
