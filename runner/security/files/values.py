"""What was loaded is what it looks like: exact types, sizes, strides, and numbers of a usual size.

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
TENSORS = (Tensor, torch.nn.Parameter)  # a torch.nn.Buffer is a Tensor with two attributes
PLAIN = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        bytearray,
        torch.dtype,
        torch.device,
        torch.Size,
        torch.layout,
        torch.qscheme,
        torch.storage.TypedStorage,
        torch.UntypedStorage,
        np.ndarray,
    }
)
MAGNITUDE = 1e10  # weights and their statistics are many powers of ten smaller
MOST = 20  # tensors that are named
PACKED = getattr(torch, "float4_e2m1fn_x2", None)  # two numbers a byte, which nothing reduces
WAY_OUT = "check where it comes from before you use it; check_model looks closer"

Place = tuple[Any, ...]  # keys and indices that lead to a value
Placed = tuple[Place, Tensor]


def check_types(content: Any, size: int, limits: FileLimits) -> list[Placed]:
    """Its tensors, each once, with their places. Raises Refused for what is not plain data."""
    walk = _Walk(limits)
    walk.visit(content, ())
    most = limits.may_expand(size)
    if walk.bytes > most:
        raise Refused(
            "tensor.expanded",
            walk.largest,
            f"its tensors would take {walk.bytes:,} bytes, and the file has {size:,}",
            "save them with .clone(), so that none is larger than what is stored of it",
        )
    return walk.tensors


class _Walk:
    """A depth-first visit of nested containers; a shared one is visited once."""

    def __init__(self, limits: FileLimits) -> None:
        self.limits = limits
        self.tensors: list[Placed] = []
        self.bytes = 0  # that all tensors would take, were they copied
        self.largest = ""
        self._most = -1
        self._visited: dict[int, bool] = {}  # by id: whether all within was visited

    def visit(self, value: Any, place: Place) -> None:
        """Check a value and what it holds."""
        kind = type(value)
        if kind in PLAIN:
            return
        visited = self._visited.get(id(value))
        if visited:
            return
        if visited is False:
            raise Refused("content.loop", path(place), "holds itself", SAVE_AGAIN)
        if len(place) > self.limits.depth:
            raise Refused(
                "content.depth",
                path(place[:4]),
                f"has containers more than {self.limits.depth} deep",
                SAVE_AGAIN,
            )
        self._visited[id(value)] = False
        if kind in TENSORS:
            self._visit_tensor(value, place)
        else:
            for key, inner in _items(value, place):
                self.visit(inner, (*place, key))
        self._visited[id(value)] = True

    def _visit_tensor(self, tensor: Tensor, place: Place) -> None:
        held = check_tensor(tensor, place)
        self.bytes += held
        if held > self._most:
            self._most, self.largest = held, path(place)
        for name, inner in vars(tensor).items():
            _check_attribute(tensor, name, place)
            self.visit(inner, (*place, name))
        self.tensors.append((place, tensor))


def _items(value: Any, place: Place) -> Iterator[tuple[Any, Any]]:
    """What a container holds, by key or index. Raises Refused for other objects."""
    kind = type(value)
    if kind in MAPPINGS:
        for key, inner in dict.items(value):
            if type(key) not in PLAIN and type(key) is not tuple:
                raise Refused(
                    "content.key", path(place), f"has a {type(key).__name__} as a key", SAVE_AGAIN
                )
            if type(key) is tuple:
                yield "key", key
            yield key, inner
        for name, inner in getattr(value, "__dict__", {}).items():
            _check_attribute(value, name, place)
            yield name, inner
    elif kind is list or kind is tuple:
        yield from enumerate(value)
    elif kind is set:
        yield from enumerate(value)
    else:
        raise Refused(
            "content.type", path(place), f"is a {kind.__module__}.{kind.__qualname__}", SAVE_AGAIN
        )


def _check_attribute(value: Any, name: str, place: Place) -> None:
    if hasattr(type(value), name):
        raise Refused(
            "content.attribute", path(place), f"has an attribute in place of its {name}", SAVE_AGAIN
        )


def check_tensor(tensor: Tensor, place: Place = ()) -> int:
    """The bytes that it would take as a copy. Raises Refused for one that cannot be trusted."""
    wrong = ""
    if tensor._backward_hooks:
        wrong = "has hooks, which would be called"
    elif tensor.device.type != "cpu":
        wrong = f"is on the device {tensor.device}"
    elif tensor.layout is torch.strided and not tensor.is_nested and _out_of_storage(tensor):
        wrong = "reaches beyond its storage"
    if wrong:
        raise Refused("tensor.kind", path(place), wrong, "save a plain one: .detach().clone()")
    if tensor.layout is torch.strided:
        return tensor.numel() * tensor.element_size()
    return sum(part.numel() * part.element_size() for part in _parts(tensor))


def _out_of_storage(tensor: Tensor) -> bool:
    if tensor.is_contiguous():
        last = tensor.numel()
    else:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = 1 + sum((n - 1) * step for n, step in steps) if tensor.numel() else 0
    end = (tensor.storage_offset() + last) * tensor.element_size()
    return last > 0 and end > tensor.untyped_storage().nbytes()


def _parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a sparse one is made of."""
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
    """A warning for each tensor with NaN, infinities or absurd numbers; a refusal for booleans
    other than 0 and 1, which are read in two ways.
    """
    looked_at = ((place, part) for place, tensor in tensors for part in _numbers(tensor))
    found = [reason for placed in looked_at if (reason := _describe(*placed))]
    found.sort(key=lambda reason: -reason.severity)
    if len(found) > MOST:
        more = f"{len(found) - MOST:,} more tensors like these"
        found[MOST:] = [Reason("weights.more", Severity.WARNING, "", more)]
    return found


