"""Parameters and buffers of a model, and what their values say: one transfer to the host."""

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
    original: Tensor
    owner: nn.Module
    attribute: str
    is_parameter: bool

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
                tensors[id(tensor)] = NamedTensor(
                    name, bare, tensor, module, attribute, is_parameter
                )
    return list(tensors.values())


def tied_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several: one tensor, or two of the same memory."""
    names: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        place: tuple[object, ...] = (id(tensor),)
        if is_plain(tensor) and tensor.numel():
            place = (str(tensor.device), tensor.data_ptr(), tensor.shape, tensor.stride())
        names.setdefault(place, []).append(name)
    return [group for group in names.values() if len(group) > 1]


def is_plain(tensor: Tensor) -> bool:
    """Whether its values lie in memory as torch's own tensors have them."""
    if is_lazy(tensor) or tensor.is_meta or tensor.is_quantized:
        return False
    wrapper: object = tensor
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(wrapper)


@torch.no_grad()
def check_weights(
    model: nn.Module, tensors: Sequence[NamedTensor], trained: bool | None
) -> Iterator[Reason]:
    """What is wrong with the values; unless `trained`, a model may hold zeros and copies.

    Integers, and tensors without plain memory (meta, quantized, sharded), are passed over. The
    host waits for the device once, and again for what is not finite or seems to be double.
    """
    checked = [one for one in tensors if _has_numbers(one.tensor)]
    by_device: dict[torch.device, list[NamedTensor]] = {}
    for one in checked:
        by_device.setdefault(one.tensor.device, []).append(one)
    values: dict[str, list[float]] = {}
    for group in by_device.values():
        rows = torch.stack([_statistics(one) for one in group]).tolist()  # waits
        values |= {one.name: row for one, row in zip(group, rows, strict=True)}
    for one in checked:
        low, high, zero_units = values[one.name][:3]
        yield from _value_findings(one, low, high, zero_units, trained)
    yield from _duplicates(model, checked, values, trained)


def _has_numbers(tensor: Tensor) -> bool:
    numeric = tensor.is_floating_point() or tensor.is_complex()
    return is_plain(tensor) and numeric and tensor.numel() > 0


def _statistics(one: NamedTensor) -> Tensor:
    """[low, high, zero units, sum of the units' lows, of their highs]; equal for equal matrices."""
    tensor = one.tensor
    if tensor.is_complex():
        tensor = torch.view_as_real(torch.resolve_conj(tensor))
    if tensor.element_size() == 1:
        tensor = tensor.float()
    unit = one.unit_dimension if one.is_matrix else 0
    if not one.is_matrix:
        tensor = tensor.reshape(1, -1)
    others = [i for i in range(tensor.ndim) if i != unit]
    # two passes along rows are vectorised; one `aminmax` along them takes four times as long
    low, high = torch.amin(tensor, others), torch.amax(tensor, others)
    zero = ((low == 0) & (high == 0)).sum()
    wide = torch.float32 if tensor.device.type == "mps" else torch.float64  # which has no more
    low, high = low.to(wide), high.to(wide)
    return torch.stack([low.amin(), high.amax(), zero.to(wide), low.sum(), high.sum()])


def _value_findings(
    one: NamedTensor, low: float, high: float, zero_units: float, trained: bool | None
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
        yield from _idle(one, low, high, int(zero_units), trained)


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
        # a frozen one may be a filter that was chosen
        severity = Severity.WARNING if one.original.requires_grad else Severity.NOTE
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


def _duplicates(
    model: nn.Module,
    tensors: Sequence[NamedTensor],
    values: dict[str, list[float]],
    trained: bool | None,
) -> Iterator[Reason]:
    """Matrices of the same bytes in different memory; tied ones are left out."""
    alike: dict[tuple[object, ...], list[NamedTensor]] = {}
    for one in tensors:
        row = values[one.name]
        if one.is_matrix and row[0] < row[1] and math.isfinite(row[1] - row[0]):
            about = (one.tensor.shape, one.tensor.dtype, one.tensor.device, *row)
            alike.setdefault(about, []).append(one)
    tied = {name: i for i, names in enumerate(tied_names(model)) for name in names}
    for first, *others in alike.values():
        copies = [
            other
            for other in others
            if tied.get(first.name, -1) != tied.get(other.name, -2)
            and torch.equal(first.tensor, other.tensor)
        ]
        if copies:
            # a target network, or layers that begin as copies
            frozen = first.original.requires_grad != copies[0].original.requires_grad
            severity = Severity.NOTE if frozen or not trained else Severity.WARNING
            names = ", ".join(copy.name for copy in copies[:3]) + ", …" * (len(copies) > 3)
            evidence = f"the same bytes as {names}, and not tied"
            yield make_reason("weights.duplicated", severity, first.name, evidence)
