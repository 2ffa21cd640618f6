"""What gradcheck checks: functions, modules and the objective, each with its arguments of one
forward of a shrunk copy of the model over real data.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, is_dataclass, replace
from inspect import Parameter, signature
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, Function
from torch.utils._pytree import tree_map

from runner.data.batch import Batch, call
from runner.debug.derivatives import Inconclusive
from runner.models import modes
from runner.record.text import shorten

OBJECTIVE = "objective"  # the caller of what is called outside the model
SEED = 0  # dropout drops the same at each call
COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}
POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)

Loss = Callable[[Any, Any], Any]
Build = Callable[[torch.dtype], tuple[Callable[[], Any], dict[str, Tensor]]]


@dataclass
class Subject:
    """Something whose backward can be checked: its call, and the leaves that it depends on."""

    kind: str  # function | objective | module
    name: str  # of the module, or the one that calls the function
    of: str  # class
    build: Build
    module: nn.Module | None = None
    like: int = 1  # how many of the same class and shapes it stands for

    def prepare(self, dtype: torch.dtype) -> tuple[Callable[[], list[Tensor]], dict[str, Tensor]]:
        """A function that computes its outputs, the same at each call, and its leaves."""
        run, leaves = self.build(dtype)
        leaves = {name: leaf for name, leaf in leaves.items() if leaf.numel()}
        if not leaves:
            raise Inconclusive("nothing that it gets or has needs a gradient")
        buffers = [] if self.module is None else list(self.module.buffers())
        before = [buffer.clone() for buffer in buffers]

        def evaluate() -> list[Tensor]:
            with torch.no_grad():
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)
            _seed()
            return [t for t in tensors(run()) if t.is_floating_point() or t.is_complex()]

        return evaluate, leaves


def function_subject(function: Any, owner: str, args: tuple[Any, ...], like: int) -> Subject:
    """An autograd function by itself, with its arguments."""

    def build(dtype: torch.dtype) -> tuple[Callable[[], Any], dict[str, Tensor]]:
        names = _argument_names(function.forward, _has_context(function), len(args))
        leaves, given = _leaves(args, names, dtype)
        return lambda: function.apply(*_clones(given)), leaves

    return Subject("function", owner, function.__name__, build, like=like)


def module_subject(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], like: int = 1
) -> Subject:
    """A module with its arguments."""

    def build(dtype: torch.dtype) -> tuple[Callable[[], Any], dict[str, Tensor]]:
        cast_module(module, dtype)
        leaves, given = _leaves(args, _argument_names(module.forward, False, len(args)), dtype)
        more, named = _leaves(tuple(kwargs.values()), list(kwargs), dtype)
        leaves |= more | {n: p for n, p in module.named_parameters() if p.requires_grad}
        return lambda: module(
            *_clones(given), **dict(zip(kwargs, _clones(named), strict=True))
        ), leaves

    return Subject("module", name, type(module).__name__, build, module, like)


def objective_subject(objective: Any, name: str, output: Any, target: Any) -> Subject:
    """The loss of the model's output."""
    output = _detached(output)

    def build(dtype: torch.dtype) -> tuple[Callable[[], Any], dict[str, Tensor]]:
        own = _cast_objective(objective, dtype)
        leaves, given = _leaves((output,), ["output"], dtype)
        wanted = _cast_all(target, dtype)
        return lambda: own(_clones(given)[0], wanted), leaves

    return Subject("objective", OBJECTIVE, name, build)


def _argument_names(function: Any, has_context: bool, count: int) -> list[str]:
    """The names of its arguments, as far as they can be known."""
    try:
        known = [p for p in signature(function).parameters.values() if p.kind in POSITIONAL]
    except (TypeError, ValueError):
        known = []
    names = [p.name for p in known[has_context:]][:count]
    return names + [f"input {i}" for i in range(len(names), count)]


def _leaves(
    values: Sequence[Any], names: Sequence[str], dtype: torch.dtype
) -> tuple[dict[str, Tensor], tuple[Any, ...]]:
    """Each tensor that needs a gradient as a leaf of its own, by name, and the values with them."""
    leaves: dict[str, Tensor] = {}
    given = []
    for name, value in zip(names, values, strict=True):

        def leaf(tensor: Tensor, name: str = name) -> Tensor:
            made = _cast(tensor.detach(), dtype).clone().requires_grad_(tensor.requires_grad)
            if tensor.requires_grad:
                leaves[name if name not in leaves else f"{name} ({len(leaves)})"] = made
            return made

        given.append(map_tensors(value, leaf))
    return leaves, tuple(given)


