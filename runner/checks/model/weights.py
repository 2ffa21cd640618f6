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
HUGE_VECTOR = 1e12  # a bias may be the mean of a target that nobody has scaled
HUGE_STATISTIC = 1e30  # a variance of raw inputs: 1e9 bytes a flow make 1e18
NOTHING = 1e-30  # |weight| at which a layer adds nothing to anything
MAX_UNIT_VALUES = 2**27  # values in all up to which units are checked one by one


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
    def bytes(self) -> int:
        """Size of its values."""
        if is_lazy(self.original):
            return 0
        return int(self.tensor.numel() * self.tensor.element_size())


@dataclass(frozen=True, slots=True)
class Extremes:
    """What the host has read of one tensor."""

    low: float
    high: float
    digest: tuple[float, float]
    zero_units: int
    units: int  # 0: not checked one by one

    @property
    def largest(self) -> float:
        """By magnitude; NaN where there is one."""
        return max(abs(self.low), abs(self.high)) if self.low == self.low else math.nan


def named_tensors(model: nn.Module) -> list[NamedTensor]:
    """Parameters and buffers, those under several names by the first of them."""
    found: list[NamedTensor] = []
    seen: set[int] = set()
    for path, module in model.named_modules():
        for is_parameter, tensors in (
            (True, module.named_parameters(recurse=False)),
            (False, module.named_buffers(recurse=False)),
        ):
            for attribute, tensor in tensors:
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    name = f"{path}.{attribute}" if path else attribute
                    bare = torch.detach(tensor) if is_plain(tensor) else tensor
                    found.append(NamedTensor(name, bare, tensor, module, attribute, is_parameter))
    return found


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


def check_weights(
    model: nn.Module, tensors: Sequence[NamedTensor], trained: bool | None
) -> Iterator[Reason]:
    """What is wrong with the values; unless `trained`, a model may hold zeros and copies.

    Integers, and tensors without plain memory (meta, quantized, sharded), are passed over. The
    host waits for the device once, and again for what is not finite or seems to be double.
    """
    checked = [one for one in tensors if _has_numbers(one.tensor)]
    extremes = _read_extremes(checked)
    for one, numbers in zip(checked, extremes, strict=True):
        yield from _check_values(one, numbers, trained)
    yield from _find_duplicates(model, checked, extremes, trained)


def _has_numbers(tensor: Tensor) -> bool:
    numeric = tensor.is_floating_point() or tensor.is_complex()
    return is_plain(tensor) and numeric and tensor.numel() > 0


@torch.no_grad()
def _read_extremes(tensors: Sequence[NamedTensor]) -> list[Extremes]:
    """The extremes of each tensor, and of matrices those of each unit; one read per device."""
    room, units = MAX_UNIT_VALUES, []
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for i, one in enumerate(tensors):
        room -= one.tensor.numel()
        row, count = _extremes(one, room >= 0)
        units.append(count)
        by_device.setdefault(row.device, []).append((i, row))
    found: dict[int, list[float]] = {}
    for rows in by_device.values():
        table = torch.stack([row for _, row in rows]).tolist()  # waits
        found |= {i: row for (i, _), row in zip(rows, table, strict=True)}
    result = []
    for i, count in enumerate(units):
        low, high, a, b, zero = found[i]
        result.append(Extremes(low, high, (a, b), int(zero) if zero == zero else 0, count))
    return result


def _extremes(one: NamedTensor, by_unit: bool) -> tuple[Tensor, int]:
    """[low, high, two sums that tell layers apart, zero units], and how many units there are."""
    tensor = one.tensor
    if tensor.is_complex():
        tensor = torch.view_as_real(torch.resolve_conj(tensor))
    if tensor.element_size() == 1:
        tensor = tensor.float()
    wide = torch.float32 if tensor.device.type == "mps" else torch.float64  # which has no more
    unit = _unit_dimension(one)
    if unit is None or not by_unit or tensor.ndim < 2:
        pair = torch.stack(torch.aminmax(tensor)).to(wide)
        return torch.cat([pair, pair, pair.new_zeros(1)]), 0
    others = [i for i in range(tensor.ndim) if i != unit]
    # two passes along rows are vectorised; one `aminmax` along them takes four times as long
    low, high = torch.amin(tensor, others), torch.amax(tensor, others)
    zero = ((low == 0) & (high == 0)).sum().to(wide)
    low, high = low.to(wide), high.to(wide)
    return torch.stack([low.amin(), high.amax(), low.sum(), high.sum(), zero]), tensor.shape[unit]


