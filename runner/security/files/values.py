"""Loaded content is what it looks like: exact types, sizes, strides, and numbers of a usual size.

An attribute on a dict or a tensor can replace one of its methods, so that a check sees other
values than the one who uses them.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.security.files.formats import SAVE_AGAIN, Refused, printable
from runner.security.files.policy import FileLimits
from runner.security.trust import Reason, Severity

MAPPINGS = (dict, OrderedDict, Counter)
SEQUENCES = (list, tuple, set)
TENSORS = (Tensor, torch.nn.Parameter)  # a torch.nn.Buffer is a Tensor with two attributes
PLAIN = frozenset(
    (type(None), bool, int, float, complex, str, bytes, bytearray, np.ndarray)
    + (torch.dtype, torch.device, torch.Size, torch.layout, torch.qscheme)
    + (torch.storage.TypedStorage, torch.UntypedStorage)
)
MAGNITUDE = 1e10  # weights and their statistics are many powers of ten smaller
MOST = 20  # tensors that are named
PACKED = getattr(torch, "float4_e2m1fn_x2", None)  # two numbers a byte, which nothing reduces
WAY_OUT = "check where it comes from before you use it; check_model looks closer"

Place = tuple[Any, ...]  # keys and indices that lead to a value
Placed = tuple[Place, Tensor]


def check_types(content: Any, size: int, limits: FileLimits) -> list[Placed]:
    """Its tensors, each once, with their places. Raises Refused for what is not plain data."""
    walk = _Walk(limits.depth)
    walk.visit(content, ())
    if walk.total > limits.may_expand(size):
        evidence = f"its tensors would take {walk.total:,} bytes, and the file has {size:,}"
        raise Refused("tensor.expanded", "", evidence, "save them with .clone()")
    return walk.tensors


class _Walk:
    """A depth-first visit of nested values; no closure, whose cycle would keep tensors alive."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.tensors: list[Placed] = []
        self.total = 0  # bytes of all tensors, were they copied
        self._done: dict[int, bool] = {}  # by id: whether all within was visited

    def visit(self, value: Any, place: Place) -> None:
        """Check a value and what it holds."""
        if type(value) in PLAIN or self._done.get(id(value)):
            return
        if id(value) in self._done or len(place) > self.depth:
            wrong = f"holds itself, or has containers more than {self.depth} deep"
            raise Refused("content.depth", path(place[:4]), wrong, SAVE_AGAIN)
        self._done[id(value)] = False
        for key, inner in _items(value, place):
            self.visit(inner, (*place, key))
        if type(value) in TENSORS:
            self.total += _check_tensor(value, place)
            self.tensors.append((place, value))
        self._done[id(value)] = True


def _items(value: Any, place: Place) -> Iterator[tuple[Any, Any]]:
    """What a value holds, by key, index or attribute. Raises Refused for other objects."""
    kind = type(value)
    if kind in SEQUENCES:
        yield from enumerate(value)
    elif kind in MAPPINGS:
        for key, inner in dict.items(value):
            yield "key", key
            yield key, inner
    elif kind not in TENSORS:
        evidence = f"is a {kind.__module__}.{kind.__qualname__}"
        raise Refused("content.type", path(place), evidence, SAVE_AGAIN)
    for name, inner in getattr(value, "__dict__", {}).items():
        if hasattr(kind, name):
            evidence = f"has an attribute in place of its {name}"
            raise Refused("content.attribute", path(place), evidence, SAVE_AGAIN)
        yield name, inner


def _check_tensor(tensor: Tensor, place: Place) -> int:
    """The bytes that it would take as a copy. Raises Refused for one that cannot be trusted."""
    wrong = ""
    strided = tensor.layout is torch.strided and not tensor.is_nested
    if tensor._backward_hooks:
        wrong = "has hooks, which would be called"
    elif tensor.device.type != "cpu":
        wrong = f"is on the device {tensor.device}"
    elif strided and _out_of_storage(tensor):
        wrong = "reaches beyond its storage"
    if wrong:
        raise Refused("tensor.kind", path(place), wrong, "save a plain one: .detach().clone()")
    parts = [tensor] if tensor.layout is torch.strided else _parts(tensor)
    return sum(part.numel() * part.element_size() for part in parts)


def _out_of_storage(tensor: Tensor) -> bool:
    if not tensor.numel():
        return False
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + 1 + sum((n - 1) * step for n, step in steps)
    return last * tensor.element_size() > tensor.untyped_storage().nbytes()


def _parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a sparse one is made of, its values last."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def path(place: Place) -> str:
    """Keys as they would be written; only made for what is reported."""
    parts = [f"[{key}]" if type(key) is not str else f".{printable(key, 60)}" for key in place]
    return "".join(parts).removeprefix(".")


def check_values(tensors: list[Placed]) -> list[Reason]:
    """A warning for each tensor with NaN, infinities or absurd numbers."""
    found = []
    for place, tensor in tensors:
        numbers = _numbers(tensor.detach())
        if numbers is None:
            continue
        low, high = (end.item() for end in torch.aminmax(numbers))
        if max(-low, high) <= MAGNITUDE:  # NaN is not, nor is it in `max`
            continue
        code, what = "weights.magnitude", f"ranges from {low:.3g} to {high:.3g}"
        if not (math.isfinite(low) and math.isfinite(high)):
            code, what = "weights.not_finite", f"holds {'NaN' if low != low else 'an infinity'}"
        found.append(Reason(code, Severity.WARNING, path(place), what, WAY_OUT))
    if len(found) > MOST:
        more = f"{len(found) - MOST:,} more tensors like these"
        found[MOST:] = [Reason("weights.more", Severity.WARNING, "", more)]
    return found


def _numbers(tensor: Tensor) -> Tensor | None:
    """Its values as a strided tensor that `aminmax` reads; None where all are usual."""
    if tensor.is_quantized or tensor.is_nested or tensor.dtype is PACKED:
        return None
    if tensor.layout is not torch.strided:
        tensor = _parts(tensor)[-1]
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.numel() or not tensor.is_floating_point():
        return None
    return tensor if tensor.element_size() > 1 else tensor.to(torch.float32)
