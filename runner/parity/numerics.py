"""The precision that a run says it computes in, and how another run is made to compute in it."""

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
"""Half the distance from 1 to the next number: what one rounding changes at most."""


@dataclass(frozen=True)
class Numerics:
    """What a run's matrix products are rounded to, read from the switches that decide it."""

    autocast: torch.dtype | None
    products: str  # of fp32 matrices: highest | high (TF32) | medium (TF32, bf16 on some CPUs)
    convolutions_tf32: bool
    weights: torch.dtype  # what forward and backward see of them
    loss_scale: float | None

    @property
    def name(self) -> str:
        """As a person would say it."""
        kinds = [_short(self.weights)]
        if self.autocast is not None:
            kinds.append(f"{_short(self.autocast)} products")
        elif self.products != "highest":
            kinds.append(f"fp32 products at {self.products!r} precision")
        return ", ".join(kinds)

    def is_that_of(self, other: Numerics) -> bool:
        """Whether both round alike; the loss scale rounds nothing."""
        return replace(self, loss_scale=None) == replace(other, loss_scale=None)


def numerics(run: Run) -> Numerics:
    """What `run` says it computes in."""
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
    """Let a plain run round as `wanted` says, by torch's own switches and nothing else."""
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
    """Let a plain run compute in fp64: weights, buffers, optimizer state; batches are apart."""
    run.model.double()
    update = run.update
    update.buffers.saved = [double(saved) for saved in update.buffers.saved]
    update.average = [double(average) for average in update.average]
    for state in update.optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                state[key] = double(value)


def double(value: Any) -> Any:
    """Every number in a nest of tensors, in fp64; whole numbers stay."""
    return tree_map(value, lambda t: t.double() if t.is_floating_point() else t)


def nudge(model: nn.Module, seed: int) -> None:
    """Move every weight by one unit in the last place, up or down at random.

    What follows differs from what would have been by rounding alone, so it shows how far one
    rounding is carried. The idea is that of Monte Carlo arithmetic (Parker 1997).
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
