"""Distances between a run's steps and the reference, and tolerances for rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from runner.parity.numerics import ROUNDOFF
from runner.parity.trajectory import StepRecord, Tensors

OFTEN = 8.0
"""Factor on the plain run's 90th percentile error: equal roundings, differently
correlated."""
KINK = 0.1  # relative change of a gradient when one activation crosses its kink
KINKS = 5  # at most one step in KINKS may be explained by a kink


class ErrorKind(IntEnum):
    """Kinds of tensors, in the order in which a step computes them."""

    parameter = 0  # before the first step
    loss = 1
    grad_norm = 2
    gradient = 3
    update = 4  # the change of a parameter
    average = 5  # change of the averaged weights
    buffer = 6  # the change of a buffer
    output = 7  # evaluation mode, of a validation batch
    draw = 8  # a statistic over several draws of dropout


class Key(NamedTuple):
    """Identifies one tensor of each step (for outputs: of each validation batch)."""

    kind: ErrorKind
    name: str


class Difference(NamedTuple):
    """Norms for one tensor at one step."""

    error: float  # difference from the reference
    size: float  # the reference itself
    floor: float  # change by a single rounding


class Agreement(Enum):
    """How closely a candidate's numbers match the plain run."""

    exact = "exact"  # bit-equal
    explained = "explained by precision"
    fail = "FAIL"


@dataclass(frozen=True)
class ParityRow:
    """A tensor over all steps: the first step beyond its bound, else the nearest to it.

    Error and bound are relative to its norm in the reference. For an `output`, steps are validation
    batches.
    """

    step: int  # 1-based
    kind: str
    name: str
    error: float
    bound: float
    kinks: int = 0  # number of steps beyond the bound that a kink explains

    def __str__(self) -> str:
        what = self.kind if self.name == self.kind else f"{self.kind} of {self.name}"
        places = {
            "draw": f"{self.name} over draws of dropout",
            "output": f"{self.name} in evaluation mode, of validation batch {self.step}",
            "parameter": f"{what} before step 1",
        }
        place = places.get(self.kind, f"{what} at step {self.step}")
        return f"{place}: off by {self.error:.1e}, rounding or chance explains {self.bound:.1e}"

    @property
    def within(self) -> bool:
        """Whether the error is within the bound."""
        return self.error <= self.bound

    @property
    def excess(self) -> float:
        """The error as a multiple of its bound."""
        return _share(self.error, self.bound)


@dataclass(frozen=True)
class Parity:
    """The result of comparing a set of techniques with the plain run."""

    verdict: Agreement
    techniques: list[str]  # applied techniques
    refused: dict[str, str]  # requested techniques that were not applied, with the reason
    precision: str  # in which the candidate computes
    reference: str  # fp64, or the baseline if the model does not run in fp64
    steps: int
    first: ParityRow | None  # the first beyond its bound
    rows: list[ParityRow]
    notes: list[str] = field(default_factory=list)
    not_judged: list[str] = field(default_factory=list)  # where a fault could go unnoticed
    culprits: list[str] = field(default_factory=list)  # smallest failing set
    alone: dict[str, str] = field(default_factory=dict)  # verdicts of single techniques


class Distances:
    """The differences of each tensor, by step."""

    def __init__(self) -> None:
        self.steps: dict[Key, list[Difference]] = {}

    def add(self, key: Key, ours: Tensor, theirs: Tensor, floor: float | None = None) -> None:
        """Add a step of a tensor; `floor` overrides the error of a single rounding."""
        size = norm(torch.where(theirs.isfinite(), theirs, torch.zeros_like(theirs)))
        error = distance(ours, theirs)
        if floor is None:
            floor = ROUNDOFF.get(ours.dtype, 0.0) * size
        if error and not ours.is_floating_point():
            error = math.inf  # a count has to be the same
        self.steps.setdefault(key, []).append(Difference(error, size, floor))

    def add_change(self, key: Key, ours: Tensor, theirs: Tensor, start: Tensor) -> None:
        """Add the difference between two changes of a tensor, both from `start`."""
        if ours.shape != theirs.shape:
            return self.add(key, ours, theirs)
        before = start.double()
        mine, right = ours.double() - before, theirs.double() - before
        roundoff = ROUNDOFF.get(ours.dtype, 0.0)
        return self.add(key, mine, right, floor=roundoff * (norm(before) + norm(right)))

    def scale(self) -> dict[ErrorKind, list[float]]:
        """Return the combined norm of all tensors of each kind, by step."""
        scales: dict[ErrorKind, list[float]] = {}
        for key, steps in self.steps.items():
            before = scales.get(key.kind, [0.0] * len(steps))
            sizes = zip(before, steps, strict=False)
            scales[key.kind] = [math.hypot(one, step.size) for one, step in sizes]
        return scales


