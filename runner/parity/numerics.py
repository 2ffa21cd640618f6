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

    autocast_dtype: torch.dtype | None
    # of fp32 matrices: highest | high (TF32) | medium (TF32, bf16 on some CPUs)
    matmul_precision: str
    cudnn_tf32: bool
    weight_dtype: torch.dtype  # as used in forward and backward
    loss_scale: float | None

    @property
    def name(self) -> str:
        """The precision as text."""
        parts = [_dtype_name(self.weight_dtype)]
        if self.autocast_dtype is not None:
            parts.append(f"{_dtype_name(self.autocast_dtype)} products")
        elif self.matmul_precision != "highest":
            parts.append(f"fp32 products at {self.matmul_precision!r} precision")
        return ", ".join(parts)

    def rounds_like(self, other: Numerics) -> bool:
        """Whether both round alike; the loss scale does not round."""
        return replace(self, loss_scale=None) == replace(other, loss_scale=None)


def read_numerics(run: Run) -> Numerics:
    """Return the precision in which `run` computes."""
    with ExitStack() as stack:
        for context in run.contexts:
            stack.enter_context(context())
        autocast_enabled = torch.is_autocast_enabled(run.device.kind)
        autocast = torch.get_autocast_dtype(run.device.kind) if autocast_enabled else None
    dtypes = [p.dtype for p in run.model.parameters() if p.is_floating_point()]
    return Numerics(
        autocast_dtype=autocast,
        matmul_precision=torch.get_float32_matmul_precision(),
        cudnn_tf32=run.device.kind == "cuda" and torch.backends.cudnn.allow_tf32,
        weight_dtype=max(dtypes, key=lambda dtype: ROUNDOFF.get(dtype, 0.0), default=torch.float32),
        loss_scale=None if run.update.scale is None else float(run.update.scale.value),
    )


@contextmanager
def apply_numerics(numerics: Numerics, run: Run) -> Iterator[None]:
    """Make a plain run round as `numerics`, using only torch's own switches."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision(numerics.matmul_precision)
        if run.device.kind == "cuda":
            torch.backends.cudnn.allow_tf32 = numerics.cudnn_tf32
        if numerics.autocast_dtype is not None:
            run.contexts.append(
                partial(torch.autocast, run.device.kind, dtype=numerics.autocast_dtype)
            )
        if numerics.loss_scale is not None:
            run.update.scale = LossScaler(numerics.loss_scale, run.update.device)
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def convert_run_to_fp64(run: Run) -> None:
    """Convert weights, buffers and optimizer state to fp64; batches are not converted."""
    run.model.double()
    update = run.update
    update.buffers.saved = [to_fp64(saved) for saved in update.buffers.saved]
    update.average = [to_fp64(average) for average in update.average]
    for state in update.optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                state[key] = to_fp64(value)


def to_fp64(value: Any) -> Any:
    """Convert all floats in a nest of tensors to fp64."""
    return tree_map(value, lambda t: t.double() if t.is_floating_point() else t)


def perturb_weights(model: nn.Module, seed: int) -> None:
    """Change every weight by one unit in the last place, up or down at random.

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


def _dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return name.replace("bfloat", "bf").replace("float", "fp")
