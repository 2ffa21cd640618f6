"""What gradcheck checks: modules and the objective, each with its arguments of one forward of a
float64 copy of the model over a few samples.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from inspect import signature
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from runner.data.batch import Batch, call
from runner.models import modes
from runner.record.text import summarize_error

OBJECTIVE = "objective"
SAMPLES, TOKENS = 4, 16  # of the first batch, where the model takes fewer than it has
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Inconclusive(Exception):
    """Nothing can be said, and why."""


@dataclass
class CheckedCall:
    """A function whose backward can be checked, and the arguments that it was called with."""

    name: str  # a module's dotted name, or `objective`
    of: str  # class
    call: Callable[..., Any]
    arguments: Arguments
    path: str = ""  # the dotted name, empty for the model itself
    module: nn.Module | None = None

    def prepare(self) -> tuple[Callable[[], list[Tensor]], dict[str, Tensor]]:
        """A function that computes its outputs, the same at each call, and its leaves."""
        leaves: dict[str, Tensor] = {}
        arguments = self._with_leaves(leaves)
        buffers: list[tuple[Tensor, Tensor]] = []
        if self.module is not None:
            leaves |= {n: p for n, p in self.module.named_parameters() if p.requires_grad}
            buffers = _buffers(self.module)
        leaves = {name: leaf for name, leaf in leaves.items() if leaf.numel()}
        if not leaves:
            raise Inconclusive("neither its inputs nor its weights need a gradient")

        def evaluate() -> list[Tensor]:
            _restore(buffers)
            _seed()
            # copies in the graph, since some functions write into their arguments
            args, kwargs = tree_map_only(
                Tensor, lambda t: t.clone() if t.requires_grad else t, arguments
            )
            outputs = tree_leaves(self.call(*args, **kwargs))
            tensors = [output for output in outputs if isinstance(output, Tensor)]
            return [t for t in tensors if t.is_floating_point() or t.is_complex()]

        return evaluate, leaves

    def _with_leaves(self, leaves: dict[str, Tensor]) -> Arguments:
        """The arguments in float64; each tensor that needs a gradient is a leaf, by its name."""
        args, kwargs = self.arguments
        names = list(signature(self.module.forward if self.module else self.call).parameters)
        names += [f"input {i}" for i in range(len(names), len(args))]  # of *args

        def convert(name: str, value: Any) -> Any:
            def leaf(tensor: Tensor) -> Tensor:
                made = _to_double(tensor.detach()).clone().requires_grad_(tensor.requires_grad)
                if tensor.requires_grad:
                    leaves[name if name not in leaves else f"{name} ({len(leaves)})"] = made
                return made

            return tree_map_only(Tensor, leaf, value)

        positional = tuple(convert(n, value) for n, value in zip(names, args, strict=False))
        return positional, {key: convert(key, value) for key, value in kwargs.items()}


@dataclass
class CallRecording:
    """One forward of the copy, and the first arguments of each module."""

    model: nn.Module
    target: Any
    output: Any = None
    calls: dict[str, Arguments] = field(default_factory=dict)


def objective_call(objective: Any, name: str, recording: CallRecording) -> CheckedCall:
    """The loss of the model's output, its class weights and the like in 64 bits."""
    own = deepcopy(objective)
    for key, value in {"": own, **getattr(own, "__dict__", {})}.items():
        if isinstance(value, nn.Module):
            _make_double(value.to("cpu"))
        elif isinstance(value, Tensor):
            setattr(own, key, _to_double(value))
    arguments: Arguments = ((_detached(recording.output),), {})
    return CheckedCall(OBJECTIVE, name, lambda output: own(output, recording.target), arguments)


def module_calls(recording: CallRecording, names: Sequence[str], alike: bool) -> list[CheckedCall]:
    """The calls of these modules, the smallest first; `alike`: one of each class and shapes."""
    modules = {name: recording.model.get_submodule(name) for name in names}
    calls: dict[Any, CheckedCall] = {}
    for name, module in modules.items():
        if name not in recording.calls:
            continue
        of, arguments = type(module).__name__, recording.calls[name]
        inputs = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        shapes = tuple(tensor.shape for tensor in (*inputs, *module.parameters()))
        key = (type(module), shapes) if alike else name
        calls.setdefault(key, CheckedCall(name or of, of, module, arguments, name, module))

    def order(checked: CheckedCall) -> tuple[int, int]:
        size = sum(p.numel() for p in modules[checked.path].parameters())
        return size, -checked.path.count(".") - bool(checked.path)

    return sorted(calls.values(), key=order)


def double_copy(model: nn.Module) -> nn.Module:
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
    _make_double(copy)
    return copy


def record_forward(model: nn.Module, batch: Batch) -> CallRecording:
    """Run the copy over a small part of the batch; raises Inconclusive where it cannot run."""
    problem = ""
    for part in _smaller(tree_map_only(Tensor, _to_double, batch)):
        try:
            return _forward(model, part)
        except Exception as error:  # such as that of a model that wants all of its batch
            problem = summarize_error(error)
    raise Inconclusive(f"the model does not run on a float64 copy of its own: {problem}")


def _smaller(batch: Batch) -> Iterator[Batch]:
    """Few samples of short sequences; few samples; the batch."""
    few = tree_map_only(Tensor, lambda t: t[:SAMPLES] if t.ndim else t, batch)
    inputs = [leaf for leaf in tree_leaves(few[0]) if isinstance(leaf, Tensor)]
    tokens = [t for t in inputs if t.ndim == 2 and not t.is_floating_point()]
    if tokens and (long := tokens[0].shape[1]) > TOKENS:
        yield tree_map_only(
            Tensor, lambda t: t[:, :TOKENS] if t.ndim >= 2 and t.shape[1] == long else t, few
        )
    yield few
    yield batch


def _forward(model: nn.Module, batch: Batch) -> CallRecording:
    """One forward, noting the arguments of each module."""
    recording, buffers = CallRecording(model, batch[1]), _buffers(model)

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


def _detached(value: Any) -> Any:
    """A copy as it is now, with each tensor's `requires_grad`."""
    return tree_map_only(
        Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), value
    )


def _to_double(tensor: Tensor) -> Tensor:
    """Its floats in 64 bits, on the CPU; complex numbers stay complex."""
    if tensor.is_complex():
        return tensor.to("cpu", torch.complex128)
    return tensor.to("cpu", torch.float64) if tensor.is_floating_point() else tensor.cpu()


def _make_double(module: nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = _to_double(tensor.data)


def _buffers(module: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Its buffers, each with a copy."""
    return [(buffer, buffer.clone()) for buffer in module.buffers()]


def _restore(buffers: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)


def _seed() -> None:
    """Dropout drops the same at each call."""
    torch.default_generator.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
