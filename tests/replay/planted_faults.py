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


def numpy_inf(tensor: Tensor) -> Tensor:
    """Inf of the same shape, written behind torch's back."""
    changed = tensor.detach().clone()
    changed.numpy()[:] = np.inf
    return changed


def write_item(gradient: Tensor) -> Tensor:
    changed = gradient.clone()
    changed[0] = INF
    return changed


def scale_in_graph(gradient: Tensor) -> Tensor:
    """As implicit layers do it: a graph of its own within the backward."""
    with torch.enable_grad():
        x = torch.zeros_like(gradient).requires_grad_()
        (found,) = torch.autograd.grad(x.sqrt().sum(), x)
    return found


BACKWARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "full_like": lambda g: torch.full_like(g, INF),
    "factor": lambda g: g * INF,
    "fill": lambda g: g.clone().fill_(INF),
    "nan": lambda g: torch.where(g == g, float("nan"), g),
    "log": lambda g: (g * 0).log(),
    "numpy": numpy_inf,
    "graph": scale_in_graph,
    "uninitialised": lambda g: torch.empty_like(g).copy_(torch.full_like(g, INF)),
}


def refuse(gradient: Tensor) -> Tensor:
    raise ValueError("no gradient")


class Planted(torch.autograd.Function):
    """x as it is, and a gradient made by one of `BACKWARDS`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: str) -> Tensor:
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return {**BACKWARDS, "raises": refuse}[ctx.how](gradient), None


class NoOperation(torch.autograd.Function):
    """The forward has no operation of torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, INF)


class Saved(torch.autograd.Function):
    """Inf saved by the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.full_like(x, INF))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.abs() * ctx.saved_tensors[0]


class Weighted(torch.autograd.Function):
    """A bad gradient for the weight alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.full_like(ctx.saved_tensors[0], INF)


class Custom(nn.Module):
    """A layer around `Planted`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Planted.apply(x, self.how)  # type: ignore[no-untyped-call]
        return found


class Applies(nn.Module):
    """A layer around any other function of autograd."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.function.apply(x)  # type: ignore[no-untyped-call]
        return found


class Scaled(nn.Module):
    """A parameter of its own; `weighted` gives it a bad gradient, a hook may do so too."""

    def __init__(self, weighted: bool = False, hook: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.weighted = weighted
        if hook is not None:
            self.weight.register_hook(hook)

    def forward(self, x: Tensor) -> Tensor:
        if self.weighted:
            found: Tensor = Weighted.apply(x, self.weight)  # type: ignore[no-untyped-call]
            return found
        return x * self.weight


class Constant(nn.Module):
    """A constant that is no buffer; in the backward alone."""

    def __init__(self) -> None:
        super().__init__()
        self.huge = torch.tensor(INF)

    def forward(self, x: Tensor) -> Tensor:
        # the value of x, the slope of x * Inf
        huge = self.huge
        return _Attribute.apply(x, huge)  # type: ignore[no-untyped-call, no-any-return]


class _Attribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, huge: Tensor) -> Tensor:
        ctx.huge = huge
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.abs() * ctx.huge, None


