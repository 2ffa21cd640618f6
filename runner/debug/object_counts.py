"""Live tensors and long containers, counted, and which of them grew between two counts."""

from __future__ import annotations

import gc
import types
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from runner.device.memory import anonymous_bytes

LONG = 16  # items of a container that is worth following
LITTLE = 0.02  # of the bytes that the process grew by, for tensors to be named
MOST = 8  # of each kind that are named
CONTAINERS = (list, dict, set, deque)
TensorKind = tuple[str, str, str, int]  # shape, dtype, device, bytes of one


@dataclass
class ObjectCounts:
    """Live objects, as the garbage collector knows them; 50 ms for 200,000 of them."""

    tensors: Counter[TensorKind] = field(default_factory=Counter)
    containers: Counter[int] = field(default_factory=Counter)  # length by id
    process_bytes: int = 0


def count_objects() -> ObjectCounts:
    """Count all tensors and containers."""
    counts = ObjectCounts(process_bytes=anonymous_bytes())
    for item in gc.get_objects():
        kind = type(item)
        # a lazy parameter has no shape yet; the compiler's fake tensors hold no memory, and their
        # sizes may be symbols
        if issubclass(kind, Tensor) and kind is not FakeTensor and not is_lazy(item):
            counts.tensors[_tensor_kind(item)] += 1
        elif kind in CONTAINERS and len(item) >= LONG:
            counts.containers[id(item)] = len(item)
    return counts


@dataclass(frozen=True)
class Growth:
    """Tensors of a kind, or items of a container, that have become more."""

    kind: str  # tensors | items
    what: str
    more: int  # of them
    bytes: int = 0  # of tensors

    def __str__(self) -> str:
        size = f", {self.bytes / 2**20:,.1f} MiB" if self.bytes else ""
        return f"{self.more:,} more {self.kind} {self.what}{size}"


def find_growth(before: ObjectCounts, now: ObjectCounts) -> list[Growth]:
    """What grew most: tensors by their bytes, then containers, by the name of their owner."""
    tensors = [
        Growth("tensors", f"[{shape}] {dtype} on {device}", more, more * size)
        for (shape, dtype, device, size), more in (now.tensors - before.tensors).items()
    ]
    tensors.sort(key=lambda growth: -growth.bytes)
    grown = max(now.process_bytes - before.process_bytes, tensors[0].bytes if tensors else 0)
    longer = now.containers - before.containers
    longest = {key: more for key, more in longer.most_common(MOST) if more >= LONG}
    alive = [item for item in gc.get_objects() if id(item) in longest and len(item) >= LONG]
    items = [Growth("items", f"in {_container_name(item)}", longest[id(item)]) for item in alive]
    items.sort(key=lambda growth: -growth.more)
    return [*[growth for growth in tensors if growth.bytes >= LITTLE * grown][:MOST], *items]


def _tensor_kind(tensor: Tensor) -> TensorKind:
    shape = "×".join(map(str, tensor.shape)) or "one number"
    size = tensor.numel() * tensor.element_size()
    return shape, str(tensor.dtype).removeprefix("torch."), str(tensor.device), size


def _container_name(container: Any) -> str:
    """What its holder calls a container: a module's name, an object's attribute."""
    kind = type(container).__name__
    for holder in _referrers(container):
        names = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
        key = next((key for key, value in list(names.items()) if value is container), None)
        if key is None:
            continue
        if "__builtins__" in names:
            return f"the {kind} {names.get('__name__')}.{key}"
        owners = (o for o in _referrers(names) if getattr(o, "__dict__", None) is names)
        owner = next(owners, None) if holder is names else holder
        if owner is not None:
            named = owner if isinstance(owner, type | types.ModuleType) else type(owner)
            return f"the {kind} {getattr(named, '__qualname__', named.__name__)}.{key}"
    return f"a {kind} that no attribute names"


def _referrers(item: Any) -> Iterator[Any]:
    for referrer in gc.get_referrers(item):
        if not isinstance(referrer, list | tuple | types.FrameType | types.GeneratorType):
            yield referrer
