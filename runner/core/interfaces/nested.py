"""Nested dicts, tuples and lists of tensors, and the logits in a model's output."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

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


def out_of_range(indices: Any, limit: int) -> bool:
    """Whether any index is below 0 or not below `limit`. 2 µs; a host sync on a GPU."""
    if not isinstance(indices, Tensor) or not indices.numel():
        return False
    if indices.is_floating_point() or indices.is_complex() or indices.dtype is torch.bool:
        return False
    low, high = indices.aminmax()
    return bool(low.item() < 0 or high.item() >= limit)


@dataclass(frozen=True)
class DeferredLogits:
    """Deferred product of an output layer: hidden [..., width], weight [vocab, width]."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    chunk: int  # tokens at a time

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits."""
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))

    def compute(self) -> Tensor:
        """Compute the logits, [..., vocab]."""
        return F.linear(self.hidden, self.weight, self.bias)


def find_logits(output: Any) -> Any:
    """Return the logits of an output: itself, its `logits`, or the first of a tuple."""
    if isinstance(output, Tensor | DeferredLogits):
        return output
    if isinstance(output, dict):
        return output.get("logits")
    # a named tuple may have `logits` anywhere, a plain one has them first
    first = output[0] if isinstance(output, tuple | list) and output else None
    return getattr(output, "logits", first)
