"""The precision a run computes in, and how to make another run compute in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runner.core.device import numerics
from runner.core.interfaces.nested import tree_map
from runner.core.interfaces.run import Run
from runner.core.optim.optimizer_step import LossScaler
from runner.core.techniques.model_calls import enter_contexts

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
    # of the device's kernels: switch and ieee | tf32 | bf16
    fp32_precision: tuple[tuple[str, str], ...]
    weight_dtype: torch.dtype  # as used in forward and backward
    loss_scale: float | None

    @property
    def name(self) -> str:
        """The precision as text."""
        parts = [_dtype_name(self.weight_dtype)]
        if self.autocast_dtype is not None:
            parts.append(f"{_dtype_name(self.autocast_dtype)} products")
        else:
            for precision in ("tf32", "bf16"):
                switches = [name for name, value in self.fp32_precision if value == precision]
                if switches:
                    parts.append(f"{' and '.join(switches)} in {precision.upper()}")
        return ", ".join(parts)

    def rounds_like(self, other: Numerics) -> bool:
        """Whether both round alike; the loss scale does not round."""
        return replace(self, loss_scale=None) == replace(other, loss_scale=None)


def read_numerics(run: Run) -> Numerics:
    """Return the precision in which `run` computes."""
    with enter_contexts(run.contexts):
        autocast_enabled = torch.is_autocast_enabled(run.device.kind)
        autocast = torch.get_autocast_dtype(run.device.kind) if autocast_enabled else None
    switches = numerics.read_fp32_precision().items()
    on_gpu = run.device.kind == "cuda"
    dtypes = [p.dtype for p in run.model.parameters() if p.is_floating_point()]
    return Numerics(
        autocast_dtype=autocast,
        fp32_precision=tuple(
            (name, "ieee" if value == "none" else value)
            for name, value in switches
            if (name in numerics.GPU_SWITCHES) is on_gpu
        ),
        weight_dtype=max(dtypes, key=lambda dtype: ROUNDOFF.get(dtype, 0.0), default=torch.float32),
        loss_scale=None if run.update.scale is None else float(run.update.scale.value),
    )


@contextmanager
def apply_numerics(target: Numerics, run: Run) -> Iterator[None]:
    """Make a plain run round as `target`, using only torch's own switches."""
    with ExitStack() as scope:
        numerics.set_fp32_precision(dict(target.fp32_precision), scope)
        if target.autocast_dtype is not None:
            dtype = target.autocast_dtype
            run.contexts.append(partial(torch.autocast, run.device.kind, dtype=dtype))
        if target.loss_scale is not None:
            run.update.scale = LossScaler(target.loss_scale, run.update.device)
        yield


def convert_run_to_fp64(run: Run) -> None:
    """Convert weights, buffers and optimizer state to fp64; batches are not converted."""
    double_model(run.model)
    update = run.update
    update.buffers.saved = [to_fp64(saved) for saved in update.buffers.saved]
    update.average = [to_fp64(average) for average in update.average]
    for state in update.optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                state[key] = to_fp64(value)


def double_model(model: nn.Module) -> None:
    """Convert weights and buffers to fp64; unlike `Module.double`, complex ones, too."""
    model._apply(to_fp64)  # type: ignore[no-untyped-call]


def to_fp64(value: Any) -> Any:
    """Convert all floats in a nest of tensors to fp64, and complex numbers to two of them."""

    def widen(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(torch.complex128)
        return tensor.double() if tensor.is_floating_point() else tensor

    return tree_map(value, widen)


def perturb_weights(model: nn.Module, seed: int) -> None:
    """Change every weight by one unit in the last place, up or down at random.

    Later differences are then due to rounding alone, and show how much one rounding is amplified
    (Monte Carlo arithmetic, Parker 1997).
    """
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            if values.is_floating_point():
                sign = torch.randint(0, 2, values.shape, generator=noise) * 2 - 1
                values.mul_(1 + 2 * ROUNDOFF.get(values.dtype, 0.0) * sign.to(values))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
