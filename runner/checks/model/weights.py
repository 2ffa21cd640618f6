"""What the numbers in a model say: one pass over its memory, and one transfer to the host."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvTransposeNd

from runner.checks.model.inventory import Held, plain, tied
from runner.security.trust import Reason, Severity

HUGE = 1e6  # |weight| in a matrix; the largest of published models are in the thousands
HUGE_VECTOR = 1e12  # a bias may be the mean of a target that nobody has scaled
HUGE_STATISTIC = 1e30  # a variance of raw inputs: 1e9 bytes a flow make 1e18
NOTHING = 1e-30  # |weight| at which a layer adds nothing to anything
ROWS = 2**27  # elements in all up to which units are looked at one by one
PAIRS = 64  # layers that are compared byte for byte
WIDEST = 2**24  # elements of an 8-bit type, which is widened to be looked at
VARIANCE = re.compile(r"(^|_)(var|variance|std|stddev)$")
BENEATH = re.compile(r"log|raw", re.I)  # what may well be below 0: exp or softplus is yet to come
RETRAIN = "train it on, or initialise it again"


@dataclass(frozen=True, slots=True)
class Numbers:
    """What one tensor holds, as the host has read it."""

    low: float
    high: float
    digest: tuple[float, float]
    zero_rows: int
    rows: int  # 0: not looked at one by one

    @property
    def largest(self) -> float:
        """By magnitude; NaN where there is one."""
        return max(abs(self.low), abs(self.high)) if self.low == self.low else math.nan


def weights(model: nn.Module, tensors: Sequence[Held], trained: bool | None) -> Iterator[Reason]:
    """What is wrong with the values; unless `trained`, a model may hold zeros and copies.

    Integers, and tensors that are no plain memory (meta, quantized, sharded), are passed over.
    The host waits for the device once, and again for what is not finite or seems to be double.
    """
    looked = [one for one in tensors if _has_numbers(one.tensor)]
    read = measure(looked)
    for one, numbers in zip(looked, read, strict=True):
        yield from _values(one, numbers, trained)
    yield from _duplicates(model, looked, read, trained)


def measure(tensors: Sequence[Held]) -> list[Numbers]:
    """The extremes of each tensor, and of matrices those of each unit; read in one go a device."""
    room, counted = ROWS, []
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    with torch.no_grad():
        for i, one in enumerate(tensors):
            room -= one.tensor.numel()
            numbers, rows = _extremes(one, one_by_one=room >= 0)
            counted.append(rows)
            by_device.setdefault(numbers.device, []).append((i, numbers))
        found: dict[int, list[float]] = {}
        for on_device in by_device.values():
            table = torch.stack([numbers for _, numbers in on_device]).tolist()  # waits
            found |= {i: row for (i, _), row in zip(on_device, table, strict=True)}
    return [
        Numbers(low, high, (a, b), int(zero) if zero == zero else 0, rows)
        for (low, high, a, b, zero), rows in zip(
            (found[i] for i in range(len(tensors))), counted, strict=True
        )
    ]


def _has_numbers(tensor: Tensor) -> bool:
    if not plain(tensor) or not tensor.numel():
        return False
    narrow = tensor.element_size() == 1 and tensor.is_floating_point()
    return (tensor.is_floating_point() and not (narrow and tensor.numel() > WIDEST)) or (
        tensor.is_complex()
    )


def _extremes(one: Held, one_by_one: bool) -> tuple[Tensor, int]:
    """[low, high, two sums that tell layers apart, zero units], and how many units there are."""
    tensor = one.tensor
    if tensor.is_complex():
        tensor = torch.view_as_real(torch.resolve_conj(tensor))
    if tensor.element_size() == 1:
        tensor = tensor.float()
    wide = torch.float32 if tensor.device.type == "mps" else torch.float64  # which has no more
    unit = _units(one)
    if unit is None or not one_by_one or tensor.ndim < 2:
        low, high = torch.aminmax(tensor)
        pair = torch.stack([low, high]).to(wide)
        return torch.cat([pair, pair, pair.new_zeros(1)]), 0
    others = [i for i in range(tensor.ndim) if i != unit]
    # two passes along rows are vectorised; one `aminmax` along them takes four times as long
    low, high = torch.amin(tensor, others), torch.amax(tensor, others)
    empty = ((low == 0) & (high == 0)).sum().to(wide)
    low, high = low.to(wide), high.to(wide)
    ends = torch.stack([low.amin(), high.amax(), low.sum(), high.sum(), empty])
    return ends, tensor.shape[unit]


def _units(one: Held) -> int | None:
    """The dimension along which the units of a layer lie; None for what is no matrix."""
    if not one.is_parameter or not _is_matrix(one.tensor):
        return None
    return 1 if isinstance(one.owner, _ConvTransposeNd) and one.owner.groups == 1 else 0


def _is_matrix(tensor: Tensor) -> bool:
    """Whether it has two dimensions and more, those of one element left out."""
    return sum(size > 1 for size in tensor.shape) >= 2


def _values(one: Held, numbers: Numbers, trained: bool | None) -> Iterator[Reason]:
    low, high, largest = numbers.low, numbers.high, numbers.largest
    if not math.isfinite(low) or not math.isfinite(high):
        if one.is_parameter or not _is_mask(low, high, one.attribute):
            yield _not_finite(one)
        return
    limit = _limit(one)
    if largest > limit:
        yield Reason(
            "weights.huge", Severity.WARNING, one.name,
            f"values from {low:.3g} to {high:.3g}; more than {limit:.0e} is absurd",
            "was a file damaged, or did training diverge? load an earlier checkpoint",
        )  # fmt: skip
    if low < 0 and (bad := _negative(one)):
        yield Reason(
            "weights.negative_variance", bad, one.name, f"down to {low:.3g}, and a variance or "
            "deviation is never below 0", "take its statistics anew, or load an earlier checkpoint",
        )  # fmt: skip
    if one.is_parameter:
        yield from _idle(one, numbers, trained)


def _idle(one: Held, numbers: Numbers, trained: bool | None) -> Iterator[Reason]:
    """Layers and units that do nothing, or all do the same."""
    severity = Severity.WARNING if trained else Severity.NOTE  # many begin with a zero layer …
    some = Severity.NOTE if trained is False else Severity.WARNING  # … and few with some zero units
    matrix = _is_matrix(one.tensor)
    scale = one.attribute == "weight" and one.tensor.ndim == 1 and one.tensor.numel() > 1
    if numbers.largest <= NOTHING:
        if matrix or scale:  # biases are often zero
            yield Reason("weights.dead", severity, one.name, "all of it is zero", RETRAIN)
    elif numbers.low == numbers.high:
        if matrix:
            learns = one.original.requires_grad  # else it may be a filter that somebody has chosen
            yield Reason(
                "weights.constant", Severity.WARNING if learns else Severity.NOTE, one.name,
                f"every value is {numbers.low:.3g}: its units are all the same", RETRAIN,
            )  # fmt: skip
    elif (zero := numbers.zero_rows - _padding(one)) > 0:
        words = isinstance(one.owner, nn.Embedding | nn.EmbeddingBag)
        yield Reason(
            "weights.dead_units", Severity.NOTE if words else some, one.name,
            f"{zero:,} of {numbers.rows:,} {'entries' if words else 'units'} are all zero",
            "they add nothing: prune them, or initialise them again",
        )  # fmt: skip


def _padding(one: Held) -> int:
    """Rows that are zero on purpose."""
    embedding = isinstance(one.owner, nn.Embedding | nn.EmbeddingBag)
    return int(embedding and one.owner.padding_idx is not None)


def _limit(one: Held) -> float:
    if one.is_parameter:
        return HUGE if _is_matrix(one.tensor) else HUGE_VECTOR
    # other buffers may hold anything, such as the least number there is where a mask is
    return HUGE_STATISTIC if one.attribute.startswith("running_") else math.inf


def _is_mask(low: float, high: float, name: str) -> bool:
    """Whether a buffer may be a mask, which is -Inf where nothing may be seen."""
    return low == -math.inf and high < math.inf and not name.startswith("running_")


def _negative(one: Held) -> Severity | None:
    """How bad a negative value is where there should be none; None where it may be.

    By name, but for torch's own: `std` is one, `sigma` not, which noisy layers let go below 0.
    """
    if one.attribute == "running_var" and isinstance(one.owner, _NormBase):
        return Severity.REFUSAL
    if VARIANCE.search(one.attribute) and not BENEATH.search(one.attribute):
        return Severity.WARNING
    return None


def _not_finite(one: Held) -> Reason:
    """How many, and where the first is; read from the device for this tensor alone."""
    tensor = one.tensor.float() if one.tensor.element_size() == 1 else one.tensor
    bad = ~torch.isfinite(tensor)
    nans = int(torch.isnan(tensor).sum())
    infs = int(bad.sum()) - nans
    first = torch.nonzero(bad)[0].tolist()
    said = " and ".join(f"{n:,} {what}" for n, what in ((nans, "NaN"), (infs, "Inf")) if n)
    return Reason(
        "weights.not_finite", Severity.REFUSAL, one.name,
        f"{said} of {tensor.numel():,} values, the first at {first}",
        "load an earlier checkpoint, or initialise it again",
    )  # fmt: skip


def _duplicates(
    model: nn.Module, tensors: Sequence[Held], read: Sequence[Numbers], trained: bool | None
) -> Iterator[Reason]:
    """Matrices of the same bytes that are not the same memory; what is tied is left out."""
    alike: dict[tuple[object, ...], list[Held]] = {}
    for one, numbers in zip(tensors, read, strict=True):
        told_apart = numbers.low < numbers.high and math.isfinite(numbers.largest)
        if one.is_parameter and _is_matrix(one.tensor) and told_apart:
            tensor = one.tensor
            key = (tensor.shape, tensor.dtype, tensor.device, numbers.low, numbers.high,
                   numbers.digest)  # fmt: skip
            alike.setdefault(key, []).append(one)
    groups = [group for group in alike.values() if len(group) > 1]
    if not groups:
        return
    together = {name: i for i, names in enumerate(tied(model)) for name in names}
    left = PAIRS
    for first, *others in groups:
        copies = []
        for other in others[:left]:
            left -= 1
            same = together.get(first.name, -1) == together.get(other.name, -2)
            if not same and torch.equal(first.tensor, other.tensor):
                copies.append(other)
        if copies:
            frozen = first.original.requires_grad != copies[0].original.requires_grad
            note = frozen or not trained  # a target network, or layers that begin as copies
            names = ", ".join(copy.name for copy in copies[:3]) + ", …" * (len(copies) > 3)
            yield Reason(
                "weights.duplicated", Severity.NOTE if note else Severity.WARNING, first.name,
                f"the same bytes as {names}, and not tied",
                "tie them if they are one; else initialise each on its own",
            )  # fmt: skip
