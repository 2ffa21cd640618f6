"""Restore what forwards change in a model: tensors, Python attributes, random state."""

from __future__ import annotations

import io
import random
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import partial
from itertools import count
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

NOT_STATE = (type, BuiltinFunctionType, ModuleType, type(None), str, bytes, bool, int, float)
CONTAINERS = {"argparse", "collections", "queue", "types"}  # modules whose objects hold others
FOREIGN = (sys.stdlib_module_names - CONTAINERS) | {"torch", "numpy", "runner"}
"""Modules whose objects and classes are not the user's."""
LARGEST = 2**24  # bytes of a NumPy array: a data set that a model can reach is not its state
KEPT = 2**28  # bytes of parameters up to which they are copied, to be restored
ITERATORS: tuple[type, ...] = (count, type(iter(())), type(iter([])), type(iter(range(0))))
MISSING = object()


class NotRestorable(Exception):
    """The model must not be called: its state could not be restored, or it cannot be copied."""


def large_parameters(model: nn.Module) -> list[Tensor]:
    """The parameters of a model that has more than KEPT bytes of them; else nothing."""
    parameters = [p for p in model.parameters() if not is_lazy(p)]
    size = sum(p.numel() * p.element_size() for p in parameters)
    return list(parameters) if size > KEPT else []


@contextmanager
def preserve_state(
    *roots: object, device: torch.device, safe: Iterable[Tensor] = (), complete: bool = False
) -> Iterator[None]:
    """Restore models, and what they hold, to their state on entry; and all random generators.

    That is modes, attributes (also of the user's classes and in closures), lists, dicts, hooks,
    gradients, and the values of all tensors, which are copied to the host for that; those of
    `safe` are not. Not covered: global variables, generators, open files. With `complete`,
    NotRestorable where a generator or an open file can be reached.
    """
    before = _Before(roots, safe)
    if complete and before.opaque:
        raise NotRestorable(f"it holds {before.opaque[0]}, whose state cannot be restored")
    noise = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(noise[0])
            np.random.set_state(noise[1])
            with torch.no_grad():
                for put_back in before.undo:
                    put_back()


