"""Traversal of nested dicts, tuples and lists of tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from runner.core.format import join_names


def tensors(value: Any) -> list[Tensor]:
    """Return every tensor in the nest."""
    return [tensor for _, tensor in named_leaves(value)]


def named_leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) pairs; with `path="output"` paths are `output.key`, `output[1]`."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from named_leaves(item, f"{path}.{key}" if path else str(key))
    elif hasattr(value, "_fields"):  # a namedtuple
        yield from named_leaves(value._asdict(), path)
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from named_leaves(item, f"{path}[{i}]" if path else str(i))


def tree_map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return the nest with `function` applied to every tensor; other leaves are kept."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        items = {key: tree_map(item, function) for key, item in value.items()}
        if isinstance(value, defaultdict):
            return defaultdict(value.default_factory, items)
        return items if type(value) is dict else type(value)(items)
    if isinstance(value, tuple | list):
        parts = [tree_map(item, function) for item in value]
        is_namedtuple = isinstance(value, tuple) and hasattr(value, "_fields")  # a namedtuple
        return type(value)(*parts) if is_namedtuple else type(value)(parts)
    return value


def describe(value: Any) -> str:
    """Types and shapes of a nest, for a message."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)}"
    if isinstance(value, dict):
        return "{" + join_names(f"{k}: {describe(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + join_names(map(describe, value)) + ")"
    return f"a {type(value).__name__}"