class HooksInput(nn.Module):
    """A hook on what it is given."""

    def __init__(self, hook: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.hook = hook

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(self.hook)
        return x * 1


class HooksOutput(HooksInput):
    """A hook on what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        if y.requires_grad:
            y.register_hook(self.hook)
        return y


class HooksModule(nn.Module):
    """A hook of torch's on the module."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        if before:
            self.register_full_backward_pre_hook(
                lambda module, grads: tuple(torch.full_like(g, INF) for g in grads)
            )
        else:
            self.register_full_backward_hook(
                lambda module, inputs, outputs: tuple(g * INF for g in inputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        return x * 1


class Slope(nn.Module):
    """A finite value whose derivative is not."""

    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        return x + self.of(x)


class Twice(nn.Module):
    """Inside of another module, which is checkpointed."""

    def __init__(self, inner: nn.Module, mode: str) -> None:
        super().__init__()
        self.before, self.inner, self.mode = nn.Linear(8, 8), inner, mode

    def _block(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(self.before(x))
        return found

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "plain":
            return self._block(x)
        found: Tensor = checkpoint(self._block, x, use_reentrant=self.mode == "reentrant")
        return found


class Residual(nn.Module):
    """Its input goes two ways, of which one has the bad slope."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(8, 8), Custom("numpy")

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x) + self.inner(x) + x
        return found


class Penalty(nn.Module):
    """A gradient of a gradient: the norm of a gradient that is 0 has no slope."""

    def forward(self, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad((x * 0).square().sum(), x, create_graph=True)
        return x + slope.square().sum().sqrt()


class Selects(nn.Module):
    """NaN in the backward, by the quotient that the selection leaves out."""

    def forward(self, x: Tensor) -> Tensor:
        positive = torch.zeros_like(x) > 0
        return torch.where(positive, 1 / (x * 0), x)


class Value(nn.Module):
    """A value that is not finite."""

    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        return self.of(x)


class Plus(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + numpy_inf(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Attention(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = (x.transpose(1, 2) @ x + mask).softmax(-1)
        return x @ scores


class InPlace(Attention):
    """A softmax by hand, in the memory of the scores."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = x.transpose(1, 2) @ x + mask
        scores.sub_(scores.amax(-1, keepdim=True).detach()).exp_()
        return x @ (scores / scores.sum(-1, keepdim=True))


class MasksAll(nn.Module):
    """Hands attention a mask that leaves nothing."""

    def __init__(self, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.inner = attention()

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((8, 8), -INF)
        found: Tensor = x + self.inner(x[:, None], mask)[:, 0]
        return found


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[0, 0] = INF
        return y


BACKWARD: dict[str, Callable[[], nn.Module]] = {
    **{how: (lambda how=how: Custom(how)) for how in BACKWARDS},
    "no operation": lambda: Applies(NoOperation),
    "saved": lambda: Applies(Saved),
    "attribute": Constant,
    "weight alone": lambda: Scaled(weighted=True),
    "parameter hook": lambda: Scaled(hook=lambda g: g * INF),
    "input hook": lambda: HooksInput(lambda g: g * INF),
    "output hook": lambda: HooksOutput(lambda g: torch.full_like(g, INF)),
    "numpy hook": lambda: HooksInput(numpy_inf),
    "module hook": lambda: HooksModule(before=False),
    "module pre-hook": lambda: HooksModule(before=True),
    "sqrt": lambda: Slope(lambda x: (x * 0).sqrt()),
    "power": lambda: Slope(lambda x: (x * 0) ** 0.3),
    "norm": lambda: Slope(lambda x: (x * 0).square().sum(1, keepdim=True).sqrt()),
    "acos": lambda: Slope(lambda x: (x * 0 + 1).acos()),
    "selects": Selects,
    "where log": lambda: Slope(lambda x: torch.where(x * 0 > 0, (x * 0).log(), 0.0)),
    "where exp": lambda: Slope(lambda x: torch.where(x * 0 > 0, (x * 0 + 1e3).exp(), 0.0)),
    "penalty": Penalty,
}
"""Factories of a layer from 8 to 8 features whose value is finite."""
OF_FORWARD = ("selects", "where exp")
"""Those whose forward makes an Inf that it leaves out, and that its backward uses."""

FORWARD: dict[str, Callable[[], nn.Module]] = {
    "log": lambda: Value(lambda x: x + (x * 0).log()),
    "exp": lambda: Value(lambda x: (x * 0 + 1e3).exp()),
    "factor": lambda: Value(lambda x: x * INF),
    "full_like": lambda: Value(lambda x: x + torch.full_like(x, INF)),
    "masked_fill": lambda: Value(lambda x: x.masked_fill(x == x, -INF)),
    "numpy": lambda: Value(lambda x: x + numpy_inf(x)),
    "function": lambda: Applies(Plus),
    "overflow": lambda: Value(lambda x: (x + 1e30) * 1e30),
    "item": Writes,
    "masked attention": MasksAll,
    "masked in place": lambda: MasksAll(InPlace),
}
"""Factories of a layer from 8 to 8 features whose value is not finite."""


CHECKPOINTED = ("full_like", "numpy", "selects", "where log", "sqrt")
MODES = ("plain", "non-reentrant", "reentrant")
NESTED: dict[str, Callable[[], nn.Module]] = {
    f"{how}, {mode}": (lambda how=how, mode=mode: Twice(BACKWARD[how](), mode))
    for how in CHECKPOINTED
    for mode in MODES
} | {"one of two ways": Residual}
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
            x = Planted.apply(x, "full_like")  # type: ignore[no-untyped-call]
        found: Tensor = self.last(x)
        return found


def planted_loss(output: Tensor, target: Tensor) -> Tensor:
    """Finite, with a gradient that is not."""
    output = Planted.apply(output, "numpy")  # type: ignore[no-untyped-call]
    return nn.functional.cross_entropy(output, target)
