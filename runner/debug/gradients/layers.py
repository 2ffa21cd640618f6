"""What can be said of each parameter's gradient, weight and update, and what is amiss with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median
from typing import Any

import torch
from torch import Tensor

from runner.debug.config import GradientsConfig

Named = list[tuple[str, Tensor]]


class State(StrEnum):
    """What is amiss with a layer; the worst holds."""

    FINE = "fine"
    NO_GRADIENT = "no gradient"
    NOT_FINITE = "not finite"
    EXPLODING = "exploding"
    VANISHING = "vanishing"
    NOT_OPTIMIZED = "in no optimizer"


FAULTS = {
    State.NO_GRADIENT: "no_gradient",
    State.NOT_FINITE: "non_finite",
    State.EXPLODING: "exploding_gradient",
    State.VANISHING: "vanishing_gradient",
    State.NOT_OPTIMIZED: "not_optimized",
}
"""What each is called in the history; FINE is none."""


@dataclass(frozen=True)
class Layer:
    """A parameter at one look; None is what there is not, such as statistics of no gradient.

    The gradient is as the loss has it: before clipping, and with an fp16 loss scale divided out.
    """

    name: str
    size: int  # values
    dimensions: int
    norm: float | None = None  # of the gradient
    mean: float | None = None
    std: float | None = None
    largest: float | None = None  # absolute
    zeros: float | None = None  # share
    non_finite: float | None = None  # share
    weight_norm: float | None = None
    ratio: float | None = None  # norm of the gradient / norm of the weight
    update_ratio: float | None = None  # norm of the update / norm of the weight; None: none made
    state: State = State.FINE

    @property
    def rms(self) -> float | None:
        """Root mean square of the gradient."""
        return None if self.norm is None or not self.size else self.norm / math.sqrt(self.size)

    @property
    def module(self) -> str:
        """The name of the module that it is of."""
        return self.name.rpartition(".")[0] or self.name

    def row(self) -> dict[str, Any]:
        """For a file: numbers to four digits, and null for what JSON cannot say."""
        return {
            "layer": self.name,
            "norm": _short(self.norm),
            "mean": _short(self.mean),
            "std": _short(self.std),
            "largest": _short(self.largest),
            "zeros": _short(self.zeros),
            "non_finite": _short(self.non_finite),
            "weight_norm": _short(self.weight_norm),
            "ratio": _short(self.ratio),
            "update_ratio": _short(self.update_ratio),
            "state": self.state.value,
        }


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


STATISTICS = 5  # norm, largest, sum, how many are not 0, how many are not finite


def measure(gradients: Sequence[Tensor], scale: Tensor | None = None) -> Tensor:
    """[5, len(gradients)] on the device of the first, in fp32: see `STATISTICS`.

    Kernels over the list where torch has them. Nothing is read.
    """
    values = [_values(gradient) for gradient in gradients]
    rows = [
        torch._foreach_norm(values),
        torch._foreach_norm(values, math.inf),
        [value.sum() for value in values],
        torch._foreach_norm(values, 0),
        [value.numel() - value.isfinite().sum() for value in values],  # exact: int64
    ]
    table = torch.stack([_stack(row) for row in rows])
    if scale is not None:
        table[:3] /= scale
    return table


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """[len(tensors)] on the device of the first, in fp32."""
    return _stack(torch._foreach_norm([_values(tensor) for tensor in tensors]))


def _stack(numbers: Sequence[Tensor]) -> Tensor:
    device = numbers[0].device  # a model may be spread over several
    return torch.stack([number.to(device, torch.float32) for number in numbers])


def _values(tensor: Tensor) -> Tensor:
    """What of a tensor can be other than 0, real and in a precision that sums can be made in."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    return tensor if tensor.numel() else tensor.new_zeros(1)


def described(
    named: Named, table: Sequence[Sequence[float]], weights: Sequence[float]
) -> list[Layer]:
    """A layer for each of `named`, from numbers on the host; `table` has those with a gradient."""
    rows = iter(zip(*table, strict=True))
    layers = []
    for (name, parameter), weight in zip(named, weights, strict=True):
        size = parameter.numel() * (2 if parameter.is_complex() else 1)
        layer = Layer(name, size, parameter.dim(), weight_norm=weight)
        if parameter.grad is not None:
            row = next(rows)
            layer = _with_gradient(layer, *row) if size else layer  # nothing to take a mean of
        layers.append(layer)
    return layers


def _with_gradient(
    layer: Layer, norm: float, largest: float, total: float, set_: float, odd: float
) -> Layer:
    mean = total / layer.size
    spread = norm**2 / layer.size - mean**2  # below 0 by rounding
    return replace(
        layer,
        norm=norm,
        mean=mean,
        std=math.sqrt(spread) if spread > 0 else 0.0 if spread <= 0 else math.nan,
        largest=largest,
        zeros=max(0.0, 1 - set_ / layer.size),
        non_finite=odd / layer.size,
        ratio=norm / layer.weight_norm if layer.weight_norm else None,
    )


def judged(
    layers: Sequence[Layer],
    config: GradientsConfig,
    usual: Mapping[str, float] | None = None,
    optimized: frozenset[str] | None = None,
) -> list[Layer]:
    """The same with what is amiss; `usual` has the norm that a layer had so far, by its name.

    `optimized` are those that an optimizer has, where that is known.
    """
    sizes = [layer.rms for layer in layers if layer.rms and math.isfinite(layer.rms)]
    middle = median(sizes) if sizes else 0.0
    found = []
    for layer in layers:
        state = _state(layer, config, middle, (usual or {}).get(layer.name))
        if state is State.FINE and optimized is not None and layer.name not in optimized:
            state = State.NOT_OPTIMIZED
        found.append(replace(layer, state=state))
    return found


def _state(layer: Layer, config: GradientsConfig, middle: float, usual: float | None) -> State:
    if not layer.size:
        return State.FINE
    if layer.norm is None or layer.rms is None:
        return State.NO_GRADIENT
    if layer.non_finite:
        return State.NOT_FINITE
    most, times = config.exploding.absolute, config.exploding.relative
    if not math.isfinite(layer.norm) or (most is not None and layer.norm > most):
        return State.EXPLODING
    if times is not None and usual and layer.norm > times * usual:
        return State.EXPLODING
    if layer.dimensions < 2:  # the bias before a normalisation has none but noise, rightly
        return State.FINE
    least, share = config.vanishing.absolute, config.vanishing.relative
    if least is not None and layer.rms < least:
        return State.VANISHING
    if share is not None and layer.rms < share * middle:
        return State.VANISHING
    return State.FINE


def grouped(names: Sequence[str], most: int) -> dict[str, list[int]]:
    """Indices of names by module, by as much of the path as leaves no more than `most` groups."""
    paths = [name.split(".")[:-1] or [name] for name in names]
    depth = max(map(len, paths), default=1)
    while True:
        groups: dict[str, list[int]] = {}
        for i, path in enumerate(paths):
            groups.setdefault(".".join(path[:depth]), []).append(i)
        if len(groups) <= most or depth == 1:
            return groups
        depth -= 1


def together(values: Sequence[float | None]) -> float | None:
    """The norm of several tensors from that of each."""
    known = [value for value in values if value is not None]
    return math.sqrt(sum(value * value for value in known)) if known else None
