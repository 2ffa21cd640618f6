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

_SIMPLER: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
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
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def encode(
    value: Any, place: str = "state", tensor: Callable[[str, Tensor], Tensor] | None = None
) -> Any:
    """Convert a value to tensors and built-in containers, which `read_state` can load.

    Each tensor is passed to `tensor` with its place, and replaced by the result. Arrays become
    tensors, random generators their state, dataclasses dicts, enums their value, paths strings.
    Raises TypeError with the place of anything else.
    """
    return _encode(value, place, (), tensor or (lambda _, bare: bare))


def _encode(
    value: Any, place: str, within: tuple[int, ...], keep: Callable[[str, Tensor], Tensor]
) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return keep(place, _bare(value, place))
    if isinstance(value, np.ndarray):
        return keep(place, _from_numpy(value, place))
    if id(value) in within:
        raise TypeError(f"{place} contains itself, which a checkpoint cannot store")
    within = (*within, id(value))
    if (simpler := _simplify(value)) is not value:
        return _encode(simpler, place, within, keep)
    if isinstance(value, Mapping):
        pairs = [(_key(key, place), item) for key, item in value.items()]
        if len(dict(pairs)) != len(pairs):
            raise TypeError(f"{place} has two keys with the same name in a checkpoint")
        return {key: _encode(item, _inner(place, key), within, keep) for key, item in pairs}
    if isinstance(value, list | tuple | deque):
        items = [_encode(x, f"{place}[{i}]", within, keep) for i, x in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, set | frozenset):
        return {_key(item, place) for item in value}
    raise TypeError(
        f"{place} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
        "cannot hold; use numbers, text, tensors, or lists and dicts of them"
    )


def _simplify(value: Any) -> Any:
    """Apply one conversion; returns the value itself if none applies."""
    if isinstance(value, np.generic):
        item = value.item()  # of longdouble, which has no Python equivalent, itself
        return value if isinstance(item, np.generic) else item
    for kind, simpler in _SIMPLER:
        if isinstance(value, kind):
            return simpler(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value


def _inner(place: str, key: Any) -> str:
    return f"{place}.{key}" if type(key) is str and key.isidentifier() else f"{place}[{key!r}]"


def _key(key: Any, place: str) -> Any:
    if isinstance(key, tuple):
        return tuple(_key(part, place) for part in key)
    if type(key) in _PLAIN:
        return key
    if (simpler := _simplify(key)) is not key:
        return _key(simpler, place)
    raise TypeError(f"{place} has the key {key!r}, a {type(key).__name__}; use text or numbers")


def _bare(value: Tensor, place: str) -> Tensor:
    wrong = "lies on the meta device" if value.is_meta else ""
    wrong = wrong or ("is quantised" if value.is_quantized else "is nested" * value.is_nested)
    if not wrong:
        try:
            bare = value.detach()
            wrong = "" if type(bare) is Tensor else f"is a {type(bare).__qualname__}"
        except ValueError:
            wrong = "is a lazy parameter without a shape: run one batch through the model first"
    if wrong:
        raise TypeError(f"{place} {wrong}; a checkpoint can hold plain tensors only")
    return bare


def _from_numpy(value: np.ndarray, place: str) -> Tensor:
    try:  # a copy in native byte order and C order
        return torch.from_numpy(value.astype(value.dtype.newbyteorder("="), "C"))
    except TypeError:
        raise TypeError(
            f"{place} is an array of {value.dtype}, which a checkpoint cannot hold; use .tolist()"
        ) from None
