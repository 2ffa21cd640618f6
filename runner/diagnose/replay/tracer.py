"""Tracer that records where each NaN and Inf of a step was made: operation, module and line.

A dispatch mode observes every operation of forward and backward. A non-finite value keeps the
event that made it through views, in-place writes and the backward pass. A backward operation
belongs to the module that made its autograd node, a parameter's gradient to the module that owns
it, and a tensor hook to the module that registered it. Results of nodes are checked as well, since
a gradient may be made by code that dispatches nothing, such as numpy.

A constant Inf in the forward may be a mask, so its event has `maybe_mask` set: it is blamed only if
it reaches the loss unchanged, or breaks an operation that masks are not for. Gradients are never
masks.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from runner.core.interfaces.nested import named_leaves
from runner.core.models import modes
from runner.diagnose.replay.results import (
    FINITE,
    INF,
    NAN,
    SourceLocation,
    TensorStats,
    current_location,
    finiteness,
    non_finite_samples,
    tensor_stats,
)

EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_")
"""Operations that return uninitialised memory."""
OVERWRITING = ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_")
"""Operations that overwrite their first argument completely."""
MASKING = ("_softmax", "_log_softmax", "_scaled_dot_product", "logsumexp", "sub", "exp")
"""Prefixes of operations that take -Inf masks; NaN from only -Inf is attributed to them."""
UNTRACED = "code that torch does not see"
OWNER_KEY = "runner.diagnose.replay"  # metadata key of an autograd node

T = TypeVar("T")
Owner = tuple["ModuleFrame | None", SourceLocation | None]
"""The module call and source line of an operation; no call: the objective."""


@dataclass
class ModuleFrame:
    """A call of a module, on the stack of running modules."""

    name: str  # dotted; "" for the root model
    module: nn.Module
    inputs: list[TensorStats]
    node: Any = None  # autograd node that the call recomputes for


@dataclass
class NonFiniteEvent:
    """An operation that made NaN or Inf from finite values, or NaN from Inf."""

    operation: str  # empty: existed before the step
    frame: ModuleFrame | None  # None: outside the model, i.e. the objective
    location: SourceLocation | None
    backward: bool = False
    batch_tensor: str = ""  # name of the batch tensor that contained it
    parent: NonFiniteEvent | None = None  # event of its operand
    outputs: list[TensorStats] = field(default_factory=list)
    kind: str = "NaN"  # NaN | Inf
    source: str = "finite numbers"
    samples: list[int] = field(default_factory=list)  # affected rows of the output
    maybe_mask: bool = False  # possibly a mask, or recomputed outside any module

    def root(self) -> NonFiniteEvent:
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
    event: NonFiniteEvent | None = None  # of the worst tensor
    storage: object = None  # of that tensor
    only_minus_inf: bool = True


class NodeOwners(Generic[T]):
    """Who made which autograd nodes: ranges of their sequence numbers, which each thread counts."""

    def __init__(self, outermost: T) -> None:
        self.outermost = outermost
        self.threads = threading.local()

    def assign(self, owner: T) -> None:
        """Assign the nodes that this thread makes from now on."""
        number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self._ranges().append((number, owner))

    def of(self, node: Any) -> T:
        """Return who made a node of this thread."""
        ranges = self._ranges()
        position = bisect_right(ranges, node._sequence_nr(), key=lambda entry: entry[0])
        return ranges[max(0, position - 1)][1]

    @property
    def newest(self) -> int:
        """The number of the first node of the newest owner."""
        return self._ranges()[-1][0]

    def _ranges(self) -> list[tuple[int, T]]:
        ranges: list[tuple[int, T]] = self.threads.__dict__.setdefault(
            "ranges", [(0, self.outermost)]
        )
        return ranges


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode to enter around a step, within `track_modules`; `batch` has tensors by name."""

    def __init__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.stack: list[ModuleFrame] = []
        # an exception, and the innermost module that raised it
        self.raised: tuple[Exception, ModuleFrame] | None = None
        self.backward_frame: ModuleFrame | None = None  # of the last node in this backward
        self.calls: dict[str, ModuleFrame] = {}  # the last call of each module
        # storage → events with the positions of their values, as views may change parts of it
        self.origins: dict[object, list[tuple[NonFiniteEvent, Tensor | None]]] = {}
        self.parameters = {id(p): name for name, p in model.named_parameters()}
        self.frames = NodeOwners[ModuleFrame | None](None)
        # (thread, sequence number) → line
        self.locations: dict[tuple[int, int], SourceLocation | None] = {}
        self.forced_owner: Owner | None = None  # set by `assign_to`
        for buffer in model.buffers():  # checked by `find_bad_weights`; non-finite ones are masks
            mask = NonFiniteEvent("", None, None, maybe_mask=True)
            self.origins[_storage_key(buffer)] = [(mask, None)]
        for name, tensor in batch.items():
            if finiteness(tensor) != FINITE:
                self._assign(tensor, NonFiniteEvent("", None, None, batch_tensor=name))

    def origin(self, tensor: Tensor) -> NonFiniteEvent | None:
        """Return the first event behind the tensor's NaN or Inf; None if there is none."""
        event = self._find(tensor) if finiteness(tensor) != FINITE else None
        root = None if event is None else event.root()
        return root if root is not None and (root.operation or root.batch_tensor) else None

    def _assign(self, tensor: Tensor, event: NonFiniteEvent) -> None:
        self.origins.setdefault(_storage_key(tensor), []).append((event, _positions(tensor)))

    def _find(self, tensor: Tensor) -> NonFiniteEvent | None:
        """Return the last event that made the first of the tensor's worst values."""
        events = self.origins.get(_storage_key(tensor), [])
        if len(events) > 1 and (positions := _positions(tensor, worst=True)) is not None:
            for event, made in reversed(events):
                if made is None or bool(torch.isin(positions[:1], made).any()):
                    return event
        return events[-1][0] if events else None

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
        operands = self._operands(leaves[1:] if name in OVERWRITING else leaves, operation)
        output = func(*args, **kwargs)
        for leaf in tree_leaves(output) if name not in EMPTY else ():
            if isinstance(leaf, Tensor):
                self._record(operation, operands, leaf)
        return output

    def _operands(self, leaves: list[Any], operation: str) -> _Operands:
        operands = _Operands()
        for leaf in leaves:
            if isinstance(leaf, float) and leaf - leaf != 0.0:
                operands.constant = max(operands.constant, INF if leaf == leaf else NAN)
            elif isinstance(leaf, Tensor) and (level := finiteness(leaf)) != FINITE:
                text = f"{UNTRACED}, before {operation}"
                event = self._find(leaf) or self._record_untraced(leaf, text)
                worst = operands.event
                if worst is None or (level, worst.maybe_mask) > (operands.level, event.maybe_mask):
                    operands.event, operands.storage = event, _storage_key(leaf)
                operands.level = max(operands.level, level)
                operands.only_minus_inf &= level == INF and not bool((leaf == torch.inf).any())
        return operands

    def _record(self, operation: str, operands: _Operands, output: Tensor) -> None:
        """Assign to a non-finite output the event of its operands, or a new one."""
        after, event = finiteness(output), operands.event
        is_view = event is not None and operands.storage == _storage_key(output)
        if after == FINITE or (is_view and after <= operands.level):
            return
        before, backward = max(operands.level, operands.constant), self._in_backward()
        source = "finite numbers" if before == FINITE else "Inf"
        if operands.constant == after or (event and event.maybe_mask and after == operands.level):
            source = f"a constant {_nan_or_inf(after)}"
        if event is None:
            maybe_mask = source == "a constant Inf" and not backward
            event = self._event(operation, output, source, maybe_mask=maybe_mask)
        elif after > operands.level:
            masked = operands.only_minus_inf and operation.startswith(MASKING)
            same_module = _frame_name(event.frame) == _frame_name(self._owner()[0])
            is_mask = event.maybe_mask and (masked or same_module or not event.operation)
            event = self._event(operation, output, source, None if is_mask else event)
        elif backward and event.maybe_mask:
            event = self._event(operation, output, source)
        self._assign(output, event)

    def _event(
        self,
        operation: str,
        output: Tensor,
        source: str,
        parent: NonFiniteEvent | None = None,
        maybe_mask: bool = False,
    ) -> NonFiniteEvent:
        """Create an event for the running operation; synchronises."""
        node, backward = _current_node(), self._in_backward()
        frame, location = self._owner()
        event = NonFiniteEvent(
            operation, frame, location, parent=parent, source=source, maybe_mask=maybe_mask
        )
        result = f"result of {operation.partition('.')[0]}"
        if node is not None and not self._is_recomputed(node):
            event.operation, result = f"{operation} in {node.name()}", "gradient"
            event.backward, event.maybe_mask = True, maybe_mask or not backward
        event.outputs, event.samples = [tensor_stats(result, output)], non_finite_samples(output)
        event.kind = _nan_or_inf(finiteness(output))
        return event

    def _record_untraced(self, tensor: Tensor, operation: str) -> NonFiniteEvent:
        """Create an event for a value that no traced operation made; synchronises."""
        level = finiteness(tensor)
        maybe_mask = level == INF and not self._in_backward()
        source = f"{_nan_or_inf(level)} that no operation made"
        event = self._event(operation, tensor, source, maybe_mask=maybe_mask)
        self._assign(tensor, event)
        return event

    # -- ownership -----------------------------------------------------------------------------

    def _in_backward(self) -> bool:
        """Whether a gradient is being computed, rather than a forward recomputed."""
        node = _current_node()
        return node is not None and not (torch.is_grad_enabled() or self._is_recomputed(node))

    def _is_recomputed(self, node: Any) -> bool:
        return bool(self.stack) and self.stack[-1].node is node

    def _owner(self) -> Owner:
        node = _current_node()
        if self.forced_owner is not None:
            frame, location = self.forced_owner
            return frame, location or current_location()
        if node is None or self._is_recomputed(node):
            return self._current_frame(), current_location()
        frame, location = self._owner_of(node)
        return frame, current_location() or location

    def _owner_of(self, node: Any) -> Owner:
        """Return the owner of an autograd node: the call that made it, or owns its parameter."""
        name = self.parameters.get(id(getattr(node, "variable", None)))
        if name is None:
            owner: Owner = node.metadata.get(OWNER_KEY, (None, None))
            return owner
        name = name.rpartition(".")[0]
        return self.calls.get(name) or self.frame(name), None

    def _tag_nodes(self, leaves: list[Any]) -> None:
        """Record the owner of each new node, and hook its results for checking."""
        thread, current = threading.get_ident(), _current_node()
        if current is None or torch.is_grad_enabled():
            number = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
            if number >= self.frames.newest and (thread, number) not in self.locations:
                # the last node made is this one's
                self.locations[thread, number] = self._owner()[1]
        for leaf in leaves:
            node: Any = leaf.grad_fn if isinstance(leaf, Tensor) else None
            if node is None or OWNER_KEY in node.metadata:
                continue
            number = node._sequence_nr()
            frame = self.frames.of(node)
            location = self.locations.get((thread, number))
            if frame is None and current is not None:  # recomputed outside any module
                frame = self._owner_of(current)[0]
            node.metadata[OWNER_KEY] = frame, location
            node.register_prehook(partial(self._enter_node, frame))
            node.register_hook(partial(self._check_returned, frame, location))

    def _enter_node(self, frame: ModuleFrame | None, upstream: Any) -> None:
        self.backward_frame = frame

    def _check_returned(
        self,
        frame: ModuleFrame | None,
        location: SourceLocation | None,
        values: Any,
        upstream: Any = None,
    ) -> None:
        """Create events of this owner for non-finite values that have none yet."""
        with _disable_current_modes(), self.assign_to(frame, location), torch.no_grad():
            for value in values:
                if isinstance(value, Tensor) and finiteness(value) != FINITE:
                    event = self._find(value)
                    if event is None or (event.maybe_mask and self._in_backward()):
                        self._record_untraced(value, UNTRACED)

    # -- modules -------------------------------------------------------------------------------

    @contextmanager
    def track_modules(self) -> Iterator[None]:
        """Track which module runs, and which registers a tensor hook."""
        with ExitStack() as stack:
            for name, module in modes.hookable(self.model):
                before = module._compiled_call_impl
                call = partial(self._call, name, before or module._call_impl)
                module._compiled_call_impl = call  # runs around all hooks of the module
                stack.callback(setattr, module, "_compiled_call_impl", before)
            register = Tensor.register_hook

            def register_hook(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
                return register(tensor, partial(self._call_hook, self._current_frame(), hook))  # type: ignore[no-untyped-call]

            Tensor.register_hook = register_hook  # type: ignore[method-assign]
            stack.callback(setattr, Tensor, "register_hook", register)
            yield

    def _call(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._check_returned(self._current_frame(), None, tree_leaves((args, kwargs)))
        frame = self.calls[name] = self.frame(name, name_arguments(args, kwargs))
        frame.node = _current_node()
        self.stack.append(frame)
        self.frames.assign(frame)
        if frame.node is None:
            self.backward_frame = None
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
            self.frames.assign(self._current_frame())

    def _call_hook(
        self, frame: ModuleFrame | None, hook: Callable[[Tensor], Any], grad: Tensor
    ) -> Any:
        with self.assign_to(frame, None):
            result = hook(grad)
        self._check_returned(frame, None, [result])
        return result

    def frame(self, name: str, inputs: dict[str, Any] | None = None) -> ModuleFrame:
        """Return the call of a module, with statistics of its inputs."""
        with _disable_current_modes():
            numbers = [tensor_stats(n, t) for n, t in named_leaves(inputs or {})]
        return ModuleFrame(name, self.model.get_submodule(name), numbers)

    def _current_frame(self) -> ModuleFrame | None:
        return self.stack[-1] if self.stack else None

    @contextmanager
    def assign_to(
        self, frame: ModuleFrame | None, location: SourceLocation | None
    ) -> Iterator[None]:
        """Assign operations within to `frame`, and to `location` if known."""
        before, self.forced_owner = self.forced_owner, (frame, location)
        self.frames.assign(frame)
        try:
            yield
        finally:
            self.forced_owner = before
            self.frames.assign(self._current_frame())


def name_arguments(args: Iterable[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return call arguments by name; positional ones are input, input2, …"""
    positional = {"input" if i == 0 else f"input{i + 1}": value for i, value in enumerate(args)}
    return {**positional, **kwargs}


def _frame_name(frame: ModuleFrame | None) -> str | None:
    return None if frame is None else frame.name


def _current_node() -> Any:
    return torch._C._current_autograd_node()


def _nan_or_inf(level: int) -> str:
    return "NaN" if level == NAN else "Inf"


def _positions(tensor: Tensor, worst: bool = False) -> Tensor | None:
    """Return the bytes of the storage where non-finite values begin; None if unknown.

    With `worst` those of NaN, if there is any.
    """
    try:
        values = (tensor._values() if tensor.is_sparse else tensor).detach()
        mask = values.isnan()
        if not worst or not bool(mask.any()):
            mask = ~values.isfinite()
        strides = torch.tensor(values.stride(), dtype=torch.int64)
        elements = (mask.nonzero().cpu() * strides).sum(1) + int(values.storage_offset())
        return elements * int(values.element_size())
    except (NotImplementedError, RuntimeError):  # no strides, or a dtype without NaN
        return None


def _storage_key(tensor: Tensor) -> object:
    """Return a key for the tensor's storage that is not reused by later storages."""
    if tensor.is_sparse:
        tensor = tensor._values()
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except (NotImplementedError, RuntimeError):  # no storage
        return id(tensor)