class Tolerance:
    """Bounds on each tensor's distance from the reference, learned from plain runs.

    The maximum of `worst` times the median over steps, `OFTEN` times the 90th percentile, `OFTEN`
    times the error at that step, and `worst` times the median over tensors of its kind, since the
    error of a small tensor is sometimes zero.
    """

    def __init__(self, plain: Distances, worst: float) -> None:
        scale = plain.scale()
        self.shares: dict[Key, float] = {}  # relative to the scale of its kind
        self.own: dict[Key, list[float]] = {}  # absolute, by step
        typical: dict[ErrorKind, list[float]] = {}  # relative to the tensor's own norm
        for key, steps in plain.steps.items():
            parts = [_share(d.error, s) for d, s in zip(steps, scale[key.kind], strict=True)]
            self.shares[key] = max(worst * median(parts), OFTEN * _often(parts))
            self.own[key] = [OFTEN * d.error for d in steps]
            shares = [_share(d.error, d.size) for d in steps]
            typical.setdefault(key.kind, []).append(median(shares))
        self.typical = {kind: worst * median(values) for kind, values in typical.items()}

    def bounds(self, key: Key, steps: Sequence[Difference], scale: Sequence[float]) -> list[float]:
        """Return the tensor's bound at each step."""
        share, typical = self.shares.get(key, 0.0), self.typical.get(key.kind, 0.0)
        own = self.own.get(key, [0.0] * len(steps))
        each = zip(steps, scale, own, strict=True)
        return [max(share * s, typical * d.size, e) + d.floor for d, s, e in each]

    def widen(self, other: Tolerance) -> None:
        """Raise the bounds to at least those of `other`."""
        for key, share in other.shares.items():
            self.shares[key] = max(self.shares.get(key, 0.0), share)
            pairs = zip(self.own.get(key, other.own[key]), other.own[key], strict=True)
            self.own[key] = [max(pair) for pair in pairs]
        for kind, share in other.typical.items():
            self.typical[kind] = max(self.typical.get(kind, 0.0), share)


def judge(distances: Distances, tolerance: Tolerance) -> Iterator[ParityRow]:
    """Yield a row for each tensor, in the order of `ErrorKind`."""
    scale = distances.scale()
    for key in sorted(distances.steps, key=lambda key: key.kind):
        steps = distances.steps[key]
        bounds = tolerance.bounds(key, steps, scale[key.kind])
        beyond = [i for i, d in enumerate(steps) if not d.error <= bounds[i]]
        kinky = key.kind in (ErrorKind.grad_norm, ErrorKind.gradient)
        small = [i for i in beyond if kinky and steps[i].error <= KINK * steps[i].size]
        if len(small) > len(steps) // KINKS:
            small = []
        ratios = [_share(d.error, bound) for d, bound in zip(steps, bounds, strict=True)]
        for i in small:
            ratios[i] = -1.0
        large = [i for i in beyond if i not in small]
        worst = large[0] if large else ratios.index(max(ratios))
        error, size, _ = steps[worst]
        size = size if size and math.isfinite(size) else 1.0
        kind, name = key.kind.name, key.name
        yield ParityRow(worst + 1, kind, name, error / size, bounds[worst] / size, len(small))


def compare_steps(
    steps: list[StepRecord], truth: list[StepRecord], starts: list[Tensors]
) -> Distances:
    """Compare loss, norm, gradients, and the buffers' changes from `starts`."""
    distances = Distances()
    for ours, theirs, start in zip(steps, truth, starts, strict=True):
        distances.add(Key(ErrorKind.loss, "loss"), ours.loss, theirs.loss)
        distances.add(Key(ErrorKind.grad_norm, "grad_norm"), ours.grad_norm, theirs.grad_norm)
        names = theirs.gradients.keys() | ours.gradients.keys()
        for name in names if ours.gradients else ():  # gradients inside one graph may be unknown
            known = [dense(one.gradients[name]) for one in (ours, theirs) if name in one.gradients]
            zero = torch.zeros_like(known[0])
            a, b = (dense(one.gradients.get(name, zero)) for one in (ours, theirs))
            distances.add(Key(ErrorKind.gradient, name), a, b)
        _compare_buffers(distances, ours.after.buffers, theirs.after.buffers, start)
    return distances


def _compare_buffers(distances: Distances, ours: Tensors, theirs: Tensors, start: Tensors) -> None:
    """Compare changes; for integers, new or reshaped buffers, values."""
    for name, value in theirs.items():
        key, before = Key(ErrorKind.buffer, name), start.get(name)
        mine = ours.get(name, torch.zeros_like(value))
        if before is None or before.shape != value.shape or not value.is_floating_point():
            distances.add(key, mine, value)
        else:
            distances.add_change(key, mine, value, before)


def compare_outputs(distances: Distances, ours: list[Any], truth: list[Any]) -> None:
    """Compare floating-point outputs, by validation batch."""
    for batch in zip(ours, truth, strict=True):
        tensors = ([t for t in tree_leaves(one) if isinstance(t, Tensor)] for one in batch)
        leaves = ([t for t in some if t.is_floating_point()] for some in tensors)
        for number, (mine, right) in enumerate(zip(*leaves, strict=True)):
            distances.add(Key(ErrorKind.output, f"output {number}"), mine, right)


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether both exist and are bit-equal, NaN included; 0 and -0 count as equal."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and distance(a, b) == 0.0


def norm(tensor: Tensor) -> float:
    """Return the 2-norm, computed in fp64."""
    return float(torch.linalg.vector_norm(tensor.double()))


def dense(tensor: Tensor) -> Tensor:
    """Convert a sparse tensor to dense."""
    return tensor.to_dense() if tensor.is_sparse else tensor


def distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference; Inf if only one of two values is finite."""
    if a.shape != b.shape:
        return math.inf
    a, b = a.double(), b.double()
    result = norm(torch.where(a.isfinite() | b.isfinite(), a - b, 0.0))
    return math.inf if math.isnan(result) else result


def _share(error: float, size: float) -> float:
    return error / size if size else (0.0 if not error else math.inf)


def _often(values: list[float]) -> float:
    """Return the 90th percentile; of fewer than ten values the maximum."""
    if len(values) < 10 or not all(map(math.isfinite, values)):
        return max(values)
    return quantiles(values, n=10)[-1]
