"""Nests of dicts, tuples and lists, as models take and return them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def tensors(value: Any) -> list[Tensor]:
    """Every tensor in a nest of dicts, tuples and lists."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in tensors(item)] if isinstance(value, tuple | list) else []


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nest with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    return tuple(mapped(x, change) for x in value) if isinstance(value, tuple | list) else value


def named(value: Any, name: str = "output") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of an output, by its place."""
    if isinstance(value, Tensor):
        yield name, torch.detach(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from named(item, f"{name}.{key}")
    elif isinstance(value, tuple | list):
        names = getattr(value, "_fields", range(len(value)))
        for key, item in zip(names, value, strict=True):
            yield from named(item, f"{name}.{key}")
    elif isinstance(inner := getattr(value, "logits", None), Tensor):
        yield f"{name}.logits", torch.detach(inner)
