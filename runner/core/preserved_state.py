"""Restoring of all that a forward may change: tensors, Python attributes, random state.

The process-wide random generators are for one thread at a time: a step seeds torch's, a build
those of torch, NumPy and Python, and if two threads drew from them, results would depend on timing.
"""

from __future__ import annotations

import io
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import partial
from itertools import count
from threading import RLock
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from runner.core.errors import UsageError

STATELESS_TYPES = (type, BuiltinFunctionType, ModuleType, type(None), str, bytes, bool, int, float)
CONTAINER_MODULES = {"argparse", "collections", "queue", "types"}  # modules with container types
FOREIGN_MODULES = (sys.stdlib_module_names - CONTAINER_MODULES) | {"torch", "numpy", "runner"}
"""Modules with objects and classes that are not the user's."""
MAX_ARRAY_BYTES = 2**24  # of a NumPy array; a larger one is taken for a data set, not state
MAX_COPIED_BYTES = 2**28  # of parameters that are copied
MAX_DATA_ITEMS = 10_000  # of a data set's container; those of a larger one are taken for samples
ITERATOR_TYPES: tuple[type, ...] = (count, type(iter(())), type(iter([])), type(iter(range(0))))
LEAF_ATTRIBUTES = ("requires_grad", "grad", "_backward_hooks")  # restored, of a leaf tensor
MISSING = object()
POLL_S = 0.05
_lock = RLock()
_training = False  # whether the thread with the lock trains


@contextmanager
def float32_default() -> Iterator[None]:
    """Create tensors in float32 while entered, for any default dtype that user code has left."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)


class NotRestorable(Exception):
    """The model must not be called: its state could not be restored, or does not fit in memory."""


def large_parameters(model: nn.Module) -> list[Tensor]:
    """Return the parameters of a model with more than MAX_COPIED_BYTES of them, else []."""
    parameters = [p for p in model.parameters() if not is_lazy(p)]
    size = sum(p.numel() * p.element_size() for p in parameters)
    return list(parameters) if size > MAX_COPIED_BYTES else []


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the host's random generators on exit."""
    generators = RandomGenerators(devices=False)
    try:
        yield
    finally:
        generators.restore()


