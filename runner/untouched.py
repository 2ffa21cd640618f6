"""Forwards that leave no trace: whatever they change in a model is put back as it was."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

NOT_STATE = type | FunctionType | MethodType | ModuleType
FOREIGN = sys.stdlib_module_names | {"torch", "numpy", "runner"}  # whose objects are left alone
LARGEST = 2**24  # bytes of a NumPy array: a data set that a model can reach is not its state


@contextmanager
def untouched(*roots: object, device: torch.device, safe: Iterable[Tensor] = ()) -> Iterator[None]:
    """Put back what changes meanwhile in models and what they hold, and all generators.

    That is modes, attributes, lists, dicts, gradients and the numbers in all tensors, which are
    copied to the host for that; those of `safe` are not, since others will stand in for them. Not
    found: what a closure or a class has, or a global name.
    """
    before = _Before(roots, safe)
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
        self.undo: list[Callable[[], None]] = []
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.seen: dict[int, object] = {}  # holds on to them: an id is of a living object
        waiting = list(roots)
        while waiting:
            thing = waiting.pop()
            if id(thing) not in self.seen and not isinstance(thing, NOT_STATE):
                self.seen[id(thing)] = thing
                waiting.extend(self._note(thing))

    def _note(self, thing: Any) -> Iterable[object]:
        """Remember it; what it holds is next."""
        if isinstance(thing, Tensor):
            return self._tensor(thing)
        if isinstance(thing, dict):
            then = dict(thing)
            self.undo.append(lambda: _dict(thing, then))
            return then.values()
        if isinstance(thing, list | set | deque):
            items = list(thing)
            self.undo.append(lambda: _items(thing, items))
            return items
        if isinstance(thing, tuple | frozenset):
            return thing
        if isinstance(thing, torch.jit.ScriptModule):  # its slots are not Python's
            return [*thing.parameters(), *thing.buffers()]
        if isinstance(thing, nn.Module):
            return [vars(thing)]
        return self._other(thing)

    def _other(self, thing: Any) -> Iterable[object]:
        if isinstance(thing, np.ndarray):
            if thing.nbytes <= LARGEST and not thing.dtype.hasobject:
                array = thing.copy()
                self.undo.append(lambda: np.copyto(thing, array) if thing.flags.writeable else None)
        elif isinstance(thing, torch.Generator):
            drawn = thing.get_state()
            self.undo.append(lambda: _drawn(thing, drawn))
        elif isinstance(thing, random.Random):
            state = thing.getstate()
            self.undo.append(lambda: thing.setstate(state))
        elif isinstance(thing, np.random.Generator):
            bits = thing.bit_generator.state
            self.undo.append(lambda: setattr(thing.bit_generator, "state", bits))
        elif type(thing).__module__.partition(".")[0] not in FOREIGN and hasattr(thing, "__dict__"):
            return [vars(thing)]
        return ()

    def _tensor(self, tensor: Tensor) -> Iterable[object]:
        if is_lazy(tensor):
            return ()
        if tensor.is_leaf:
            gradient, trained = tensor.grad, tensor.requires_grad
            self.undo.append(lambda: _leaf(tensor, gradient, trained))
        if id(tensor) in self.safe or tensor.is_meta:
            return ()
        wrapper: Any = tensor
        if is_traceable_wrapper_subclass(wrapper):  # its numbers are in the tensors that it wraps
            return [getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]]
        if tensor.layout is torch.strided:
            alias = tensor.detach()
            self.undo.append(lambda: _alias(tensor, alias))
            self._storage(alias.untyped_storage())
        return ()

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


def _drawn(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _leaf(tensor: Tensor, gradient: Tensor | None, trained: bool) -> None:
    if tensor.requires_grad is not trained:
        tensor.requires_grad_(trained)
    if tensor.grad is not gradient:
        tensor.grad = gradient


def _alias(tensor: Tensor, then: Tensor) -> None:
    """Some code assigns to `.data`: other memory in the same tensor."""
    if tensor.data_ptr() != then.data_ptr() or tensor.shape != then.shape:
        tensor.data = then
