"""Modules that make NaN or Inf in a step, forward or backward, each in a way of its own.

As a user might have written them: no base class of ours, no import of the runner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

INF = float("inf")
Change = Callable[[Tensor], Tensor]


class Value(nn.Module):
    """Any function as a layer."""

    def __init__(self, of: Change) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        return self.of(x)


def numpy_inf(tensor: Tensor) -> Tensor:
    """Inf of the same shape, written behind torch's back."""
    changed = tensor.detach().clone()
    changed.numpy()[:] = np.inf
    return changed


def refuse(gradient: Tensor) -> Tensor:
    raise ValueError("no gradient")


BACKWARDS: dict[str, Change] = {
    "full_like": lambda g: torch.full_like(g, INF),
    "nan": lambda g: torch.where(g == g, float("nan"), g),
    "numpy": numpy_inf,
}


def function(forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """What an autograd function of these two applies."""
    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Planted", (torch.autograd.Function,), parts).apply  # type: ignore[attr-defined]


def planted(how: str) -> Change:
    """x as it is, and a gradient made by one of `BACKWARDS`."""
    change = {**BACKWARDS, "raises": refuse}[how]
    apply: Change = function(lambda ctx, x: x.clone(), lambda ctx, g: change(g))
    return apply


no_operation = function(lambda ctx, x: x, lambda ctx, g: torch.full_like(g, INF))
plus = function(lambda ctx, x: x + numpy_inf(x), lambda ctx, g: g)


class Scaled(nn.Module):
    """A parameter of its own, to which a hook gives a bad gradient."""

    def __init__(self, hook: Change) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.weight.register_hook(hook)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def hooked(x: Tensor, hook: Change) -> Tensor:
    if x.requires_grad:
        x.register_hook(hook)
    return x


def hooks_module() -> nn.Module:
    """A hook of torch's on the module."""
    module = Value(lambda x: x * 1)
    module.register_full_backward_hook(
        lambda module, inputs, outputs: tuple(g * INF for g in inputs)
    )
    return module


class Twice(nn.Module):
    """Inside of another module, which is checkpointed."""

    def __init__(self, inner: nn.Module, mode: str) -> None:
        super().__init__()
        self.before, self.inner, self.mode = nn.Linear(8, 8), inner, mode

    def _block(self, x: Tensor) -> Tensor:
        return self.inner(self.before(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "plain":
            return self._block(x)
        return checkpoint(self._block, x, use_reentrant=self.mode == "reentrant")


class Attention(nn.Module):
    """With a softmax of torch's, or by hand in the memory of the scores."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = x.transpose(1, 2) @ x + mask
        if not self.by_hand:
            return x @ scores.softmax(-1)
        scores.sub_(scores.amax(-1, keepdim=True).detach()).exp_()
        return x @ (scores / scores.sum(-1, keepdim=True))


class MasksAll(nn.Module):
    """Hands attention a mask that leaves nothing."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.inner = Attention(by_hand)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((8, 8), -INF)
        return x + self.inner(x[:, None], mask)[:, 0]


def slope(of: Change) -> Callable[[], nn.Module]:
    """Factory of a finite value whose derivative is not."""
    return lambda: Value(lambda x: x + of(x))


def value(of: Change) -> Callable[[], nn.Module]:
    return lambda: Value(of)


BACKWARD: dict[str, Callable[[], nn.Module]] = {
    **{how: value(planted(how)) for how in BACKWARDS},
    "no operation": value(no_operation),
    "parameter hook": lambda: Scaled(lambda g: g * INF),
    "input hook": value(lambda x: hooked(x, lambda g: g * INF) * 1),
    "output hook": value(lambda x: hooked(x * 1, lambda g: torch.full_like(g, INF))),
    "module hook": hooks_module,
    "sqrt": slope(lambda x: (x * 0).sqrt()),
    "selects": value(lambda x: torch.where(torch.zeros_like(x) > 0, 1 / (x * 0), x)),
    "where log": slope(lambda x: torch.where(x * 0 > 0, (x * 0).log(), 0.0)),
    "where exp": slope(lambda x: torch.where(x * 0 > 0, (x * 0 + 1e3).exp(), 0.0)),
}
"""Factories of a layer from 8 to 8 features whose value is finite."""
OF_FORWARD = ("selects", "where exp")
"""Those whose forward makes an Inf that it leaves out, and that its backward uses."""

FORWARD: dict[str, Callable[[], nn.Module]] = {
    "log": value(lambda x: x + (x * 0).log()),
    "masked_fill": value(lambda x: x.masked_fill(x == x, -INF)),
    "numpy": value(lambda x: x + numpy_inf(x)),
    "function": value(plus),
    "overflow": value(lambda x: (x + 1e30) * 1e30),
    "masked attention": lambda: MasksAll(by_hand=False),
    "masked in place": lambda: MasksAll(by_hand=True),
}
"""Factories of a layer from 8 to 8 features whose value is not finite."""

CHECKPOINTED = ("numpy", "selects", "where log")
NESTED: dict[str, Callable[[], nn.Module]] = {
    f"{how}, {mode}": (lambda how=how, mode=mode: Twice(BACKWARD[how](), mode))
    for how in CHECKPOINTED
    for mode in ("plain", "non-reentrant", "reentrant")
}
"""The same with the fault in `inner`, most of them checkpointed."""


class Net(nn.Module):
    """A small network with one such layer between others; `functional` has none of its own."""

    def __init__(self, in_features: int, classes: int, fault: str = "") -> None:
        super().__init__()
        made = {**FORWARD, **BACKWARD, **NESTED}.get(fault, nn.Identity)()
        self.first = nn.Linear(in_features, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), made, nn.Linear(8, 8))
        self.last = nn.Linear(8, classes)
        self.functional = fault == "functional"

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.first(x))
        if self.functional:
            x = planted("full_like")(x)
        return self.last(x)


def planted_loss(output: Tensor, target: Tensor) -> Tensor:
    """Finite, with a gradient that is not."""
    return nn.functional.cross_entropy(planted("numpy")(output), target)
