"""Statistics of each parameter's gradient, weight and update, and verdicts on them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from runner.core.format import join_names
from runner.core.record import markdown
from runner.core.schemas.debug import GradientsConfig

NamedTensors = list[tuple[str, Tensor]]
DeadUnitCounts = Mapping[str, tuple[int, int]]  # layer → (dead units, units)

MAX_BARS = 24  # of the plot
STATISTICS = 5  # norm, largest, sum, number of non-zeros, number of non-finites


class LayerState(StrEnum):
    """The fault of a layer, worst first."""

    NOT_FINITE = "not finite"
    EXPLODING = "exploding"
    VANISHING = "vanishing"
    NO_GRADIENT = "no gradient"
    NOT_OPTIMIZED = "in no optimizer"
    FINE = "fine"


FAULTS = {
    LayerState.NO_GRADIENT: "no_gradient",
    LayerState.NOT_FINITE: "non_finite",
    LayerState.EXPLODING: "exploding_gradient",
    LayerState.VANISHING: "vanishing_gradient",
    LayerState.NOT_OPTIMIZED: "not_optimized",
}
"""Fault kinds in the history; FINE has none."""
NUMBER_FIELDS = ("norm", "mean", "std", "largest", "zeros", "non_finite", "ratio", "update_ratio")
HEADER = "layer norm mean std largest zeros non-finite gradient/weight update/weight state".split()


@dataclass(frozen=True)
class Layer:
    """A parameter's statistics at one step; None where a number does not exist.

    Gradients are as from the loss: before clipping, and divided by an fp16 loss scale.
    """

    name: str
    size: int  # number of values
    dimensions: int
    norm: float | None = None  # of the gradient
    mean: float | None = None
    std: float | None = None
    largest: float | None = None  # largest absolute value
    zeros: float | None = None  # share
    non_finite: float | None = None  # share
    weight_norm: float | None = None
    ratio: float | None = None  # norm of the gradient / norm of the weight
    update_ratio: float | None = None  # norm of the update / norm of the weight; None: no update
    state: LayerState = LayerState.FINE

    @property
    def rms(self) -> float | None:
        """Root mean square of the gradient."""
        return None if self.norm is None or not self.size else self.norm / math.sqrt(self.size)

    def as_dict(self) -> dict[str, Any]:
        """Return values for JSON, rounded to four digits; null if not finite."""
        values = {name: getattr(self, name) for name in (*NUMBER_FIELDS, "weight_norm")}
        numbers = {
            name: float(f"{value:.4g}") if value is not None and math.isfinite(value) else None
            for name, value in values.items()
        }
        return {"layer": self.name, **numbers, "state": self.state.value}

    def cells(self) -> list[str]:
        """Return a table row in the order of `HEADER`."""
        values = [getattr(self, name) for name in NUMBER_FIELDS]
        cells = ["–" if value is None else f"{value:.2e}" for value in values]
        return [self.name, *cells, self.state.value]


def gradient_statistics(gradients: Sequence[Tensor], scale: Tensor | None = None) -> Tensor:
    """Return statistics [STATISTICS, len(gradients)], fp32, on the first's device; no sync."""
    values = [_real_values(gradient) for gradient in gradients]
    rows = [
        torch._foreach_norm(values),
        torch._foreach_norm(values, math.inf),
        [value.sum() for value in values],
        torch._foreach_norm(values, 0),
        [value.numel() - value.isfinite().sum() for value in values],  # exact: int64
    ]
    statistics = torch.stack([_stack_scalars(row) for row in rows])
    if scale is not None:
        statistics[:3] /= scale
    return statistics


def stacked_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return norms [len(tensors)], fp32, on the first's device."""
    return _stack_scalars(torch._foreach_norm([_real_values(tensor) for tensor in tensors]))


def _stack_scalars(numbers: Sequence[Tensor]) -> Tensor:
    device = numbers[0].device  # tensors may be on several devices
    return torch.stack([number.to(device, torch.float32) for number in numbers])


