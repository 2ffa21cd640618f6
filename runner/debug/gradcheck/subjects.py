"""What can be checked by itself: a function, a module or an objective, with what it really gets."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, is_dataclass, replace
from inspect import Parameter, signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.utils._pytree import tree_map

from runner.debug.gradcheck.derivatives import Inconclusive

SEED = 0  # dropout drops the same at each call
COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}


@dataclass
class Subject:
    """Something whose backward can be checked: what it is called with, and what that depends on."""

    kind: str  # function | objective | module
    name: str  # of the module, or the one that calls the function
    of: str  # class
    size: int  # numbers in its weights, or in its inputs
    build: Callable[[torch.dtype], tuple[Callable[[], Any], dict[str, Tensor]]]
    module: nn.Module | None = None
    like: int = 1  # how many of the same class and shapes it stands for

    def prepared(self, dtype: torch.dtype) -> tuple[Callable[[], list[Tensor]], dict[str, Tensor]]:
        """What computes its outputs, the same at each call, from the leaves returned with it."""
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
            seed()
            return [t for t in tensors(run()) if t.is_floating_point() or t.is_complex()]

        return evaluate, leaves


def function_subject(cls: Any, owner: str, args: tuple[Any, ...], like: int) -> Subject:
    """The function by itself, with what it got."""

    def build(dtype: torch.dtype) -> tuple[Callable[[], Any], dict[str, Tensor]]:
        skip = 1 if takes_context(cls) else 0
        leaves, given = _leaves(args, _names(cls.forward, skip, len(args)), dtype)
        return lambda: cls.apply(*_fresh(given)), leaves

    size = sum(t.numel() for t in tensors(args))
    return Subject("function", owner, cls.__name__, size, build, like=like)


def module_subject(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], like: int = 1
) -> Subject:
    """The module with what it got."""

    def build(dtype: torch.dtype) -> tuple[Callable[[], Any], dict[str, Tensor]]:
        cast(module, dtype)
        names = _names(module.forward, 0, len(args))
        leaves, given = _leaves(args, names, dtype)
        named, by_name = _leaves(tuple(kwargs.values()), list(kwargs), dtype)
        leaves |= named | {n: p for n, p in module.named_parameters() if p.requires_grad}
        return lambda: module(
            *_fresh(given), **dict(zip(kwargs, _fresh(by_name), strict=True))
        ), leaves

    size = sum(p.numel() for p in module.parameters())
    return Subject("module", name, type(module).__name__, size, build, module, like)


def objective_subject(objective: Any, name: str, output: Any, target: Any) -> Subject:
    """The loss of what the model put out."""
    output = kept(output)

    def build(dtype: torch.dtype) -> tuple[Callable[[], Any], dict[str, Tensor]]:
        own = cast_objective(objective, dtype)
        leaves, given = _leaves((output,), ["output"], dtype)
        wanted = cast_all(target, dtype)
        return lambda: own(_fresh(given)[0], wanted), leaves

    return Subject("objective", "objective", name, sum(t.numel() for t in tensors(output)), build)


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Every float of it in that type; complex numbers stay complex."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = _cast(tensor.data, dtype)


def cast_objective(objective: Any, dtype: torch.dtype) -> Any:
    """A copy of it, with its class weights and the like on the CPU in that type."""
    own = deepcopy(objective)
    if isinstance(own, nn.Module):
        cast(own.to("cpu"), dtype)
    for key, value in getattr(own, "__dict__", {}).items():
        if isinstance(value, nn.Module):
            cast(value.to("cpu"), dtype)
        elif isinstance(value, Tensor):
            setattr(own, key, _cast(value.cpu(), dtype))
    return own


def seed() -> None:
    """The host's generators; those of a device are the run's, and nothing here is on it."""
    torch.default_generator.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)


def _names(function: Any, skip: int, count: int) -> list[str]:
    """What its arguments are called, as far as that can be known."""
    by_place = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    try:
        found = [p for p in signature(function).parameters.values() if p.kind in by_place]
    except (TypeError, ValueError):
        found = []
    names = [p.name for p in found[skip:]][:count]
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

        given.append(mapped(value, leaf))
    return leaves, tuple(given)


def _fresh(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies in the graph, since some functions write into what they get."""
    return tuple(mapped(value, lambda t: t.clone() if t.requires_grad else t) for value in given)


def kept(value: Any) -> Any:
    """As it is now, whatever becomes of it, and whether it needs a gradient."""
    return mapped(value, lambda t: t.detach().clone().requires_grad_(t.requires_grad))


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.is_complex():
        return tensor.to(COMPLEX[dtype])
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def cast_all(value: Any, dtype: torch.dtype) -> Any:
    """Every tensor of the nest on the CPU, its floats in that type."""
    return mapped(value, lambda t: _cast(t.detach().cpu(), dtype))


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The nest with each tensor changed; what a dataclass holds is part of the nest."""

    def leaf(item: Any) -> Any:
        if isinstance(item, Tensor):
            return change(item)
        if is_dataclass(item) and not isinstance(item, type):
            return replace(item, **{k: mapped(v, change) for k, v in vars(item).items()})
        return item

    return tree_map(leaf, value)


def tensors(value: Any) -> list[Tensor]:
    """Every tensor in the nest."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(value, note)
    return found


def takes_context(function: Any) -> bool:
    """Whether its forward gets the context, rather than a `setup_context` of its own."""
    return function.setup_context is Function.setup_context
