"""A shrunk copy of a model, and what its parts get in one forward over real data."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from runner import modes
from runner.batch import Batch, call
from runner.debug.gradcheck.derivatives import Inconclusive
from runner.debug.gradcheck.subjects import (
    cast,
    cast_all,
    cast_objective,
    kept,
    mapped,
    seed,
    takes_context,
    tensors,
)
from runner.record.text import shorten

OBJECTIVE = "objective"  # who calls what is called outside the model

Loss = Callable[[Any, Any], Any]


@dataclass
class Seen:
    """What one forward of the copy showed."""

    model: nn.Module
    target: Any
    output: Any = None
    loss: Any = None
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    functions: dict[tuple[type, str], tuple[Any, ...]] = field(default_factory=dict)


def shrunk(model: nn.Module) -> nn.Module:
    """A copy on the CPU, uncompiled, with nothing of it shared.

    A forward that was put in place of a class's own, and is not bound to its module, is left out:
    it would run the original's weights.
    """
    stand_ins = {}
    for module in model.modules():
        own = vars(module).get("forward")
        if own is not None and not (isinstance(own, MethodType) and own.__self__ is module):
            stand_ins[module] = vars(module).pop("forward")
    try:
        return deepcopy(model).to("cpu")
    finally:
        for module, own in stand_ins.items():
            vars(module)["forward"] = own


def observe(
    model: nn.Module, batch: Batch, objective: Loss | None, samples: int, length: int
) -> Seen:
    """Run the copy over a small part of the batch; raises Inconclusive where it cannot run."""
    trouble: Exception | None = None
    for dtype in (torch.float64, torch.float32):
        cast(model, dtype)
        loss = None if objective is None else cast_objective(objective, dtype)
        for part in _smaller(batch, samples, length):
            part = cast_all(part, dtype)
            try:
                seen = _forward(model, part, loss, ())
                written = _functions((seen.output, seen.loss))
                return _forward(model, part, loss, written) if written else seen
            except Exception as error:  # whatever a model raises that wants all of its batch
                trouble = error
    raise Inconclusive(f"the model does not run on a copy of its own: {gist(trouble)}")


def _forward(
    model: nn.Module, batch: Batch, objective: Loss | None, functions: Sequence[type]
) -> Seen:
    """One forward, noting what each module and each of `functions` is called with."""
    seen, stack = Seen(model, batch[1]), [""]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def enter(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            stack.append(name)
            if name not in seen.calls:
                seen.calls[name] = kept(args), kept(kwargs)

        return note

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        stack.pop()

    with ExitStack() as scope:
        scope.enter_context(torch.enable_grad())
        scope.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in modes.hookable(model):
            hook = module.register_forward_pre_hook(enter(name), prepend=True, with_kwargs=True)
            scope.callback(hook.remove)
            scope.callback(module.register_forward_hook(leave, always_call=True).remove)
        for function in functions:
            scope.enter_context(_watched(function, stack, seen))
        seed()
        seen.output = call(model, batch[0])
        if objective is not None:
            stack[:] = [OBJECTIVE]
            seen.loss = objective(seen.output, batch[1])
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    return seen


@contextmanager
def _watched(function: Any, stack: list[str], seen: Seen) -> Iterator[None]:
    """Note what it is called with; `apply` may be known by any name, so its `forward` does."""
    own, forward = vars(function).get("forward"), function.forward
    skip = 1 if takes_context(function) else 0

    def noting(*args: Any) -> Any:
        seen.functions.setdefault((function, stack[-1]), kept(args[skip:]))
        return forward(*args)

    function.forward = staticmethod(noting)
    try:
        yield
    finally:
        if own is None:
            del function.forward
        else:
            function.forward = own


def _functions(outputs: Any) -> list[type]:
    """The functions written in Python in the graph behind these, without torch's own."""
    waiting: list[Any] = [t.grad_fn for t in tensors(outputs) if t.grad_fn is not None]
    seen = set(waiting)
    found: dict[type, None] = {}
    while waiting:
        node = waiting.pop()
        if issubclass(type(node), BackwardCFunction):
            function = node._forward_cls
            if foreign_to_torch(function):
                found.setdefault(function)
        for behind, _ in node.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                waiting.append(behind)
    return list(found)


def foreign_to_torch(cls: type) -> bool:
    """Whether somebody else wrote it."""
    return cls.__module__.partition(".")[0] != "torch"


@contextmanager
def noise_kept() -> Iterator[None]:
    """Random numbers drawn in here are drawn again outside."""
    python, numpy, torch_ = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_)


def gist(error: BaseException | None) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {shorten(str(error), 200)}"


def _smaller(batch: Batch, samples: int, length: int) -> Iterator[Batch]:
    """Few samples of short sequences; few samples; the batch."""
    few = mapped(batch, lambda t: t[:samples] if t.ndim else t)
    tokens = [t for t in tensors(few[0]) if t.ndim == 2 and not t.is_floating_point()]
    if tokens and tokens[0].shape[1] > length:
        long = tokens[0].shape[1]
        yield mapped(few, lambda t: t[:, :length] if t.ndim >= 2 and t.shape[1] == long else t)
    yield few
    yield batch
