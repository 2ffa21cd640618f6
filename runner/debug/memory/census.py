"""What there is in Python's memory, and what has become more between two looks."""

from __future__ import annotations

import gc
import types
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from runner.device.memory import anonymous_bytes

LONG = 16  # items of a container that is worth following
LITTLE = 0.02  # of the bytes that the process grew by, or the foremost, for tensors to be told
HALF = 0.5  # of the items that the foremost container grew by, for objects to be told
# what imports and decorators make: it becomes more in any run, and holds next to nothing
MACHINERY = (
    types.FunctionType, types.CellType, types.CodeType, types.MethodType, types.ModuleType,
    types.BuiltinFunctionType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.WrapperDescriptorType, types.MethodDescriptorType, types.FrameType, type, property,
    staticmethod, classmethod, weakref.ref,
)  # fmt: skip
CONTAINERS = (list, dict, set, deque)
Shape = tuple[str, str, str, int]


@dataclass
class Census:
    """Live objects, as the garbage collector knows them; 50 ms for 200,000 of them."""

    types: Counter[str] = field(default_factory=Counter)
    tensors: Counter[Shape] = field(default_factory=Counter)  # shape, dtype, device, bytes of one
    containers: dict[int, int] = field(default_factory=dict)  # by id, how long
    held: int = 0  # bytes of the process


def take(collect: bool = True) -> Census:
    """Look at all objects; with `collect` after garbage is gone, so that what counts is held."""
    if collect:  # as long again as the look itself
        gc.collect()
    found = Census(held=anonymous_bytes())
    kinds: Counter[type] = Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in MACHINERY:
            kinds[kind] += 1
        # a lazy parameter has no shape yet; the compiler's fake tensors hold no memory, and their
        # sizes may be symbols
        if issubclass(kind, Tensor) and kind is not FakeTensor and not is_lazy(thing):
            found.tensors[_shape(thing)] += 1
        elif kind in CONTAINERS and len(thing) >= LONG:
            found.containers[id(thing)] = len(thing)
    for kind, count in kinds.items():
        found.types[f"{kind.__module__}.{kind.__qualname__}"] += count
    return found


@dataclass(frozen=True)
class Growth:
    """What has become more."""

    kind: str  # tensors | items | objects
    what: str
    more: int  # of them
    bytes: int = 0  # of tensors

    def __str__(self) -> str:
        size = f", {self.bytes / 2**20:,.1f} MiB" if self.bytes else ""
        return f"{self.more:,} more {self.kind} {self.what}{size}"


def compare(before: Census, now: Census, most: int = 8) -> list[Growth]:
    """What grew most: tensors by their bytes, containers with their owner, then other objects."""
    tensors = [
        Growth("tensors", f"[{shape}] {dtype} on {device}", more, more * size)
        for (shape, dtype, device, size), more in (now.tensors - before.tensors).items()
    ]
    tensors.sort(key=lambda growth: -growth.bytes)
    least = LITTLE * max(now.held - before.held, tensors[0].bytes if tensors else 0)
    tensors = [growth for growth in tensors if growth.bytes >= least]
    grown = {
        mark: length - before.containers.get(mark, 0)
        for mark, length in now.containers.items()
        if length - before.containers.get(mark, 0) >= LONG
    }
    longest = sorted(grown, key=lambda mark: -grown[mark])[:most]
    containers = [
        Growth("items", f"in {_named(thing)}", grown[id(thing)]) for thing in _living(longest)
    ]
    containers.sort(key=lambda growth: -growth.more)
    fewest = max(LONG, HALF * containers[0].more if containers else 0)
    kinds = [
        Growth("objects", f"of {name}", more)
        for name, more in (now.types - before.types).most_common(most)
        if more >= fewest
    ]
    return [*tensors[:most], *containers[:most], *kinds]


def _shape(tensor: Tensor) -> Shape:
    shape = "×".join(map(str, tensor.shape)) or "one number"
    size = tensor.numel() * tensor.element_size()
    return shape, str(tensor.dtype).removeprefix("torch."), str(tensor.device), size


def _living(marks: list[int]) -> list[Any]:
    wanted = set(marks)
    return [thing for thing in gc.get_objects() if id(thing) in wanted and len(thing) >= LONG]


def _named(container: Any) -> str:
    """What a container is called by whoever holds it: a module's name, an object's attribute."""
    kind = type(container).__name__
    for owner in _owners(container):
        if isinstance(owner, dict):
            name = next((k for k, v in list(owner.items()) if v is container), None)
            if isinstance(owner.get("__name__"), str) and "__builtins__" in owner:
                return f"the {kind} {owner['__name__']}.{name}"
            for holder in _owners(owner):
                if getattr(holder, "__dict__", None) is owner:
                    return f"the {kind} {_holder(holder)}.{name}"
        attributes = getattr(owner, "__dict__", None)
        if isinstance(attributes, dict):
            for name, value in list(attributes.items()):
                if value is container:
                    return f"the {kind} {_holder(owner)}.{name}"
    return f"a {kind} that no attribute names"


def _owners(thing: Any) -> Iterator[Any]:
    for owner in gc.get_referrers(thing):
        if not isinstance(owner, list | tuple) and type(owner).__name__ != "frame":
            yield owner


def _holder(owner: Any) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    return owner.__qualname__ if isinstance(owner, type) else type(owner).__qualname__