class RandomGenerators:
    """The states of Python's, NumPy's and torch's generators, also of CUDA devices in use."""

    def __init__(self, devices: bool = True) -> None:
        self.python, self.numpy = random.getstate(), np.random.get_state()
        self.torch = torch.get_rng_state()
        in_use = devices and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self.cuda = torch.cuda.get_rng_state_all() if in_use else []

    def restore(self) -> None:
        """Put the generators into these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


@contextmanager
def exclusive_random_state(action: str, trains: bool = False) -> Iterator[None]:
    """Prevent other threads from building, training or evaluating a run while entered.

    Waits for a build or an evaluation; raises UsageError while another thread trains, which may
    take hours. Re-entrant in one thread, as for a hook that evaluates.
    """
    global _training
    while not _lock.acquire(timeout=POLL_S):
        if _training:
            problem = "another thread of this process is training, with the same random state"
            fix = "train one after the other, or in processes of their own: python -m runner -m …"
            raise UsageError(f"{action}: {problem}; {fix}")
    before, _training = _training, _training or trains
    try:
        yield
    finally:
        _training = before
        _lock.release()


@contextmanager
def preserve_state(
    *roots: object,
    device: torch.device,
    safe: Iterable[Tensor] = (),
    complete: bool = False,
    is_data: bool = False,
) -> Iterator[None]:
    """Restore models, all that they reference, and all random generators on exit.

    This covers modes, attributes (also of the user's classes and in closures), lists, dicts, hooks,
    gradients, and tensor values, which are copied to the host, except those of `safe`. Not covered:
    global variables, generators, open files. With `complete`, raises NotRestorable if a generator,
    an iterator without a copy or an open file can be reached. With `is_data` the roots are data
    sets: large tensors and the items of large containers are taken for samples, not state.
    """
    _free_gathered_weights(roots)
    snapshot = _StateSnapshot(roots, safe, is_data)
    if complete and snapshot.opaque:
        raise NotRestorable(f"it holds {snapshot.opaque[0]}, whose state cannot be restored")
    with preserve_random_state(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            _free_gathered_weights(roots)
            with torch.no_grad():
                for restore in snapshot.restorers:
                    restore()


def _free_gathered_weights(roots: Iterable[object]) -> None:
    """Have FSDP put its shards back into the modules, which it would else take for gathered."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    models = [root for root in roots if isinstance(root, nn.Module)] if fsdp else []
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


class _StateSnapshot:
    """The objects that can be reached from the roots, each with a function that restores it."""

    def __init__(self, roots: Iterable[object], safe: Iterable[Tensor], is_data: bool) -> None:
        self.safe = {id(tensor) for tensor in safe}
        self.is_data = is_data
        self.roots = list(roots)  # an objective of ours may hold a user's loss
        self.restorers: list[Callable[[], object]] = []
        self.opaque: list[str] = []  # objects that cannot be restored
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.visited: dict[int, object] = {}  # keeps them alive, so that ids stay unique
        pending = list(self.roots)
        while pending:
            item = pending.pop()
            if id(item) not in self.visited and not isinstance(item, STATELESS_TYPES):
                self.visited[id(item)] = item
                pending.extend(self._record(item))

    def _record(self, item: Any) -> Iterable[object]:
        """Record how to restore an object; return the objects that it holds."""
        if isinstance(item, Tensor):
            return self._record_tensor(item)
        if isinstance(item, torch.jit.ScriptModule):  # its slots are not Python's
            return [*item.parameters(), *item.buffers()]
        if isinstance(item, MethodType):
            return [item.__self__]
        if isinstance(item, partial):
            return [item.func, item.args, item.keywords]
        if isinstance(item, FunctionType):
            return self._record_closure(item)
        return [*self._record_contents(item), *self._record_attributes(item)]

    def _record_contents(self, item: Any) -> Iterable[object]:
        if isinstance(item, dict):
            values = {key: _copy_iterator(value) for key, value in item.items()}
            self.restorers.append(partial(_restore_dict, item, values))
            return () if self._is_samples(item) else values.values()
        if isinstance(item, list | set | deque):
            items = [_copy_iterator(element) for element in item]
            self.restorers.append(partial(_restore_items, item, items))
            return () if self._is_samples(item) else items
        if isinstance(item, tuple | frozenset):
            return () if self._is_samples(item) else item
        if isinstance(item, types.GeneratorType):
            self.opaque.append("a generator")
        elif isinstance(item, io.IOBase):
            if item not in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
                self.opaque.append("an open file")
        elif isinstance(item, Iterator) and _is_foreign(type(item).__module__):
            if not isinstance(item, ITERATOR_TYPES):
                self.opaque.append(f"an iterator ({type(item).__name__})")
        elif isinstance(item, np.ndarray):
            if item.nbytes <= MAX_ARRAY_BYTES and not item.dtype.hasobject and item.flags.writeable:
                self.restorers.append(partial(np.copyto, item, item.copy()))
        elif isinstance(item, random.Random):
            self.restorers.append(partial(item.setstate, item.getstate()))
        elif isinstance(item, torch.Generator | np.random.RandomState):
            state: Any = item.get_state()
            self.restorers.append(partial(item.set_state, state))
        elif isinstance(item, np.random.Generator):
            bits = item.bit_generator
            self.restorers.append(partial(setattr, bits, "state", bits.state))
        return ()

    def _is_samples(self, container: Collection[Any]) -> bool:
        return self.is_data and len(container) > MAX_DATA_ITEMS

    def _record_closure(self, function: FunctionType) -> Iterable[object]:
        """Record a user function's closure; told by its globals, as decorators copy __module__."""
        if _is_foreign(str(function.__globals__.get("__name__"))):
            return
        yield vars(function)
        for cell in function.__closure__ or ():
            content = _copy_iterator(_read_cell(cell))
            if content is not MISSING:
                self.restorers.append(partial(setattr, cell, "cell_contents", content))
                yield content

    def _record_attributes(self, item: Any) -> Iterable[object]:
        """Yield the attributes of an object and of its user-defined classes."""
        own = isinstance(item, nn.Module) or any(item is root for root in self.roots)
        if _is_foreign(type(item).__module__) and not own:
            return
        if hasattr(item, "__dict__"):
            yield vars(item)
        for owner in type(item).__mro__:
            if _is_foreign(owner.__module__):
                continue
            members = [n for n, v in vars(owner).items() if isinstance(v, MemberDescriptorType)]
            slots = {name: getattr(item, name, MISSING) for name in members}
            yield from self._record_names(item, slots)
            if id(owner) not in self.visited:
                self.visited[id(owner)] = owner
                yield from self._record_names(owner, vars(owner))

    def _record_names(self, owner: Any, values: Mapping[str, object]) -> Iterable[object]:
        """Record slots of an object, or attributes of a class."""
        before = {name: _copy_iterator(value) for name, value in values.items()}
        self.restorers.append(partial(_restore_names, owner, before))
        return [value for value in before.values() if not isinstance(value, FunctionType)]

    def _record_tensor(self, tensor: Tensor) -> Iterable[object]:
        if is_lazy(tensor):
            return
        if tensor.is_leaf:
            state = {name: getattr(tensor, name) for name in LEAF_ATTRIBUTES}
            self.restorers.append(partial(_restore_leaf, tensor, state))
            yield from (vars(tensor), tensor._backward_hooks)
        if id(tensor) in self.safe or tensor.is_meta:
            return
        wrapper: Any = tensor
        if is_traceable_wrapper_subclass(wrapper):  # its data is in the wrapped tensors
            yield from (getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0])
        elif tensor.layout is torch.strided:
            self.restorers.append(partial(_restore_data, tensor, tensor.detach()))
            self._record_storage(tensor.untyped_storage())

    def _record_storage(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.storages:  # shared by views and tied tensors
            return
        if self.is_data and storage.nbytes() > MAX_ARRAY_BYTES:
            return
        self.storages[storage._cdata] = storage
        own: Any = storage
        values = own.clone() if own.device.type == "cpu" else own.cpu()
        self.restorers.append(partial(_restore_storage, own, values))


def _is_foreign(module: object) -> bool:
    return str(module).partition(".")[0] in FOREIGN_MODULES


def _copy_iterator(value: Any) -> Any:
    """Return the value; of an iterator a copy, which keeps its position."""
    return copy(value) if isinstance(value, ITERATOR_TYPES) else value


def _read_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return MISSING


def _restore_dict(now: dict[Any, Any], before: dict[Any, Any]) -> None:
    if len(now) != len(before) or any(now.get(k, MISSING) is not v for k, v in before.items()):
        now.clear()
        now.update(before)


def _restore_items(now: Any, before: list[object]) -> None:
    if len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
        now.clear()
        (now.update if isinstance(now, set) else now.extend)(before)


def _restore_names(owner: Any, before: Mapping[str, object]) -> None:
    """Restore slots or class attributes, bypassing a frozen class's own __setattr__."""
    kind: Any = type if isinstance(owner, type) else object
    added = [name for name in vars(owner) if name not in before] if kind is type else []
    for name in added:
        kind.__delattr__(owner, name)
    now = dict(vars(owner)) if kind is type else {n: getattr(owner, n, MISSING) for n in before}
    for name, value in before.items():
        if now.get(name, MISSING) is value:
            continue
        if value is MISSING:
            kind.__delattr__(owner, name)
        else:
            kind.__setattr__(owner, name, value)


def _restore_leaf(tensor: Tensor, before: Mapping[str, Any]) -> None:
    for name, value in before.items():
        if getattr(tensor, name) is not value:
            setattr(tensor, name, value)


def _restore_data(tensor: Tensor, before: Tensor) -> None:
    """Restore a tensor's memory, as some code assigns to `.data`."""
    if tensor.data_ptr() != before.data_ptr() or tensor.shape != before.shape:
        tensor.data = before


def _restore_storage(storage: Any, values: Any) -> None:
    if storage.nbytes() != values.nbytes():
        storage.resize_(values.nbytes())
    storage.copy_(values)


def random_state() -> dict[str, Any]:
    """Return the states of the global generators of torch (CPU), python and numpy."""
    states = vars(RandomGenerators(devices=False))
    return {name: states[name] for name in ("torch", "python", "numpy")}
