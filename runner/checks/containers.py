"""What outputs come in: mappings, tuples, lists and dataclasses, made anew of changed items."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


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
    inside = (
        value if isinstance(value, set | frozenset) else getattr(value, "__dict__", {}).values()
    )
    if any(isinstance(item, Tensor) for item in inside):
        raise _opaque(value)
    return value


def _opaque(value: Any) -> TypeError:
    return TypeError(
        f"sanitise: a {type(value).__name__} holds tensors and cannot be made of changed ones; "
        "give them in a tensor, dict, tuple, list or dataclass"
    )
