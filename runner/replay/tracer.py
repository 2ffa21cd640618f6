"""Tracer that records where each NaN and Inf of a step was made: operation, module and line.

A dispatch mode observes every operation of forward and backward. A non-finite value keeps the
event that made it through views, in-place writes and the backward pass. A backward operation
belongs to the module that made its autograd node, a parameter's gradient to the module that owns
it, and a tensor hook to the module that registered it. Results of nodes are checked as well, since
a gradient may be made by code that dispatches nothing, such as numpy.

A constant Inf in the forward may be a mask, so its event is `weak`: it is blamed only if it reaches
the loss unchanged, or breaks an operation that masks are not for. Gradients are never masks.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from runner.data.nested import named_leaves
from runner.debug.source_line import SourceLocation, current_location
from runner.models import modes
from runner.replay.findings import FINITE, INF, NAN, TensorStats, bad_samples, level, stats

UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_")
"""Operations that return uninitialised memory."""
WRITTEN_OVER = ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_")
"""Operations that overwrite their first argument completely."""
MASKED = ("_softmax", "_log_softmax", "_scaled_dot_product", "logsumexp", "sub", "exp")
"""Prefixes of operations that take -Inf masks; NaN from only -Inf is attributed to them."""
UNSEEN = "code that torch does not see"
OWNER = "runner.replay"  # metadata key of an autograd node

Owner = tuple["Frame | None", SourceLocation | None]
"""The module call and source line of an operation; no call: the objective."""


@dataclass
class Frame:
    """A call of a module."""

    name: str  # dotted; "" for the root model
    module: nn.Module
    inputs: list[TensorStats]
    node: Any = None  # autograd node that the call recomputes for


@dataclass
class Event:
    """An operation that made NaN or Inf from finite values, or NaN from Inf."""

    operation: str  # empty: existed before the step
    frame: Frame | None  # None: outside the model, i.e. the objective
    place: SourceLocation | None
    backward: bool = False
    seed: str = ""  # name of the batch tensor that contained it
    parent: Event | None = None  # event of its operand
    outputs: list[TensorStats] = field(default_factory=list)
    made: str = "NaN"  # NaN | Inf
    of: str = "finite numbers"
    samples: list[int] = field(default_factory=list)  # affected rows of the output
    weak: bool = False  # possibly a mask, or recomputed outside any module

    def root(self) -> Event:
        """Return the first event of the chain."""
        event = self
        while event.parent is not None:
            event = event.parent
        return event


@dataclass
class _Operands:
    """The non-finite arguments of an operation."""

    level: int = FINITE  # of its tensors
    constant: int = FINITE  # of its Python numbers
    event: Event | None = None  # of the worst tensor
    only_minus_inf: bool = True


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode to enter around a step, within `watching`; `batch` maps names to tensors."""

    def __init__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.stack: list[Frame] = []
        self.raised: tuple[Exception, Frame] | None = None  # by the innermost module that raised
        self.backward_of: Frame | None = None  # of the current or last node in this backward
        self.calls: dict[str, Frame] = {}  # the last call of each module
        self.origins: dict[object, Event] = {}  # by storage
        self.parameters = {id(p): name for name, p in model.named_parameters()}
        # thread → [(autograd sequence number, frame from there on)]; numbers are per thread
        self.turns: dict[int, list[tuple[int, Frame | None]]] = {}
        self.places: dict[
            tuple[int, int], SourceLocation | None
        ] = {}  # (thread, sequence number) → line
        self.stated: Owner | None = None  # set by `at`
        for buffer in model.buffers():  # checked by `bad_weights`; non-finite ones are masks
            self.origins[_storage(buffer)] = Event("", None, None, weak=True)
        for name, tensor in batch.items():
            if level(tensor) != FINITE:
                self.origins[_storage(tensor)] = Event("", None, None, seed=name)

    def origin(self, tensor: Tensor) -> Event | None:
        """Return the first event behind the tensor's NaN or Inf; None if there is none."""
        event = self.origins.get(_storage(tensor)) if level(tensor) != FINITE else None
        root = None if event is None else event.root()
        return root if root is not None and (root.operation or root.seed) else None

    # -- operations ----------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Execute the operation, and record non-finite results."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        operation = str(func).removeprefix("aten.").removesuffix(".default")
        leaves = tree_leaves((args, {k: v for k, v in kwargs.items() if k != "out"}))
        self._tag_nodes(leaves)
        operands = self._operands(leaves[1:] if name in WRITTEN_OVER else leaves, operation)
        output = func(*args, **kwargs)
        for leaf in tree_leaves(output) if name not in UNWRITTEN else ():
            if isinstance(leaf, Tensor):
                self._record(operation, operands, leaf)
        return output

    def _operands(self, leaves: list[Any], operation: str) -> _Operands:
        operands = _Operands()
        for leaf in leaves:
            if isinstance(leaf, float) and leaf - leaf != 0.0:
                operands.constant = max(operands.constant, INF if leaf == leaf else NAN)
            elif isinstance(leaf, Tensor) and (amount := level(leaf)) != FINITE:
                event = self.origins.get(_storage(leaf)) or self._unseen(
                    leaf, f"{UNSEEN}, before {operation}"
                )
                worst = operands.event
                if worst is None or (amount, worst.weak) > (operands.level, event.weak):
                    operands.event = event
                operands.level = max(operands.level, amount)
                operands.only_minus_inf &= amount == INF and not bool((leaf == torch.inf).any())
        return operands

    def _record(self, operation: str, operands: _Operands, output: Tensor) -> None:
        """Assign to a non-finite output the event of its operands, or a new one."""
        after, event = level(output), operands.event
        is_view = event is not None and event is self.origins.get(_storage(output))
        if after == FINITE or (is_view and after <= operands.level):
            return
        before, backward = max(operands.level, operands.constant), self._in_backward()
        of = "finite numbers" if before == FINITE else "Inf"
        if operands.constant == after or (event and event.weak and after == operands.level):
            of = f"a constant {_name(after)}"
        if event is None:
            weak = of == "a constant Inf" and not backward
            event = self._event(operation, output, of, weak=weak)
        elif after > operands.level:
            masked = operands.only_minus_inf and operation.startswith(MASKED)
            own = _module(event.frame) == _module(self._owner()[0])
            is_mask = event.weak and (masked or own or not event.operation)
            event = self._event(operation, output, of, None if is_mask else event)
        elif backward and event.weak:
            event = self._event(operation, output, of)
        self.origins[_storage(output)] = event

    def _event(
        self,
        operation: str,
        output: Tensor,
        of: str,
        parent: Event | None = None,
        weak: bool = False,
    ) -> Event:
        """Create an event for the running operation; synchronises."""
        node, backward = _current_node(), self._in_backward()
        frame, place = self._owner()
        event = Event(operation, frame, place, parent=parent, of=of, weak=weak)
        result = f"result of {operation.partition('.')[0]}"
        if node is not None and not self._is_recomputed(node):
            event.operation, result = f"{operation} in {node.name()}", "gradient"
            event.backward, event.weak = True, weak or not backward
        event.outputs, event.samples = [stats(result, output)], bad_samples(output)
        event.made = _name(level(output))
        return event

    def _unseen(self, tensor: Tensor, operation: str) -> Event:
        """Create an event for a value that no traced operation made; synchronises."""
        amount = level(tensor)
        weak = amount == INF and not self._in_backward()
        of = f"{_name(amount)} that no operation made"
        event = self.origins[_storage(tensor)] = self._event(operation, tensor, of, weak=weak)
        return event

    # -- ownership -----------------------------------------------------------------------------

    def _in_backward(self) -> bool:
        """Whether a gradient is being computed, rather than a forward recomputed."""
        node = _current_node()
        return node is not None and not (torch.is_grad_enabled() or self._is_recomputed(node))

    def _is_recomputed(self, node: Any) -> bool:
        return bool(self.stack) and self.stack[-1].node is node

    def _owner(self) -> Owner:
        """Return the owner of the running operation."""
        node = _current_node()
        if self.stated is not None:
            frame, place = self.stated
            return frame, place or current_location()
        if node is None or self._is_recomputed(node):
            return self._top(), current_location()
        frame, place = self._owner_of(node)
        return frame, current_location() or place

    def _owner_of(self, node: Any) -> Owner:
        """Return the owner of an autograd node: the call that made it, or owns its parameter."""
        name = self.parameters.get(id(getattr(node, "variable", None)))
        if name is None:
            owner: Owner = node.metadata.get(OWNER, (None, None))
            return owner
        name = name.rpartition(".")[0]
        return self.calls.get(name) or self.frame(name), None

    def _tag_nodes(self, leaves: list[Any]) -> None:
        """Record the owner of each new node, and hook its results for checking."""
        thread, current = threading.get_ident(), _current_node()
        turns = self.turns.get(thread) or [(0, None)]
        if current is None or torch.is_grad_enabled():
            number = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
            if number >= turns[-1][0] and (thread, number) not in self.places:
                self.places[thread, number] = self._owner()[1]  # the last node made is this one's
        for leaf in leaves:
            node: Any = leaf.grad_fn if isinstance(leaf, Tensor) else None
            if node is None or OWNER in node.metadata:
                continue
            number = node._sequence_nr()
            frame = turns[max(0, bisect_right(turns, number, key=lambda turn: turn[0]) - 1)][1]
            place = self.places.get((thread, number))
            if frame is None and current is not None:  # recomputed outside any module
                frame = self._owner_of(current)[0]
            node.metadata[OWNER] = frame, place
            node.register_prehook(partial(self._begin, frame))
            node.register_hook(partial(self._check_returned, frame, place))

    def _begin(self, frame: Frame | None, upstream: Any) -> None:
        self.backward_of = frame

    def _check_returned(
        self, frame: Frame | None, place: SourceLocation | None, values: Any, upstream: Any = None
    ) -> None:
        """Create events of this owner for non-finite values that have none yet."""
        with _disable_current_modes(), self.at(frame, place), torch.no_grad():
            for value in values:
                if isinstance(value, Tensor) and level(value) != FINITE:
                    event = self.origins.get(_storage(value))
                    if event is None or (event.weak and self._in_backward()):
                        self._unseen(value, UNSEEN)

    # -- modules -------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Track which module runs, and which registers a tensor hook."""
        with ExitStack() as stack:
            for name, module in modes.hookable(self.model):
                before = module._compiled_call_impl
                call = partial(self._call, name, before or module._call_impl)
                module._compiled_call_impl = call  # runs around all hooks of the module
                stack.callback(setattr, module, "_compiled_call_impl", before)
            register = Tensor.register_hook

            def register_hook(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
                return register(tensor, partial(self._call_hook, self._top(), hook))  # type: ignore[no-untyped-call]

            Tensor.register_hook = register_hook  # type: ignore[method-assign]
            stack.callback(setattr, Tensor, "register_hook", register)
            yield

    def _call(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._check_returned(self._top(), None, tree_leaves((args, kwargs)))
        frame = self.calls[name] = self.frame(name, named(args, kwargs))
        frame.node = _current_node()
        self.stack.append(frame)
        self._mark(frame)
        if frame.node is None:
            self.backward_of = None
        try:
            output = call(*args, **kwargs)
            leaves = tree_leaves(output)
            self._tag_nodes(leaves)
            self._check_returned(frame, None, leaves)
            return output
        except Exception as error:
            if self.raised is None or self.raised[0] not in (error, error.__context__):
                self.raised = error, frame
            raise
        finally:
            self.stack.pop()
            self._mark(self._top())

    def _call_hook(self, frame: Frame | None, hook: Callable[[Tensor], Any], grad: Tensor) -> Any:
        with self.at(frame, None):
            result = hook(grad)
        self._check_returned(frame, None, [result])
        return result

    def frame(self, name: str, inputs: dict[str, Any] | None = None) -> Frame:
        """Return the call of a module, with statistics of its inputs."""
        with _disable_current_modes():
            numbers = [stats(n, t) for n, t in named_leaves(inputs or {})]
        return Frame(name, self.model.get_submodule(name), numbers)

    def _top(self) -> Frame | None:
        return self.stack[-1] if self.stack else None

    def _mark(self, frame: Frame | None) -> None:
        """Assign autograd nodes created from now on to `frame`."""
        number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self.turns.setdefault(threading.get_ident(), [(0, None)]).append((number, frame))

    @contextmanager
    def at(self, frame: Frame | None, place: SourceLocation | None) -> Iterator[None]:
        """Assign operations within to `frame`, and to `place` if known."""
        before, self.stated = self.stated, (frame, place)
        self._mark(frame)
        try:
            yield
        finally:
            self.stated = before
            self._mark(self._top())


def named(args: Iterable[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return call arguments by name; positional ones are input, input2, …"""
    places = {"input" if i == 0 else f"input{i + 1}": value for i, value in enumerate(args)}
    return {**places, **kwargs}


def _module(frame: Frame | None) -> str | None:
    return None if frame is None else frame.name


def _current_node() -> Any:
    return torch._C._current_autograd_node()


def _name(amount: int) -> str:
    return "NaN" if amount == NAN else "Inf"


def _storage(tensor: Tensor) -> object:
    """Return a key for the tensor's storage that is not reused by later storages."""
    if tensor.is_sparse:
        tensor = tensor._values()
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except (NotImplementedError, RuntimeError):  # no storage
        return id(tensor)
