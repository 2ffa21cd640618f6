"""Encode a run's state as plain data: tensors and built-in containers."""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

TIED = "tied"  # metadata key in safetensors: JSON of names that share another name's tensor

_CONVERSIONS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (Enum, lambda enum: enum.value),
    (PurePath, str),
    *((plain, plain) for plain in (int, float, complex, str, bytes)),  # and their subclasses
    (bytearray, bytes),
    (np.random.Generator, lambda generator: generator.bit_generator.state),
    (np.random.BitGenerator, lambda generator: generator.state),
    ((np.random.RandomState, torch.Generator), lambda generator: generator.get_state()),
    (random.Random, lambda generator: generator.getstate()),
)
"""Conversions towards plain data, by type; the first match applies."""
_PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def encode(
    value: Any, path: str = "state", tensor: Callable[[str, Tensor], Tensor] | None = None
) -> Any:
    """Convert a value to tensors and built-in containers, which `read_state` can load.

    Each tensor is passed to `tensor` with its path, and replaced by the result. Arrays become
    tensors, random generators their state, dataclasses dicts, enums their value, paths strings.
    Raises TypeError with the path of anything else.
    """
    return _encode(value, path, (), tensor or (lambda _, plain: plain))


def _encode(
    value: Any, path: str, parents: tuple[int, ...], convert_tensor: Callable[[str, Tensor], Tensor]
) -> Any:
    if type(value) in _PLAIN_TYPES:
        return value
    if isinstance(value, Tensor):
        return convert_tensor(path, _detach(value, path))
    if isinstance(value, np.ndarray):
        return convert_tensor(path, _from_numpy(value, path))
    if id(value) in parents:
        raise TypeError(f"{path} contains itself, which a checkpoint cannot store")
    parents = (*parents, id(value))
    if (converted := _simplify(value)) is not value:
        return _encode(converted, path, parents, convert_tensor)
    if isinstance(value, Mapping):
        pairs = [(_encode_key(key, path), item) for key, item in value.items()]
        if len(dict(pairs)) != len(pairs):
            raise TypeError(f"{path} has two keys with the same name in a checkpoint")
        rest = parents, convert_tensor
        return {k: _encode(item, _child_path(path, k), *rest) for k, item in pairs}
    if isinstance(value, list | tuple | deque):
        items = [_encode(x, f"{path}[{i}]", parents, convert_tensor) for i, x in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, set | frozenset):
        return {_encode_key(item, path) for item in value}
    problem = f"{path} is a {type(value).__module__}.{type(value).__qualname__}"
    fix = "use numbers, text, tensors, or lists and dicts of them"
    raise TypeError(f"{problem}, which a checkpoint cannot hold; {fix}")


def _simplify(value: Any) -> Any:
    """Apply one conversion; returns the value itself if none applies."""
    if isinstance(value, np.generic):
        item = value.item()  # of longdouble, which has no Python equivalent, itself
        return value if isinstance(item, np.generic) else item
    for kind, convert in _CONVERSIONS:
        if isinstance(value, kind):
            return convert(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value


def _child_path(path: str, key: Any) -> str:
    return f"{path}.{key}" if type(key) is str and key.isidentifier() else f"{path}[{key!r}]"


def _encode_key(key: Any, path: str) -> Any:
    if isinstance(key, tuple):
        return tuple(_encode_key(part, path) for part in key)
    if type(key) in _PLAIN_TYPES:
        return key
    if (converted := _simplify(key)) is not key:
        return _encode_key(converted, path)
    raise TypeError(f"{path} has the key {key!r}, a {type(key).__name__}; use text or numbers")


def _detach(value: Tensor, path: str) -> Tensor:
    problem = "lies on the meta device" if value.is_meta else ""
    problem = problem or ("is quantised" if value.is_quantized else "is nested" * value.is_nested)
    if not problem:
        try:
            detached = value.detach()
            problem = "" if type(detached) is Tensor else f"is a {type(detached).__qualname__}"
        except ValueError:
            problem = "is a lazy parameter without a shape: run one batch through the model first"
    if problem:
        raise TypeError(f"{path} {problem}; a checkpoint can hold plain tensors only")
    return detached


def _from_numpy(value: np.ndarray, path: str) -> Tensor:
    try:  # a copy in native byte order and C order
        return torch.from_numpy(value.astype(value.dtype.newbyteorder("="), "C"))
    except TypeError:
        problem = f"{path} is an array of {value.dtype}, which a checkpoint cannot hold"
        raise TypeError(f"{problem}; use .tolist()") from None
