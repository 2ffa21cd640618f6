"""Statistics of each parameter's gradient, weight and update, and what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from runner.debug.config import GradientsConfig
from runner.record import markdown

Named = list[tuple[str, Tensor]]
Dead = Mapping[str, tuple[int, int]]  # dead units and all units, by layer

NAMED = 5  # names in a line; more are only counted
STATISTICS = 5  # norm, largest, sum, how many are not 0, how many are not finite


class LayerState(StrEnum):
    """What is wrong with a layer, the worst first."""

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
"""The kind of fault in the history; FINE has none."""
PHRASES = {
    LayerState.NOT_FINITE: ("is not finite", "layers are not finite"),
    LayerState.EXPLODING: ("explodes", "layers explode"),
    LayerState.VANISHING: ("vanishes", "layers vanish"),
    LayerState.NO_GRADIENT: ("gets no gradient", "parameters get no gradient"),
    LayerState.NOT_OPTIMIZED: ("is in no optimizer", "parameters are in no optimizer"),
}
COLUMNS = "layer norm mean std largest zeros non-finite gradient/weight update/weight state".split()


@dataclass(frozen=True)
class Layer:
    """A parameter at one look; None where there is no such number, as without a gradient.

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
    state: LayerState = LayerState.FINE

    @property
    def rms(self) -> float | None:
        """Root mean square of the gradient."""
        return None if self.norm is None or not self.size else self.norm / math.sqrt(self.size)

    def as_dict(self) -> dict[str, Any]:
        """For a file: numbers to four digits, and null for what JSON cannot say."""
        numbers = {
            name: float(f"{value:.4g}") if value is not None and math.isfinite(value) else None
            for name, value in vars(self).items()
            if name not in ("name", "size", "dimensions", "state")
        }
        return {"layer": self.name, **numbers, "state": self.state.value}

    def cells(self) -> list[str]:
        """A row of a table, under `COLUMNS`."""
        numbers = [self.norm, self.mean, self.std, self.largest, self.zeros, self.non_finite]
        numbers += [self.ratio, self.update_ratio]
        cells = ["–" if value is None else f"{value:.2e}" for value in numbers]
        return [self.name, *cells, self.state.value]


# -- numbers ----------------------------------------------------------------------------------


def measure(gradients: Sequence[Tensor], scale: Tensor | None = None) -> Tensor:
    """[STATISTICS, len(gradients)] on the device of the first, in fp32; no host sync."""
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
    """The values of a tensor that can differ from 0, real and in a precision fit for sums."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    return tensor if tensor.numel() else tensor.new_zeros(1)


def describe(named: Named, numbers: Sequence[float], weights: Sequence[float]) -> list[Layer]:
    """A layer for each of `named`; `numbers` is the flat result of `measure`, on the host."""
    count = len(numbers) // STATISTICS
    columns = [numbers[i * count : (i + 1) * count] for i in range(STATISTICS)]
    rows = iter(zip(*columns, strict=True))
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
    layer: Layer, norm: float, largest: float, total: float, nonzero: float, non_finite: float
) -> Layer:
    mean = total / layer.size
    variance = norm**2 / layer.size - mean**2  # below 0 by rounding
    return replace(
        layer,
        norm=norm,
        mean=mean,
        std=math.nan if math.isnan(variance) else math.sqrt(max(0.0, variance)),
        largest=largest,
        zeros=max(0.0, 1 - nonzero / layer.size),
        non_finite=non_finite / layer.size,
        ratio=norm / layer.weight_norm if layer.weight_norm else None,
    )


# -- verdicts ---------------------------------------------------------------------------------


def judge(
    layers: Sequence[Layer],
    config: GradientsConfig,
    usual: Mapping[str, float] | None = None,
    optimized: frozenset[str] | None = None,
) -> list[Layer]:
    """The layers with their states; `usual` has the norm that a layer had so far, by its name.

    `optimized` are the names that an optimizer has, where that is known.
    """
    sizes = [layer.rms for layer in layers if layer.rms and math.isfinite(layer.rms)]
    middle = median(sizes) if sizes else 0.0
    judged = []
    for layer in layers:
        state = _state(layer, config, middle, (usual or {}).get(layer.name))
        if state is LayerState.FINE and optimized is not None and layer.name not in optimized:
            state = LayerState.NOT_OPTIMIZED
        judged.append(replace(layer, state=state))
    return judged


def _state(layer: Layer, config: GradientsConfig, middle: float, usual: float | None) -> LayerState:
    if not layer.size:
        return LayerState.FINE
    if layer.norm is None or layer.rms is None:
        return LayerState.NO_GRADIENT
    if layer.non_finite:
        return LayerState.NOT_FINITE
    most, times = config.exploding.absolute, config.exploding.relative
    limits = [most, times * usual if times is not None and usual else None, math.inf]
    if any(layer.norm > limit for limit in limits if limit is not None):
        return LayerState.EXPLODING
    least, share = config.vanishing.absolute, config.vanishing.relative
    limits = [least, share * middle if share is not None else None]
    # a bias before a normalisation has no gradient but noise, rightly: weights only
    if layer.dimensions > 1 and any(layer.rms < limit for limit in limits if limit is not None):
        return LayerState.VANISHING
    return LayerState.FINE


def names_by_state(layers: Sequence[Layer]) -> dict[LayerState, list[str]]:
    """The names of the layers with a fault, by its state."""
    names: dict[LayerState, list[str]] = {}
    for layer in layers:
        if layer.state is not LayerState.FINE:
            names.setdefault(layer.state, []).append(layer.name)
    return names


def summarize(names: Mapping[LayerState, Collection[str]], dead: Dead) -> str:
    """The faults in a few words: layers by their state, and layers with dead units."""
    parts = []
    for state, (one, many) in PHRASES.items():
        if layers := names.get(state, ()):
            single = f"{next(iter(layers))} {one}"
            parts.append(single if len(layers) == 1 else f"{len(layers)} {many}")
    if dead:
        name, (gone, units) = max(dead.items(), key=lambda item: item[1][0] / item[1][1])
        more = f", and in {len(dead) - 1} layers more" if len(dead) > 1 else ""
        parts.append(f"{name}: {gone} of {units} units dead{more}")
    return "; ".join(parts) or "nothing amiss"


def join_names(names: Sequence[str]) -> str:
    """Names in a line, the first few of many."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