class _Before:
    """All that can be reached from the roots, each with a way back."""

    def __init__(self, roots: Iterable[object], safe: Iterable[Tensor]) -> None:
        self.safe = {id(tensor) for tensor in safe}
        self.roots = list(roots)  # an objective of ours holds a loss of the user's
        self.undo: list[Callable[[], None]] = []
        self.opaque: list[str] = []  # objects that cannot be restored
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.seen: dict[int, object] = {}  # holds on to them: an id is of a living object
        waiting = list(self.roots)
        while waiting:
            thing = waiting.pop()
            if id(thing) not in self.seen and not isinstance(thing, NOT_STATE):
                self.seen[id(thing)] = thing
                waiting.extend(self._note(thing))

    def _note(self, thing: Any) -> Iterable[object]:
        """Remember it; what it holds is next."""
        if isinstance(thing, Tensor):
            return self._tensor(thing)
        if isinstance(thing, torch.jit.ScriptModule):  # its slots are not Python's
            return [*thing.parameters(), *thing.buffers()]
        if isinstance(thing, MethodType):
            return [thing.__self__]
        if isinstance(thing, partial):
            return [thing.func, thing.args, thing.keywords]
        if isinstance(thing, FunctionType):
            return self._closure(thing)
        return [*self._contents(thing), *self._attributes(thing)]

    def _contents(self, thing: Any) -> Iterable[object]:
        if isinstance(thing, dict):
            then = {key: _copy_iterator(value) for key, value in thing.items()}
            self.undo.append(lambda: _dict(thing, then))
            return then.values()
        if isinstance(thing, list | set | deque):
            items = [_copy_iterator(item) for item in thing]
            self.undo.append(lambda: _items(thing, items))
            return items
        if isinstance(thing, tuple | frozenset):
            return thing
        self._other(thing)
        return ()

    def _other(self, thing: Any) -> None:
        if isinstance(thing, GeneratorType):
            self.opaque.append("a generator")
        elif isinstance(thing, io.IOBase) and thing not in _standard_streams():
            self.opaque.append("an open file")
        elif isinstance(thing, bytearray | array):
            self.undo.append(partial(thing.__setitem__, slice(None), thing[:]))
        elif isinstance(thing, np.ndarray):
            if thing.nbytes <= LARGEST and not thing.dtype.hasobject:
                values = thing.copy()
                self.undo.append(
                    lambda: np.copyto(thing, values) if thing.flags.writeable else None
                )
        elif isinstance(thing, torch.Generator):
            drawn = thing.get_state()
            self.undo.append(lambda: _drawn(thing, drawn))
        elif isinstance(thing, random.Random):
            state = thing.getstate()
            self.undo.append(lambda: thing.setstate(state))
        elif isinstance(thing, np.random.RandomState):
            old = thing.get_state()
            self.undo.append(lambda: thing.set_state(old))
        elif isinstance(thing, np.random.Generator):
            bits = thing.bit_generator.state
            self.undo.append(lambda: setattr(thing.bit_generator, "state", bits))

    def _closure(self, function: FunctionType) -> Iterable[object]:
        """Of the user's functions, such as hooks; by their globals: decorators copy __module__."""
        if _foreign(str(function.__globals__.get("__name__"))):
            return
        yield vars(function)
        for cell in function.__closure__ or ():
            content = _copy_iterator(_read_cell(cell))
            if content is not MISSING:
                self.undo.append(partial(setattr, cell, "cell_contents", content))
                yield content

    def _attributes(self, thing: Any) -> Iterable[object]:
        """Those of the object, and of those of its classes that are the user's."""
        kind = type(thing)
        own = isinstance(thing, nn.Module) or any(thing is root for root in self.roots)
        if _foreign(kind.__module__) and not own:
            return
        if hasattr(thing, "__dict__"):
            yield vars(thing)
        for owner in kind.__mro__:
            if _foreign(owner.__module__):
                continue
            members = [n for n, v in vars(owner).items() if isinstance(v, MemberDescriptorType)]
            slots = {name: _copy_iterator(getattr(thing, name, MISSING)) for name in members}
            self.undo.append(partial(_restore_slots, thing, slots))
            yield tuple(slots.values())
            if id(owner) not in self.seen:
                self.seen[id(owner)] = owner
                values = {name: _copy_iterator(value) for name, value in vars(owner).items()}
                self.undo.append(partial(_restore_class, owner, values))
                yield tuple(v for v in values.values() if not isinstance(v, FunctionType))

    def _tensor(self, tensor: Tensor) -> Iterable[object]:
        if is_lazy(tensor):
            return
        if tensor.is_leaf:
            self.undo.append(
                partial(_leaf, tensor, tensor.grad, tensor.requires_grad, tensor._backward_hooks)
            )
            yield from (vars(tensor), tensor._backward_hooks)
        if id(tensor) in self.safe or tensor.is_meta:
            return
        wrapper: Any = tensor
        if is_traceable_wrapper_subclass(wrapper):  # its numbers are in the tensors that it wraps
            yield from (getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0])
        elif tensor.layout is torch.strided:
            alias = tensor.detach()
            self.undo.append(lambda: _alias(tensor, alias))
            self._storage(alias.untyped_storage())

    def _storage(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.storages:  # views of one, and a tensor under many names
            return
        self.storages[storage._cdata] = storage
        own: Any = storage
        held = own.clone() if storage.device.type == "cpu" else own.cpu()

        def put_back() -> None:
            if storage.nbytes() != held.nbytes():
                storage.resize_(held.nbytes())
            storage.copy_(held)

        self.undo.append(put_back)


def _standard_streams() -> tuple[object, ...]:
    return sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__


def _foreign(module: object) -> bool:
    return str(module).partition(".")[0] in FOREIGN


def _copy_iterator(value: Any) -> Any:
    """The value itself; an iterator's position can only be kept in a copy."""
    return copy(value) if isinstance(value, ITERATORS) else value


def _read_cell(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return MISSING


def _dict(now: dict[Any, Any], then: dict[Any, Any]) -> None:
    same = len(now) == len(then) and all(k in now and now[k] is v for k, v in then.items())
    if not same:
        now.clear()
        now.update(then)


def _items(now: Any, then: list[object]) -> None:
    if len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True)):
        return
    now.clear()
    (now.update if isinstance(now, set) else now.extend)(then)


def _restore_slots(thing: object, then: Mapping[str, object]) -> None:
    """Slots; `object`'s own way, since a frozen class has none."""
    for name, value in then.items():
        if getattr(thing, name, MISSING) is value:
            continue
        if value is MISSING:
            object.__delattr__(thing, name)
        else:
            object.__setattr__(thing, name, value)


def _restore_class(owner: type, then: Mapping[str, object]) -> None:
    now = dict(vars(owner))
    for name in now.keys() - then.keys():
        type.__delattr__(owner, name)
    for name, value in then.items():
        if now.get(name, MISSING) is not value:
            type.__setattr__(owner, name, value)


def _drawn(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _leaf(tensor: Tensor, gradient: Tensor | None, trained: bool, hooks: Any) -> None:
    if tensor.requires_grad is not trained:
        tensor.requires_grad_(trained)
    if tensor.grad is not gradient:
        tensor.grad = gradient
    if tensor._backward_hooks is not hooks:
        tensor._backward_hooks = hooks


def _alias(tensor: Tensor, then: Tensor) -> None:
    """Some code assigns to `.data`: other memory in the same tensor."""
    if tensor.data_ptr() != then.data_ptr() or tensor.shape != then.shape:
        tensor.data = then
