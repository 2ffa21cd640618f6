"""Live Python objects and tensors, counted, and which of them grew between two counts."""

from __future__ import annotations

import gc
import types
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from runner.device.memory import anonymous_bytes

LONG = 16  # items of a container that is worth following
LITTLE = 0.02  # of the bytes that the process grew by, or the foremost, for tensors to be told
HALF = 0.5  # of the items that the foremost container grew by, for objects to be told
CONTAINERS = (list, dict, set, deque)
# what imports and decorators make: it becomes more in any run, and holds next to nothing
MACHINERY = {
    *(types.FunctionType, types.CellType, types.CodeType, types.MethodType, types.ModuleType),
    *(types.BuiltinFunctionType, types.GetSetDescriptorType, types.MemberDescriptorType),
    *(types.WrapperDescriptorType, types.MethodDescriptorType, types.FrameType, type),
    *(property, staticmethod, classmethod, weakref.ref),
}
TensorKind = tuple[str, str, str, int]  # shape, dtype, device, bytes of one


@dataclass
class ObjectCounts:
    """Live objects, as the garbage collector knows them; 50 ms for 200,000 of them."""

    types: Counter[str] = field(default_factory=Counter)
    tensors: Counter[TensorKind] = field(default_factory=Counter)
    containers: dict[int, int] = field(default_factory=dict)  # length by id
    process_bytes: int = 0


def count_objects(collect: bool = True) -> ObjectCounts:
    """Count all objects; with `collect` after garbage is gone, which takes as long again."""
    if collect:
        gc.collect()
    counts = ObjectCounts(process_bytes=anonymous_bytes())
    kinds: Counter[type] = Counter()
    for item in gc.get_objects():
        kind = type(item)
        if kind not in MACHINERY:
            kinds[kind] += 1
        # a lazy parameter has no shape yet; the compiler's fake tensors hold no memory, and their
        # sizes may be symbols
        if issubclass(kind, Tensor) and kind is not FakeTensor and not is_lazy(item):
            counts.tensors[_tensor_kind(item)] += 1
        elif kind in CONTAINERS and len(item) >= LONG:
            counts.containers[id(item)] = len(item)
    for kind, count in kinds.items():
        counts.types[f"{kind.__module__}.{kind.__qualname__}"] += count
    return counts


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


def find_growth(before: ObjectCounts, now: ObjectCounts, most: int = 8) -> list[Growth]:
    """What grew most: tensors by their bytes, containers with their owner, then other objects."""
    tensors = [
        Growth("tensors", f"[{shape}] {dtype} on {device}", more, more * size)
        for (shape, dtype, device, size), more in (now.tensors - before.tensors).items()
    ]
    tensors.sort(key=lambda growth: -growth.bytes)
    grown_bytes = now.process_bytes - before.process_bytes
    least = LITTLE * max(grown_bytes, tensors[0].bytes if tensors else 0)
    containers = _grown_containers(before, now, most)
    fewest = max(LONG, HALF * containers[0].more if containers else 0)
    objects = [
        Growth("objects", f"of {name}", more)
        for name, more in (now.types - before.types).most_common(most)
        if more >= fewest
    ]
    return [*[growth for growth in tensors if growth.bytes >= least][:most], *containers, *objects]


def _grown_containers(before: ObjectCounts, now: ObjectCounts, most: int) -> list[Growth]:
    more = {key: length - before.containers.get(key, 0) for key, length in now.containers.items()}
    grown = {key: count for key, count in more.items() if count >= LONG}
    longest = set(sorted(grown, key=lambda key: -grown[key])[:most])
    alive = [item for item in gc.get_objects() if id(item) in longest and len(item) >= LONG]
    growths = [Growth("items", f"in {_container_name(item)}", grown[id(item)]) for item in alive]
    return sorted(growths, key=lambda growth: -growth.more)


def _tensor_kind(tensor: Tensor) -> TensorKind:
    shape = "×".join(map(str, tensor.shape)) or "one number"
    size = tensor.numel() * tensor.element_size()
    return shape, str(tensor.dtype).removeprefix("torch."), str(tensor.device), size


def _container_name(container: Any) -> str:
    """What its holder calls a container: a module's name, an object's attribute."""
    kind = type(container).__name__
    for holder in _referrers(container):
        if not isinstance(holder, dict):
            holder, names = holder, getattr(holder, "__dict__", None)
        elif isinstance(holder.get("__name__"), str) and "__builtins__" in holder:
            return f"the {kind} {holder['__name__']}.{_key_of(holder, container)}"
        else:
            names = holder
            owners = (o for o in _referrers(names) if getattr(o, "__dict__", None) is names)
            holder = next(owners, None)
        name = _key_of(names, container) if isinstance(names, dict) else None
        if holder is not None and name is not None:
            owner = holder if isinstance(holder, type | types.ModuleType) else type(holder)
            return f"the {kind} {getattr(owner, '__qualname__', owner.__name__)}.{name}"
    return f"a {kind} that no attribute names"


def _key_of(names: dict[Any, Any], value: Any) -> Any:
    return next((key for key, held in list(names.items()) if held is value), None)


def _referrers(item: Any) -> Iterator[Any]:
    for referrer in gc.get_referrers(item):
        if not isinstance(referrer, list | tuple | types.FrameType | types.GeneratorType):
            yield referrer