# -- a loop of the user's own -----------------------------------------------------------------


@dataclass(frozen=True)
class GradientReport:
    """The result of `check_gradients`: a row for each parameter, and its faults."""

    layers: list[Layer]

    @property
    def problems(self) -> list[str]:
        """Each layer with a fault, in a few words; empty: all is well."""
        return [
            f"{row.name}: {row.state}" for row in self.layers if row.state is not LayerState.FINE
        ]

    def __str__(self) -> str:
        return f"{layer_table(self.layers, {})}\n\n{summarize(names_by_state(self.layers), {})}"


def check_gradients(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: GradientsConfig | None = None,
) -> GradientReport:
    """Judge the gradients that are in `.grad` now, parameter by parameter.

    Call it after `backward()`. With the optimizer, parameters that it does not have are named.
    The model is not changed; on an accelerator the host waits once.
    """
    named: Named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimized = None
    if optimizer is not None:
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        optimized = frozenset(name for name, parameter in named if id(parameter) in ids)
    if not named:
        return GradientReport([])
    with torch.no_grad():
        gradients = [p.grad for _, p in named if p.grad is not None]
        parts = [norms([p.detach() for _, p in named])]
        parts += [measure(gradients).flatten()] if gradients else []
        numbers = torch.cat([part.to(parts[0].device) for part in parts]).tolist()  # waits
    layers = describe(named, numbers[len(named) :], numbers[: len(named)])
    return GradientReport(judge(layers, config or GradientsConfig(), optimized=optimized))


# -- pictures and tables ----------------------------------------------------------------------


def by_module(layers: Sequence[Layer], most: int = 24) -> list[Layer]:
    """The modules as layers, in their order: norms over their parameters, and the worst state."""
    modules = []
    for name, own in _group_by_path(layers, most).items():
        weight = _root_sum([layer.weight_norm for layer in own]) or 0.0
        steps = [
            layer.update_ratio * (layer.weight_norm or 0.0)
            for layer in own
            if layer.update_ratio is not None
        ]
        trained = [layer for layer in own if layer.state is not LayerState.NO_GRADIENT] or own
        module = Layer(
            name,
            sum(layer.size for layer in own),
            1,
            norm=_root_sum([layer.norm for layer in own]),
            update_ratio=math.hypot(*steps) / weight if steps and weight else None,
            state=next(
                state for state in LayerState if state in {layer.state for layer in trained}
            ),
        )
        modules.append(module)
    return modules


def _group_by_path(layers: Sequence[Layer], most: int) -> dict[str, list[Layer]]:
    """Layers by as much of their module's path as leaves no more than `most` groups."""
    paths = [layer.name.split(".")[:-1] or [layer.name] for layer in layers]
    depth = max(map(len, paths), default=1)
    while depth > 1 and len({tuple(path[:depth]) for path in paths}) > most:
        depth -= 1
    groups: dict[str, list[Layer]] = {}
    for path, layer in zip(paths, layers, strict=True):
        groups.setdefault(".".join(path[:depth]), []).append(layer)
    return groups


def _root_sum(values: Sequence[float | None]) -> float | None:
    """The norm of several tensors from the norm of each."""
    known = [value for value in values if value is not None]
    return math.hypot(*known) if known else None


def draw_flow(layers: Sequence[Layer], step: int) -> Any:
    """Bars for the norm of the gradient and the relative update, from input to output."""
    from runner.record import plots

    colours = dict.fromkeys(LayerState, plots.GREY) | {
        LayerState.FINE: plots.BLUE,
        LayerState.NOT_FINITE: plots.RED,
        LayerState.EXPLODING: plots.RED,
        LayerState.VANISHING: plots.ORANGE,
    }
    rows = by_module(layers)
    return plots.gradient_flow(
        [row.name for row in rows],
        [row.norm for row in rows],
        [row.update_ratio for row in rows],
        [colours[row.state] for row in rows],
        {state.value: colours[state] for state in LayerState if state in {r.state for r in rows}},
        step,
    )


def layer_table(layers: Sequence[Layer], dead: Dead) -> str:
    """A table in Markdown."""
    text = markdown.table(COLUMNS, [layer.cells() for layer in layers])
    if dead:
        rows = [(name, f"{gone} of {units}") for name, (gone, units) in dead.items()]
        text += "\n\n" + markdown.table(("layer", "dead units"), rows)
    return text
