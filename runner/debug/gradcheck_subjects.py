"""What gradcheck checks: modules and the objective, each with its arguments of one forward of a
shrunk float64 copy of the model over real data.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from inspect import Parameter, signature
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from runner.data.batch import Batch, call
from runner.debug.derivatives import Inconclusive
from runner.models import modes
from runner.record.text import shorten

OBJECTIVE = "objective"
POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)

Loss = Callable[[Any, Any], Any]


@dataclass
class Subject:
    """Something whose backward can be checked: a call, and the arguments that it was seen with."""

    kind: str  # objective | module
    name: str  # of the module
    of: str  # class
    call: Callable[..., Any]
    args: tuple[Any, ...]
    names: list[str]  # of the arguments
    kwargs: dict[str, Any] = field(default_factory=dict)
    module: nn.Module | None = None
    like: int = 1  # how many of the same class and shapes it stands for

    def prepare(self) -> tuple[Callable[[], list[Tensor]], dict[str, Tensor]]:
        """A function that computes its outputs, the same at each call, and its leaves."""
        leaves: dict[str, Tensor] = {}
        args = [_with_leaf(v, n, leaves) for n, v in zip(self.names, self.args, strict=True)]
        kwargs = {key: _with_leaf(value, key, leaves) for key, value in self.kwargs.items()}
        buffers: list[tuple[Tensor, Tensor]] = []
        if self.module is not None:
            leaves |= {n: p for n, p in self.module.named_parameters() if p.requires_grad}
            buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        leaves = {name: leaf for name, leaf in leaves.items() if leaf.numel()}
        if not leaves:
            raise Inconclusive("nothing that it gets or has needs a gradient")

        def evaluate() -> list[Tensor]:
            _restore(buffers)
            _seed()
            # copies in the graph, since some functions write into their arguments
            given, named = tree_map_only(
                Tensor, lambda t: t.clone() if t.requires_grad else t, (args, kwargs)
            )
            outputs = tensors(self.call(*given, **named))
            return [t for t in outputs if t.is_floating_point() or t.is_complex()]

        return evaluate, leaves


def _with_leaf(value: Any, name: str, leaves: dict[str, Tensor]) -> Any:
    """The nest in float64, each tensor that needs a gradient a leaf of its own."""

    def leaf(tensor: Tensor) -> Tensor:
        made = to_double(tensor.detach()).clone().requires_grad_(tensor.requires_grad)
        if tensor.requires_grad:
            leaves[name if name not in leaves else f"{name} ({len(leaves)})"] = made
        return made

    return tree_map_only(Tensor, leaf, value)


def module_subject(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], like: int
) -> Subject:
    """A module with its arguments."""
    names = _argument_names(module.forward, len(args))
    kind = type(module).__name__
    return Subject("module", name, kind, module, args, names, kwargs, module, like)


def objective_subject(objective: Any, name: str, output: Any, target: Any) -> Subject:
    """The loss of the model's output."""
    own = double_objective(objective)
    args = (_detached(output),)
    return Subject(OBJECTIVE, OBJECTIVE, name, lambda out: own(out, target), args, ["output"])


def _argument_names(function: Any, count: int) -> list[str]:
    """The names of its arguments, as far as they can be known."""
    try:
        known = [p for p in signature(function).parameters.values() if p.kind in POSITIONAL]
    except (TypeError, ValueError):
        known = []
    names = [p.name for p in known][:count]
    return names + [f"input {i}" for i in range(len(names), count)]


# -- nests, types and random numbers ----------------------------------------------------------


def tensors(value: Any) -> list[Tensor]:
    """Every tensor in the nest."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _detached(value: Any) -> Any:
    """A copy as it is now, with each tensor's `requires_grad`."""
    return tree_map_only(
        Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), value
    )


def to_double(tensor: Tensor) -> Tensor:
    """Its floats in 64 bits, on the CPU; complex numbers stay complex."""
    if tensor.is_complex():
        return tensor.to("cpu", torch.complex128)
    return tensor.to("cpu", torch.float64) if tensor.is_floating_point() else tensor.cpu()


def double_module(module: nn.Module) -> None:
    """Every float of it in 64 bits."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = to_double(tensor.data)


def double_objective(objective: Any) -> Any:
    """A copy of it on the CPU, with its class weights and the like in 64 bits."""
    own = deepcopy(objective)
    for key, value in {"": own, **getattr(own, "__dict__", {})}.items():
        if isinstance(value, nn.Module):
            double_module(value.to("cpu"))
        elif isinstance(value, Tensor):
            setattr(own, key, to_double(value))
    return own


def _restore(buffers: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)


def _seed() -> None:
    """Dropout drops the same at each call."""
    torch.default_generator.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def error_line(error: BaseException) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {shorten(str(error), 200)}"


# -- one forward ------------------------------------------------------------------------------


@dataclass
class CallRecording:
    """One forward of the copy, and the first arguments of each module."""

    model: nn.Module
    target: Any
    output: Any = None
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)


def copy_model(model: nn.Module) -> nn.Module:
    """A float64 copy on the CPU, uncompiled, with nothing of it shared.

    A forward that replaces a class's own, and is not bound to its module, is left out: it would
    run the original's weights.
    """
    replaced = {}
    for module in model.modules():
        own = vars(module).get("forward")
        if own is not None and not (isinstance(own, MethodType) and own.__self__ is module):
            replaced[module] = vars(module).pop("forward")
    try:
        copy = deepcopy(model).to("cpu")
    finally:
        for module, own in replaced.items():
            vars(module)["forward"] = own
    double_module(copy)
    return copy


def record_forward(model: nn.Module, batch: Batch, samples: int, length: int) -> CallRecording:
    """Run the copy over a small part of the batch; raises Inconclusive where it cannot run."""
    trouble = ""
    for part in _smaller(tree_map_only(Tensor, to_double, batch), samples, length):
        try:
            return _forward(model, part)
        except Exception as error:  # whatever a model raises that wants all of its batch
            trouble = error_line(error)
    raise Inconclusive(f"the model does not run on a float64 copy of its own: {trouble}")


def _smaller(batch: Batch, samples: int, length: int) -> Iterator[Batch]:
    """Few samples of short sequences; few samples; the batch."""
    few = tree_map_only(Tensor, lambda t: t[:samples] if t.ndim else t, batch)
    tokens = [t for t in tensors(few[0]) if t.ndim == 2 and not t.is_floating_point()]
    if tokens and (long := tokens[0].shape[1]) > length:
        yield tree_map_only(
            Tensor, lambda t: t[:, :length] if t.ndim >= 2 and t.shape[1] == long else t, few
        )
    yield few
    yield batch


def _forward(model: nn.Module, batch: Batch) -> CallRecording:
    """One forward, noting the arguments of each module."""
    recording = CallRecording(model, batch[1])
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def enter(name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in recording.calls:
                recording.calls[name] = _detached(args), _detached(kwargs)

        return record

    with ExitStack() as scope:
        scope.enter_context(torch.enable_grad())
        scope.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in modes.hookable(model):
            hook = module.register_forward_pre_hook(enter(name), prepend=True, with_kwargs=True)
            scope.callback(hook.remove)
        _seed()
        recording.output = call(model, batch[0])
    _restore(buffers)
    return recording


def is_foreign(cls: type) -> bool:
    """Whether the class is not one of torch's own."""
    return cls.__module__.partition(".")[0] != "torch"
