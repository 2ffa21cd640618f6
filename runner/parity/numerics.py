"""The precision a run computes in, and how to make another run compute in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runner.data.nested import tree_map
from runner.optim.optimizer_step import LossScaler
from runner.training.run import Run

ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-9,
    torch.float16: 2.0**-11,
}
"""Unit roundoff: the largest relative change by one rounding."""


@dataclass(frozen=True)
class Numerics:
    """The rounding of a run's matrix products, read from torch's switches."""

    autocast: torch.dtype | None
    products: str  # of fp32 matrices: highest | high (TF32) | medium (TF32, bf16 on some CPUs)
    convolutions_tf32: bool
    weights: torch.dtype  # as used in forward and backward
    loss_scale: float | None

    @property
    def name(self) -> str:
        """The precision as text."""
        kinds = [_short(self.weights)]
        if self.autocast is not None:
            kinds.append(f"{_short(self.autocast)} products")
        elif self.products != "highest":
            kinds.append(f"fp32 products at {self.products!r} precision")
        return ", ".join(kinds)

    def is_that_of(self, other: Numerics) -> bool:
        """Whether both round alike; the loss scale does not round."""
        return replace(self, loss_scale=None) == replace(other, loss_scale=None)


def numerics(run: Run) -> Numerics:
    """Return the precision in which `run` computes."""
    with ExitStack() as stack:
        for context in run.contexts:
            stack.enter_context(context())
        cast = torch.is_autocast_enabled(run.device.kind)
        autocast = torch.get_autocast_dtype(run.device.kind) if cast else None
    kinds = [p.dtype for p in run.model.parameters() if p.is_floating_point()]
    return Numerics(
        autocast=autocast,
        products=torch.get_float32_matmul_precision(),
        convolutions_tf32=run.device.kind == "cuda" and torch.backends.cudnn.allow_tf32,
        weights=max(kinds, key=lambda kind: ROUNDOFF.get(kind, 0.0), default=torch.float32),
        loss_scale=None if run.update.scale is None else float(run.update.scale.value),
    )


@contextmanager
def computing_in(wanted: Numerics, run: Run) -> Iterator[None]:
    """Make a plain run round as `wanted`, using only torch's own switches."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision(wanted.products)
        if run.device.kind == "cuda":
            torch.backends.cudnn.allow_tf32 = wanted.convolutions_tf32
        if wanted.autocast is not None:
            run.contexts.append(partial(torch.autocast, run.device.kind, dtype=wanted.autocast))
        if wanted.loss_scale is not None:
            run.update.scale = LossScaler(wanted.loss_scale, run.update.device)
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def to_double(run: Run) -> None:
    """Convert weights, buffers and optimizer state to fp64; batches are not converted."""
    run.model.double()
    update = run.update
    update.buffers.saved = [double(saved) for saved in update.buffers.saved]
    update.average = [double(average) for average in update.average]
    for state in update.optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                state[key] = double(value)


def double(value: Any) -> Any:
    """Convert all floats in a nest of tensors to fp64."""
    return tree_map(value, lambda t: t.double() if t.is_floating_point() else t)


def nudge(model: nn.Module, seed: int) -> None:
    """Move every weight by one unit in the last place, up or down at random.

    Later differences are then due to rounding alone, and show how much one rounding is amplified
    (Monte Carlo arithmetic, Parker 1997).
    """
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                sign = torch.randint(0, 2, parameter.shape, generator=noise) * 2 - 1
                step = 2 * ROUNDOFF.get(parameter.dtype, 0.0)
                parameter.mul_(1 + step * sign.to(parameter))


def _short(kind: torch.dtype) -> str:
    name = str(kind).removeprefix("torch.")
    return name.replace("bfloat", "bf").replace("float", "fp")
