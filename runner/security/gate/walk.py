"""What was loaded is what it looks like: plain containers, plain values, plain tensors."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from runner.security.gate.policy import Bounds, Whose
from runner.security.gate.refused import SAVE_AGAIN, Refused, shown

MAPPINGS = (dict, OrderedDict, Counter)
PLAIN = frozenset({
    type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device,
    torch.Size, np.ndarray,
})  # fmt: skip
SPARSE = (
    torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc,
)  # fmt: skip
WAY_OUT = "save a plain one: .dequantize(), .to_dense(), .detach() or .clone()"


class Place(NamedTuple):
    """Where a value lies; written out only for what is reported, since names can be long."""

    parent: Place | None = None
    key: Any = None
    listed: bool = False

    def __str__(self) -> str:
        parts: list[str] = []
        place: Place | None = self
        while place is not None and place.parent is not None:
            if place.listed or type(place.key) is int:
                parts.append(f"[{place.key}]")
            elif type(place.key) is str:
                parts.append(f".{shown(place.key, 60)}")
            else:
                parts.append(f"[a {type(place.key).__name__}]")
            place = place.parent
        return "".join(reversed(parts)).removeprefix(".")


def check_types(
    content: Any, bounds: Bounds, whose: Whose = Whose.FOREIGN
) -> list[tuple[Place, Tensor]]:
    """Its tensors with their places, each once. Raises Refused for what is not plain.

    Attributes of a dict or a tensor can stand in the way of its methods, so that a check sees
    other values than the one who uses them: none are let through but torch's `_metadata`.
    """
    tensors: list[tuple[Place, Tensor]] = []
    sizes: dict[int, int] = {}  # values in each container, those of shared ones every time
    within: set[int] = set()
    waiting: list[tuple[Any, Place, int, list[Any] | None]] = [(content, Place(), 0, None)]
    while waiting:
        value, place, depth, inner = waiting.pop()
        if inner is not None:  # all that is in it was looked at
            within.discard(id(value))
            size = 1 + len(value) + sum(sizes.get(id(item), 1) for item in inner)
            if size > bounds.items:
                raise Refused(
                    "content.items", str(place), f"holds more than {bounds.items:,} values",
                    SAVE_AGAIN,
                )  # fmt: skip
            sizes[id(value)] = size
            continue
        kind = type(value)
        if kind in PLAIN or id(value) in sizes:
            continue
        if id(value) in within:
            raise Refused("content.loop", str(place), "holds itself", SAVE_AGAIN)
        if kind is Tensor or kind is torch.nn.Parameter:
            _check_tensor(value, place, whose)
            sizes[id(value)] = 1
            tensors.append((place, value))
            continue
        if depth >= bounds.depth:
            raise Refused(
                "content.depth", str(place), f"lies deeper than {bounds.depth} containers",
                SAVE_AGAIN,
            )  # fmt: skip
        within.add(id(value))
        rows = [(item, where, depth + 1, None) for item, where in _inside(value, place)]
        waiting.append((value, place, depth, [row[0] for row in rows]))
        waiting += rows
    return tensors


def _inside(value: Any, place: Place) -> Iterator[tuple[Any, Place]]:
    kind = type(value)
    if kind in MAPPINGS:
        for key, inner in dict.items(value):
            if type(key) not in PLAIN and type(key) is not tuple:
                raise Refused(
                    "content.key", str(place), f"has a {type(key).__name__} as a key", SAVE_AGAIN
                )
            if type(inner) not in PLAIN:
                yield inner, Place(place, key)
            if type(key) is tuple:
                yield key, place
        if kind is not dict:
            yield from _attributes(value, place)
    elif kind is list or kind is tuple:
        for i, inner in enumerate(value):
            if type(inner) not in PLAIN:  # most are numbers: nothing is kept of them
                yield inner, Place(place, i, True)
    elif kind is set:
        for inner in value:
            if type(inner) not in PLAIN:
                yield inner, place
    else:
        raise Refused(
            "content.type", str(place), f"is a {kind.__module__}.{kind.__qualname__}", SAVE_AGAIN
        )


def _attributes(value: Any, place: Place) -> Iterator[tuple[Any, Place]]:
    """What `Module.state_dict` attaches, and `load_state_dict` asks for; nothing else."""
    for name, inner in vars(value).items():
        if name != "_metadata" or type(inner) is not OrderedDict:
            raise Refused(
                "content.attributes", str(place), f"has the attribute {shown(name)}", SAVE_AGAIN
            )
        yield inner, Place(place, name)


def _check_tensor(tensor: Tensor, place: Place, whose: Whose) -> None:
    """A strided tensor of numbers in the host's memory, with nothing attached."""
    odd = ""
    if vars(tensor):
        odd = f"has attributes: {', '.join(sorted(shown(name, 40) for name in vars(tensor)))}"
    elif tensor._backward_hooks:
        odd = "has hooks, which would be called"
    elif tensor.is_quantized:
        odd = "is quantised"
    elif tensor.is_nested:
        odd = "is nested"
    elif tensor.layout is not torch.strided and not (
        whose is Whose.OWN and tensor.layout in SPARSE
    ):
        odd = f"is sparse ({tensor.layout})"
    elif tensor.device.type != "cpu":
        odd = f"is on the device {tensor.device}"
    if odd:
        raise Refused("tensor.kind", str(place), odd, WAY_OUT)
