"""Faults of parameters and buffers by their values: one transfer to the host."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from runner.checks.model.report import make_reason
from runner.security.trust import Reason, Severity

HUGE = 1e6  # |weight| in a matrix; the largest of published models are in the thousands
HUGE_VECTOR = 1e12  # a bias may be the mean of an unscaled target
HUGE_STATISTIC = 1e30  # a variance of raw inputs: 1e9 bytes a flow make 1e18
NOTHING = 1e-30  # |weight| at which a layer adds nothing to anything


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A parameter or buffer, and the module that holds it under `attribute`."""

    name: str
    tensor: Tensor  # detached
    owner: nn.Module
    attribute: str
    is_parameter: bool
    trains: bool

    @property
    def is_matrix(self) -> bool:
        """Whether it has two dimensions and more, those of one element left out."""
        return self.is_parameter and sum(size > 1 for size in self.tensor.shape) >= 2

    @property
    def unit_dimension(self) -> int:
        """The dimension along which the units of a matrix lie."""
        return int(isinstance(self.owner, _ConvTransposeNd) and self.owner.groups == 1)


def named_tensors(model: nn.Module) -> list[NamedTensor]:
    """Parameters and buffers, those under several names by the first of them."""
    tensors: dict[int, NamedTensor] = {}
    for path, module in model.named_modules():
        for is_parameter, own in ((True, module._parameters), (False, module._buffers)):
            for attribute, tensor in own.items():
                if tensor is None or id(tensor) in tensors:
                    continue
                name = f"{path}.{attribute}" if path else attribute
                bare = torch.detach(tensor) if is_plain(tensor) else tensor
                row = (name, bare, module, attribute, is_parameter, tensor.requires_grad)
                tensors[id(tensor)] = NamedTensor(*row)
    return list(tensors.values())


def is_plain(tensor: Tensor) -> bool:
    """Whether its values lie in memory as torch's own tensors have them."""
    if is_lazy(tensor) or tensor.is_meta or tensor.is_quantized:
        return False
    wrapper: object = tensor
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(wrapper)


@torch.no_grad()
def check_weights(tensors: Sequence[NamedTensor], trained: bool | None) -> Iterator[Reason]:
    """Faults of the values; a zero layer is one where the model is `trained`.

    Integers, and tensors without plain memory (meta, quantized, sharded), are passed over. The
    host waits for the device once, and again for tensors that are not finite.
    """
    by_device: dict[torch.device, list[NamedTensor]] = {}
    for one in tensors:
        if is_plain(one.tensor) and one.tensor.is_floating_point() and one.tensor.numel():
            by_device.setdefault(one.tensor.device, []).append(one)
    for group in by_device.values():
        rows = torch.stack([_statistics(one) for one in group]).tolist()  # waits
        for one, (low, high, zero_units) in zip(group, rows, strict=True):
            yield from _value_findings(one, low, high, int(zero_units), trained)


def _statistics(one: NamedTensor) -> Tensor:
    """[least value, largest value, units that are all zero]."""
    tensor = one.tensor.float() if one.tensor.element_size() == 1 else one.tensor
    unit = one.unit_dimension if one.is_matrix else 0
    if not one.is_matrix:
        tensor = tensor.reshape(1, -1)
    others = [i for i in range(tensor.ndim) if i != unit]
    # two passes along rows are vectorised; one `aminmax` along them takes four times as long
    low, high = torch.amin(tensor, others), torch.amax(tensor, others)
    zero = ((low == 0) & (high == 0)).sum()
    wide = torch.float32 if tensor.device.type == "mps" else torch.float64  # which has no more
    return torch.stack([low.amin().to(wide), high.amax().to(wide), zero.to(wide)])


def _value_findings(
    one: NamedTensor, low: float, high: float, zero_units: int, trained: bool | None
) -> Iterator[Reason]:
    statistic = one.attribute.startswith("running_")
    if not math.isfinite(low) or not math.isfinite(high):
        # a buffer may be a mask, which is -Inf where nothing may be seen
        if one.is_parameter or statistic or not (low == -math.inf and high < math.inf):
            yield _not_finite(one)
        return
    limit = HUGE_STATISTIC if statistic else math.inf
    if one.is_parameter:
        limit = HUGE if one.is_matrix else HUGE_VECTOR
    if max(abs(low), abs(high)) > limit:
        evidence = f"values from {low:.3g} to {high:.3g}; more than {limit:.0e} is absurd"
        yield make_reason("weights.huge", Severity.WARNING, one.name, evidence)
    if low < 0 and one.attribute == "running_var" and isinstance(one.owner, _NormBase):
        evidence = f"down to {low:.3g}, and a variance is never below 0"
        yield make_reason("weights.negative_variance", Severity.REFUSAL, one.name, evidence)
    scale = one.attribute == "weight" and one.tensor.numel() > 1  # biases are often zero
    if one.is_matrix or (one.is_parameter and scale):
        yield from _idle(one, low, high, zero_units, trained)


def _idle(
    one: NamedTensor, low: float, high: float, zero_units: int, trained: bool | None
) -> Iterator[Reason]:
    """Layers and units that do nothing, or all do the same."""
    embedding = isinstance(one.owner, nn.Embedding | nn.EmbeddingBag)
    padding = int(embedding and one.owner.padding_idx is not None)  # a row that is zero on purpose
    if max(abs(low), abs(high)) <= NOTHING:  # many fresh models have a zero layer
        severity = Severity.WARNING if trained else Severity.NOTE
        yield make_reason("weights.dead", severity, one.name, "all of it is zero")
    elif low == high and one.is_matrix:
        severity = Severity.WARNING if one.trains else Severity.NOTE  # a chosen filter is frozen
        evidence = f"every value is {low:.3g}: its units are all the same"
        yield make_reason("weights.constant", severity, one.name, evidence)
    elif one.is_matrix and zero_units > padding:
        kind = "entries" if embedding else "units"
        units = one.tensor.shape[one.unit_dimension]
        evidence = f"{zero_units - padding:,} of {units:,} {kind} are all zero"
        severity = Severity.NOTE if embedding or trained is False else Severity.WARNING
        yield make_reason("weights.dead_units", severity, one.name, evidence)


def _not_finite(one: NamedTensor) -> Reason:
    """How many, and where the first is; read from the device for this tensor alone."""
    tensor = one.tensor.float() if one.tensor.element_size() == 1 else one.tensor
    bad = ~torch.isfinite(tensor)
    nans = int(torch.isnan(tensor).sum())
    counts = ((nans, "NaN"), (int(bad.sum()) - nans, "Inf"))
    kinds = " and ".join(f"{n:,} {kind}" for n, kind in counts if n)
    first = torch.nonzero(bad)[0].tolist()
    evidence = f"{kinds} of {tensor.numel():,} values, the first at {first}"
    return make_reason("weights.not_finite", Severity.REFUSAL, one.name, evidence)