def _clones(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies in the graph, since some functions write into their arguments."""
    return tuple(map_tensors(v, lambda t: t.clone() if t.requires_grad else t) for v in given)


def _detached(value: Any) -> Any:
    """A copy as it is now, with each tensor's `requires_grad`."""
    return map_tensors(value, lambda t: t.detach().clone().requires_grad_(t.requires_grad))


# -- nests, types and random numbers ----------------------------------------------------------


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The nest with each tensor changed; the fields of a dataclass are part of the nest."""

    def leaf(item: Any) -> Any:
        if isinstance(item, Tensor):
            return change(item)
        if is_dataclass(item) and not isinstance(item, type):
            return replace(item, **{k: map_tensors(v, change) for k, v in vars(item).items()})
        return item

    return tree_map(leaf, value)


def tensors(value: Any) -> list[Tensor]:
    """Every tensor in the nest."""
    found: list[Tensor] = []
    map_tensors(value, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.is_complex():
        return tensor.to(COMPLEX[dtype])
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _cast_all(value: Any, dtype: torch.dtype) -> Any:
    """Every tensor of the nest on the CPU, its floats in that type."""
    return map_tensors(value, lambda t: _cast(t.detach().cpu(), dtype))


def cast_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Every float of it in that type; complex numbers stay complex."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = _cast(tensor.data, dtype)


def _cast_objective(objective: Any, dtype: torch.dtype) -> Any:
    """A copy of it on the CPU, with its class weights and the like in that type."""
    own = deepcopy(objective)
    parts = {"": own, **getattr(own, "__dict__", {})}
    for key, value in parts.items():
        if isinstance(value, nn.Module):
            cast_module(value.to("cpu"), dtype)
        elif isinstance(value, Tensor):
            setattr(own, key, _cast(value.cpu(), dtype))
    return own


def _seed() -> None:
    """Seed the host's generators; those of a device are the run's, and nothing here is on it."""
    torch.default_generator.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Put the state of the host's generators back at the end."""
    python, numpy, torch_ = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_)


def error_line(error: BaseException | None) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {shorten(str(error), 200)}"


# -- one forward ------------------------------------------------------------------------------


@dataclass
class Recording:
    """The calls of one forward of the copy: first arguments of each module and function."""

    model: nn.Module
    target: Any
    output: Any = None
    loss: Any = None
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    functions: dict[tuple[type, str], tuple[Any, ...]] = field(default_factory=dict)


def copy_model(model: nn.Module) -> nn.Module:
    """A copy on the CPU, uncompiled, with nothing of it shared.

    A forward that was put in place of a class's own, and is not bound to its module, is left out:
    it would run the original's weights.
    """
    replaced = {}
    for module in model.modules():
        own = vars(module).get("forward")
        if own is not None and not (isinstance(own, MethodType) and own.__self__ is module):
            replaced[module] = vars(module).pop("forward")
    try:
        return deepcopy(model).to("cpu")
    finally:
        for module, own in replaced.items():
            vars(module)["forward"] = own


def record_forward(
    model: nn.Module, batch: Batch, objective: Loss | None, samples: int, length: int
) -> Recording:
    """Run the copy over a small part of the batch; raises Inconclusive where it cannot run."""
    trouble: Exception | None = None
    for dtype in (torch.float64, torch.float32):
        cast_module(model, dtype)
        loss = None if objective is None else _cast_objective(objective, dtype)
        for part in _smaller(batch, samples, length):
            part = _cast_all(part, dtype)
            try:
                recording = _forward(model, part, loss, ())
                functions = _python_functions((recording.output, recording.loss))
                return _forward(model, part, loss, functions) if functions else recording
            except Exception as error:  # whatever a model raises that wants all of its batch
                trouble = error
    raise Inconclusive(f"the model does not run on a copy of its own: {error_line(trouble)}")


def _smaller(batch: Batch, samples: int, length: int) -> Iterator[Batch]:
    """Few samples of short sequences; few samples; the batch."""
    few = map_tensors(batch, lambda t: t[:samples] if t.ndim else t)
    tokens = [t for t in tensors(few[0]) if t.ndim == 2 and not t.is_floating_point()]
    if tokens and tokens[0].shape[1] > length:
        long = tokens[0].shape[1]
        yield map_tensors(few, lambda t: t[:, :length] if t.ndim >= 2 and t.shape[1] == long else t)
    yield few
    yield batch


def _forward(
    model: nn.Module, batch: Batch, objective: Loss | None, functions: Sequence[type]
) -> Recording:
    """One forward, noting the arguments of each module and each of `functions`."""
    recording, stack = Recording(model, batch[1]), [""]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def enter(name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            stack.append(name)
            if name not in recording.calls:
                recording.calls[name] = _detached(args), _detached(kwargs)

        return record

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
            scope.enter_context(_recorded(function, stack, recording))
        _seed()
        recording.output = call(model, batch[0])
        if objective is not None:
            stack[:] = [OBJECTIVE]
            recording.loss = objective(recording.output, batch[1])
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    return recording


def _has_context(function: Any) -> bool:
    """Whether its forward gets the context, rather than a `setup_context` of its own."""
    return bool(function.setup_context is Function.setup_context)


@contextmanager
def _recorded(function: Any, stack: list[str], recording: Recording) -> Iterator[None]:
    """Note its arguments; `apply` may be known by any name, so its `forward` is replaced."""
    own, forward = vars(function).get("forward"), function.forward
    skip = int(_has_context(function))

    def record(*args: Any) -> Any:
        recording.functions.setdefault((function, stack[-1]), _detached(args[skip:]))
        return forward(*args)

    function.forward = staticmethod(record)
    try:
        yield
    finally:
        if own is None:
            del function.forward
        else:
            function.forward = own


def _python_functions(outputs: Any) -> list[type]:
    """The functions written in Python in the graph behind these, without torch's own."""
    waiting: list[Any] = [t.grad_fn for t in tensors(outputs) if t.grad_fn is not None]
    seen = set(waiting)
    functions: dict[type, None] = {}
    while waiting:
        node = waiting.pop()
        if issubclass(type(node), BackwardCFunction) and is_foreign(node._forward_cls):
            functions.setdefault(node._forward_cls)
        for behind, _ in node.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                waiting.append(behind)
    return list(functions)


def is_foreign(cls: type) -> bool:
    """Whether the class is not one of torch's own."""
    return cls.__module__.partition(".")[0] != "torch"
