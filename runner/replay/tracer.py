"""Watches every operation of a step, and remembers where each NaN and Inf came from.

Not every one is a fault: a mask is filled with -Inf on purpose, and what is taken of log(0) may be
thrown away again. So each value that is not finite carries along the event that it began with,
through views, in-place writes and the backward pass; asked about is the one that the loss, or a
gradient, ended up with. It looks at each operation's inputs and outputs: for replays only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runner import modes
from runner.replay import line
from runner.replay.findings import Stats
from runner.replay.line import Place
from runner.replay.statistics import FINITE, INF, NAN, bad_samples, level, stats, tensors

UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_")
"""What these return is whatever the memory held."""
WRITTEN_OVER = ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_")
"""What their first argument held is gone."""


@dataclass
class Frame:
    """A call of a module."""

    name: str  # dotted; empty for the model itself
    module: nn.Module
    inputs: list[Stats]


@dataclass
class Event:
    """An operation that made something not finite of finite numbers, NaN of Inf, or that is the
    first to see what no operation made.
    """

    operation: str
    frame: Frame | None  # None: outside the model, so the objective
    place: Place | None
    backward: bool = False
    seed: str = ""  # it came from outside: which tensor
    parent: Event | None = None  # where its own input's Inf came from
    outputs: list[Stats] = field(default_factory=list)
    made: str = "NaN"  # NaN | Inf
    of: str = "finite numbers"
    samples: list[int] = field(default_factory=list)  # rows of the output that it is in

    def root(self) -> Event:
        """Where it all began."""
        event = self
        while event.parent is not None:
            event = event.parent
        return event


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Enter it around a step; `watching` a model tells it which module runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stack: list[Frame] = []
        self.raised: Frame | None = None  # innermost module that let an exception out
        self.calls: dict[str, Frame] = {}  # the last of each module
        self.origins: dict[int, Event | None] = {}  # by storage; None: on purpose
        self.at: dict[int, tuple[Frame | None, Place | None]] = {}  # by autograd's sequence number
        self.stated: tuple[Frame | None, Place | None] | None = None  # by who knows it better
        self.resting = False

    def seed(self, name: str, tensor: Tensor) -> None:
        """Say where a tensor comes from that was there before the step."""
        if level(tensor) != FINITE:
            self.origins[_storage(tensor)] = Event("", None, None, seed=name)

    def on_purpose(self, tensor: Tensor) -> None:
        """Say that what is not finite in it is meant so."""
        self.origins[_storage(tensor)] = None

    def origin(self, tensor: Tensor) -> Event | None:
        """Where what is not finite in it began."""
        event = self.origins.get(_storage(tensor)) if level(tensor) != FINITE else None
        return None if event is None else event.root()

    # -- operations ----------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute it, and look at what came out."""
        kwargs = kwargs or {}
        if self.resting:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        node: Any = torch._C._current_autograd_node()
        if node is None:  # the node that it belongs to was the last one made
            number = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
            if number not in self.at:
                self.at[number] = self._whereabouts()
        before, origin, told, written = FINITE, None, False, False
        leaves = tree_leaves((args, kwargs))
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                if i == 0 and name in WRITTEN_OVER:
                    continue
                found = level(leaf)
                before = max(before, found)
                known = self.origins.get(_storage(leaf))
                if found != FINITE and origin is None:
                    origin, told = known, told or _storage(leaf) in self.origins
            elif isinstance(leaf, float) and leaf - leaf != 0.0:
                before, told = max(before, INF), True  # written there by hand
                written = written or leaf != leaf  # NaN: nobody does that to mask something
        output = func(*args, **kwargs)
        if name in UNWRITTEN:
            return output
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                after = level(leaf)
                if after != FINITE:
                    begins = after > before
                    if begins or not told:
                        said = str(func).removeprefix("aten.").removesuffix(".default")
                        said = said if begins else f"code that torch does not see, before {said}"
                        origin, told = self._event(said, node, leaf, origin), True
                        origin.made = "NaN" if after == NAN else "Inf"
                        if written or not begins:
                            origin.of = f"{origin.made} that no operation made"
                        else:
                            origin.of = "finite numbers" if before == FINITE else "Inf"
                    self.origins[_storage(leaf)] = origin
        return output

    def _event(self, name: str, node: Any, output: Tensor, parent: Event | None) -> Event:
        frame, place = self._whereabouts()
        if node is not None:
            of_forward = self.at.get(node._sequence_nr())
            if of_forward is not None:
                frame, place = of_forward[0], place or of_forward[1]
            name = f"{name} in {node.name()}"
        event = Event(name, frame, place, node is not None, parent=parent)
        made = f"result of {name.partition('.')[0]}" if node is None else "gradient"
        event.outputs = [stats(made, output)]
        event.samples = bad_samples(output)
        return event

    def _whereabouts(self) -> tuple[Frame | None, Place | None]:
        if self.stated is not None:
            return self.stated
        return (self.stack[-1] if self.stack else None), line.here()

    # -- modules -------------------------------------------------------------------------------

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Follow which of the model's modules runs."""
        handles = []
        for name, module in modes.hookable(model):
            handles.append(module.register_forward_pre_hook(self._entering(name), with_kwargs=True))
            handles.append(
                module.register_forward_hook(self._leaving(name), with_kwargs=True,
                                             always_call=True)
            )  # fmt: skip
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            with self._quietly():
                found = [stats(n, t) for n, t in tensors(named(args, kwargs))]
            self.calls[name] = Frame(name, module, found)
            self.stack.append(self.calls[name])

        return enter

    def _leaving(self, name: str) -> Any:
        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            while self.stack and self.stack[-1].module is not module:  # one was broken off
                self.stack.pop()
            frame = self.stack.pop() if self.stack else None
            if sys.exc_info()[1] is not None:
                self.raised = self.raised or frame
                return

        return leave

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        before, self.resting = self.resting, True
        try:
            yield
        finally:
            self.resting = before


def named(args: Iterable[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a module is called with, by name or position."""
    places = {"input" if i == 0 else f"input{i + 1}": value for i, value in enumerate(args)}
    return {**places, **kwargs}


def _storage(tensor: Tensor) -> int:
    if tensor.is_sparse:
        tensor = tensor._values()
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (NotImplementedError, RuntimeError):  # it has none
        return id(tensor)
