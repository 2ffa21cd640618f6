"""What outputs come in: mappings, tuples, lists and dataclasses, made anew of changed items."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set, ValuesView
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.checks.held import WHO
from runner.errors import UsageError


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