def _real_values(tensor: Tensor) -> Tensor:
    """Return the tensor's stored values as real numbers, at least float32, never empty."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    return tensor if tensor.numel() else tensor.new_zeros(1)


def build_layers(
    named: NamedTensors, numbers: Sequence[float], weights: Sequence[float]
) -> list[Layer]:
    """Return a Layer per parameter; `numbers` is the flattened result of `gradient_statistics`."""
    count = len(numbers) // STATISTICS
    columns = [numbers[i * count : (i + 1) * count] for i in range(STATISTICS)]
    rows = iter(zip(*columns, strict=True))
    layers = []
    for (name, parameter), weight in zip(named, weights, strict=True):
        size = parameter.numel() * (2 if parameter.is_complex() else 1)
        layer = Layer(name, size, parameter.dim(), weight_norm=weight)
        if parameter.grad is not None:
            norm, largest, total, nonzero, non_finite = next(rows)
            if size:  # without values there is no mean
                mean = total / size
                variance = norm**2 / size - mean**2  # may be negative by rounding
                layer = replace(
                    layer,
                    norm=norm,
                    mean=mean,
                    std=math.nan if math.isnan(variance) else math.sqrt(max(0.0, variance)),
                    largest=largest,
                    zeros=max(0.0, 1 - nonzero / size),
                    non_finite=non_finite / size,
                    ratio=norm / weight if weight else None,
                )
        layers.append(layer)
    return layers


# -- verdicts ---------------------------------------------------------------------------------


def classify_layers(
    layers: Sequence[Layer],
    config: GradientsConfig,
    usual_norms: Mapping[str, float] | None = None,
    optimized: Collection[str] | None = None,
) -> list[Layer]:
    """Set the layers' states; `usual_norms` maps layer names to their usual gradient norm.

    `optimized` are the names of the optimizer's parameters, if known.
    """
    rms_values = [layer.rms for layer in layers if layer.rms and math.isfinite(layer.rms)]
    median_rms = median(rms_values) if rms_values else 0.0
    classified = []
    for layer in layers:
        state = _classify(layer, config, median_rms, (usual_norms or {}).get(layer.name))
        if state is LayerState.FINE and optimized is not None and layer.name not in optimized:
            state = LayerState.NOT_OPTIMIZED
        classified.append(replace(layer, state=state))
    return classified


def _classify(
    layer: Layer, config: GradientsConfig, median_rms: float, usual_norm: float | None
) -> LayerState:
    if not layer.size:
        return LayerState.FINE
    if layer.norm is None or layer.rms is None:
        return LayerState.NO_GRADIENT
    if layer.non_finite:
        return LayerState.NOT_FINITE
    limits = [config.exploding.absolute, _product(config.exploding.relative, usual_norm), math.inf]
    if any(layer.norm > limit for limit in limits if limit is not None):
        return LayerState.EXPLODING
    limits = [config.vanishing.absolute, _product(config.vanishing.relative, median_rms)]
    # a bias before a normalisation legitimately has only a noise gradient: check weights only
    if layer.dimensions > 1 and any(layer.rms < limit for limit in limits if limit is not None):
        return LayerState.VANISHING
    return LayerState.FINE


def _product(factor: float | None, value: float | None) -> float | None:
    return factor * value if factor is not None and value else None


def names_by_state(layers: Sequence[Layer]) -> dict[LayerState, list[str]]:
    """Return the names of faulty layers, by state."""
    names: dict[LayerState, list[str]] = {}
    for layer in layers:
        if layer.state is not LayerState.FINE:
            names.setdefault(layer.state, []).append(layer.name)
    return names


def summarize_faults(names: Mapping[LayerState, Collection[str]], dead: DeadUnitCounts) -> str:
    """Summarise faulty layers by state, and layers with dead units."""
    parts = [f"{join_names(names[s], 1)}: {s}" for s in LayerState if names.get(s)]
    if dead:
        name, (dead_units, units) = max(dead.items(), key=lambda item: item[1][0] / item[1][1])
        more = f" and {len(dead) - 1} more" if len(dead) > 1 else ""
        parts.append(f"{name}{more}: {dead_units} of {units} units dead")
    return "; ".join(parts) or "no problems found"


# -- user loops -------------------------------------------------------------------------------


@dataclass(frozen=True)
class GradientReport:
    """The result of `check_gradients`: a Layer per parameter; `print` shows a table."""

    layers: list[Layer]

    @property
    def norm(self) -> float:
        """The total norm of all gradients, as of `torch.nn.utils.get_total_norm`."""
        norms = [layer.norm for layer in self.layers if layer.norm is not None]
        return math.sqrt(sum(norm * norm for norm in norms))

    @property
    def problems(self) -> list[str]:
        """The faulty layers with their states; empty if all are fine."""
        bad = [layer for layer in self.layers if layer.state is not LayerState.FINE]
        return [f"{layer.name}: {layer.state}" for layer in bad]

    def __str__(self) -> str:
        table = markdown.table(HEADER, [layer.cells() for layer in self.layers])
        return f"{table}\n\n{summarize_faults(names_by_state(self.layers), {})}"


def check_gradients(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: GradientsConfig | None = None,
) -> GradientReport:
    """Judge the gradients currently in `.grad`, per parameter; call it after `backward()`.

    With `optimizer`, parameters that it does not contain are reported. The model is not changed; an
    accelerator is synchronised once.
    """
    named: NamedTensors = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimized = None
    if optimizer is not None:
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        optimized = {name for name, parameter in named if id(parameter) in ids}
    if not named:
        return GradientReport([])
    with torch.no_grad():
        gradients = [p.grad for _, p in named if p.grad is not None]
        parts = [stacked_norms([p.detach() for _, p in named])]
        parts += [gradient_statistics(gradients).flatten()] if gradients else []
        numbers = torch.cat([part.to(parts[0].device) for part in parts]).tolist()  # waits
    layers = build_layers(named, numbers[len(named) :], numbers[: len(named)])
    return GradientReport(classify_layers(layers, config or GradientsConfig(), optimized=optimized))


def select_weights(layers: Sequence[Layer], limit: int) -> list[Layer]:
    """Return the layers with two or more dimensions, every n-th if there are too many."""
    weights = [layer for layer in layers if layer.dimensions > 1] or [*layers]
    return weights[:: -(-len(weights) // limit)]


def draw_gradient_flow(layers: Sequence[Layer], step: int) -> Any:
    """Plot gradient norm and relative update as bars, from input to output."""
    from runner.core.record import plots

    colours = dict.fromkeys(LayerState, plots.GREY) | {
        LayerState.FINE: plots.BLUE,
        LayerState.NOT_FINITE: plots.RED,
        LayerState.EXPLODING: plots.RED,
        LayerState.VANISHING: plots.ORANGE,
    }
    rows = select_weights(layers, MAX_BARS)
    states = {row.state for row in rows}
    return plots.gradient_flow(
        [row.name for row in rows],
        [row.norm for row in rows],
        [row.update_ratio for row in rows],
        [colours[row.state] for row in rows],
        {state.value: colours[state] for state in LayerState if state in states},
        step,
    )