def _numbers(tensor: Tensor) -> Iterator[Tensor]:
    """Its values as a strided tensor that `aminmax` reads; nothing where all are usual."""
    tensor = tensor.detach()
    if tensor.is_quantized or tensor.is_nested or tensor.dtype is PACKED:
        return
    if tensor.layout is not torch.strided:
        tensor = _parts(tensor)[-1]
    if not tensor.numel():
        return
    if tensor.dtype is torch.bool:
        yield tensor.view(torch.uint8)
    elif tensor.is_complex():
        yield torch.view_as_real(tensor.resolve_conj())
    elif tensor.is_floating_point():
        yield tensor if tensor.element_size() > 1 else tensor.to(torch.float32)


def _describe(place: Place, tensor: Tensor) -> Reason | None:
    low, high = (end.item() for end in torch.aminmax(tensor))
    is_bool = tensor.dtype is torch.uint8
    if max(-low, high) <= (1 if is_bool else MAGNITUDE):  # NaN is not, nor is it in `max`
        return None
    if is_bool:
        return Reason(
            "tensor.bool",
            Severity.REFUSAL,
            path(place),
            "has truth values other than 0 and 1, which are read in two ways",
            "save it with .to(torch.uint8).bool()",
        )
    if math.isfinite(low) and math.isfinite(high):
        code, what = "weights.magnitude", f"ranges from {low:.3g} to {high:.3g}"
    else:
        code, what = "weights.not_finite", f"holds {'NaN' if math.isnan(low) else 'an infinity'}"
    return Reason(code, Severity.WARNING, path(place), what, WAY_OUT)


def check_arrays(content: np.ndarray | dict[str, np.ndarray]) -> list[Reason]:
    """The same for numpy's arrays, which may be data: of these any finite size is usual."""
    arrays = content if isinstance(content, dict) else {"": content}
    tensors: list[Placed] = []
    for name, array in arrays.items():
        place = (name,) if name else ()
        if array.dtype.kind == "b":
            tensors.append((place, torch.as_tensor(array.view(np.uint8)).view(torch.bool)))
        elif array.dtype.kind in "fc":
            known = array.dtype.isnative and array.dtype.char in "efdFD"
            wide = array if known else array.astype("c16" if array.dtype.kind == "c" else "f8")
            tensors.append((place, torch.as_tensor(wide)))
    return [reason for reason in check_values(tensors) if reason.code != "weights.magnitude"]