def _unit_dimension(one: NamedTensor) -> int | None:
    """The dimension along which the units of a layer lie; None for what is no matrix."""
    if not one.is_parameter or not _is_matrix(one.tensor):
        return None
    return 1 if isinstance(one.owner, _ConvTransposeNd) and one.owner.groups == 1 else 0


def _is_matrix(tensor: Tensor) -> bool:
    """Whether it has two dimensions and more, those of one element left out."""
    return sum(size > 1 for size in tensor.shape) >= 2


def _check_values(one: NamedTensor, numbers: Extremes, trained: bool | None) -> Iterator[Reason]:
    low, high = numbers.low, numbers.high
    statistic = one.attribute.startswith("running_")
    if not math.isfinite(low) or not math.isfinite(high):
        # a buffer may be a mask, which is -Inf where nothing may be seen
        mask = low == -math.inf and high < math.inf and not (one.is_parameter or statistic)
        if not mask:
            yield _not_finite(one)
        return
    limit = HUGE_STATISTIC if statistic else math.inf
    if one.is_parameter:
        limit = HUGE if _is_matrix(one.tensor) else HUGE_VECTOR
    if numbers.largest > limit:
        evidence = f"values from {low:.3g} to {high:.3g}; more than {limit:.0e} is absurd"
        yield make_reason("weights.huge", Severity.WARNING, one.name, evidence)
    if low < 0 and one.attribute == "running_var" and isinstance(one.owner, _NormBase):
        evidence = f"down to {low:.3g}, and a variance is never below 0"
        yield make_reason("weights.negative_variance", Severity.REFUSAL, one.name, evidence)
    if one.is_parameter:
        yield from _check_idle(one, numbers, trained)


def _check_idle(one: NamedTensor, numbers: Extremes, trained: bool | None) -> Iterator[Reason]:
    """Layers and units that do nothing, or all do the same."""
    severity = Severity.WARNING if trained else Severity.NOTE  # many begin with a zero layer …
    some = Severity.NOTE if trained is False else Severity.WARNING  # … and few with some zero units
    matrix = _is_matrix(one.tensor)
    scale = one.attribute == "weight" and one.tensor.ndim == 1 and one.tensor.numel() > 1
    embedding = isinstance(one.owner, nn.Embedding | nn.EmbeddingBag)
    padding = int(embedding and one.owner.padding_idx is not None)  # a row that is zero on purpose
    if numbers.largest <= NOTHING:
        if matrix or scale:  # biases are often zero
            yield make_reason("weights.dead", severity, one.name, "all of it is zero")
    elif numbers.low == numbers.high:
        if matrix:
            learns = one.original.requires_grad  # else it may be a filter that somebody has chosen
            evidence = f"every value is {numbers.low:.3g}: its units are all the same"
            level = Severity.WARNING if learns else Severity.NOTE
            yield make_reason("weights.constant", level, one.name, evidence)
    elif numbers.zero_units > padding:
        kind = "entries" if embedding else "units"
        evidence = f"{numbers.zero_units - padding:,} of {numbers.units:,} {kind} are all zero"
        level = Severity.NOTE if embedding else some
        yield make_reason("weights.dead_units", level, one.name, evidence)


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


def _find_duplicates(
    model: nn.Module,
    tensors: Sequence[NamedTensor],
    extremes: Sequence[Extremes],
    trained: bool | None,
) -> Iterator[Reason]:
    """Matrices of the same bytes in different memory; tied ones are left out."""
    alike: dict[tuple[object, ...], list[NamedTensor]] = {}
    for one, numbers in zip(tensors, extremes, strict=True):
        varied = numbers.low < numbers.high and math.isfinite(numbers.largest)
        if one.is_parameter and _is_matrix(one.tensor) and varied:
            about = (one.tensor.shape, one.tensor.dtype, one.tensor.device)
            alike.setdefault((*about, numbers.low, numbers.high, numbers.digest), []).append(one)
    tied = {name: i for i, names in enumerate(tied_names(model)) for name in names}
    for first, *others in alike.values():
        copies = [
            other
            for other in others
            if tied.get(first.name, -1) != tied.get(other.name, -2)
            and torch.equal(first.tensor, other.tensor)
        ]
        if copies:
            frozen = first.original.requires_grad != copies[0].original.requires_grad
            # a target network, or layers that begin as copies
            level = Severity.NOTE if frozen or not trained else Severity.WARNING
            names = ", ".join(copy.name for copy in copies[:3]) + ", …" * (len(copies) > 3)
            evidence = f"the same bytes as {names}, and not tied"
            yield make_reason("weights.duplicated", level, first.name, evidence)
