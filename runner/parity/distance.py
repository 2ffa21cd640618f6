"""How far a run's steps are from the reference's, and how far rounding alone may bring them."""

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
"""Times the error that the plain run has at one step in ten: the same roundings, differently
correlated."""
KINK = 0.1  # relative: what one activation on the other side of its kink can do to a gradient
KINKS = 5  # one step in so many may have such an activation


class ErrorKind(IntEnum):
    """What a tensor is, in the order in which a step computes them."""

    parameter = 0  # before the first step
    loss = 1
    grad_norm = 2
    gradient = 3
    update = 4  # the change of a parameter
    average = 5  # the change of its average
    buffer = 6  # the change of a buffer
    output = 7  # of a validation batch, in evaluation mode
    draw = 8  # a statistic over several draws of dropout


class Key(NamedTuple):
    """One tensor of each step (of each validation batch: an output)."""

    kind: ErrorKind
    name: str


class Difference(NamedTuple):
    """Norms, of one tensor at one step."""

    error: float  # of the difference from the reference
    size: float  # of the reference
    floor: float  # of what one rounding changes


class Agreement(Enum):
    """How far a candidate's numbers are those of the plain run."""

    exact = "exact"  # bit by bit
    explained = "explained by precision"
    fail = "FAIL"


@dataclass(frozen=True)
class ParityRow:
    """One tensor over all steps, at the first beyond its bound, else at the one nearest to it.

    Error and bound are relative to its norm in the reference. An `output` counts validation
    batches in place of steps.
    """

    step: int  # 1 is the first
    kind: str
    name: str
    error: float
    bound: float
    kinks: int = 0  # steps beyond it by as little as an activation's kink explains

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
        """Whether rounding explains it."""
        return self.error <= self.bound

    @property
    def excess(self) -> float:
        """The error in units of its bound."""
        return _share(self.error, self.bound)


@dataclass(frozen=True)
class Parity:
    """What comparing a set of techniques with the plain run found."""

    verdict: Agreement
    techniques: list[str]  # those that were applied
    refused: dict[str, str]  # those asked for that could not be, and why
    precision: str  # that the candidate says it computes in
    reference: str  # what stands for the truth: fp64, or fp32 where the model does not run in it
    steps: int
    first: ParityRow | None  # the first that precision does not explain
    rows: list[ParityRow]
    notes: list[str] = field(default_factory=list)
    not_judged: list[str] = field(default_factory=list)  # what a fault could hide in
    culprits: list[str] = field(default_factory=list)  # smallest set that fails
    alone: dict[str, str] = field(default_factory=dict)  # verdict of each technique by itself


class Distances:
    """The differences of each tensor, step by step."""

    def __init__(self) -> None:
        self.steps: dict[Key, list[Difference]] = {}

    def add(self, key: Key, ours: Tensor, theirs: Tensor, floor: float | None = None) -> None:
        """One more step of that tensor; `floor` where one rounding is not of its own size."""
        size = norm(torch.where(theirs.isfinite(), theirs, torch.zeros_like(theirs)))
        error = distance(ours, theirs)
        if floor is None:
            floor = ROUNDOFF.get(ours.dtype, 0.0) * size
        if error and not ours.is_floating_point():
            error = math.inf  # a count has to be the same
        self.steps.setdefault(key, []).append(Difference(error, size, floor))

    def add_change(self, key: Key, ours: Tensor, theirs: Tensor, start: Tensor) -> None:
        """How far a tensor went, against how far it should have gone, both from `start`."""
        if ours.shape != theirs.shape:
            return self.add(key, ours, theirs)
        before = start.double()
        mine, right = ours.double() - before, theirs.double() - before
        roundoff = ROUNDOFF.get(ours.dtype, 0.0)
        return self.add(key, mine, right, floor=roundoff * (norm(before) + norm(right)))

    def scale(self) -> dict[ErrorKind, list[float]]:
        """All tensors of a kind together, by step: their size, where one may be next to nothing."""
        scales: dict[ErrorKind, list[float]] = {}
        for key, steps in self.steps.items():
            before = scales.get(key.kind, [0.0] * len(steps))
            sizes = zip(before, steps, strict=False)
            scales[key.kind] = [math.hypot(one, step.size) for one, step in sizes]
        return scales


class Tolerance:
    """How far each tensor may be from the reference at any step, learned from plain runs.

    `worst` times the median over the steps, or `OFTEN` times what one step in ten is above, or what
    there is at that step; and of each as far as is typical of all of its kind, since the error of a
    few numbers is zero now and then.
    """

    def __init__(self, plain: Distances, worst: float) -> None:
        scale = plain.scale()
        self.shares: dict[Key, float] = {}  # of the scale of its kind
        self.own: dict[Key, list[float]] = {}  # what there is at each step
        typical: dict[ErrorKind, list[float]] = {}  # of the tensor's own size
        for key, steps in plain.steps.items():
            parts = [_share(d.error, s) for d, s in zip(steps, scale[key.kind], strict=True)]
            self.shares[key] = max(worst * median(parts), OFTEN * _often(parts))
            self.own[key] = [OFTEN * d.error for d in steps]
            shares = [_share(d.error, d.size) for d in steps]
            typical.setdefault(key.kind, []).append(median(shares))
        self.typical = {kind: worst * median(values) for kind, values in typical.items()}

    def bounds(self, key: Key, steps: Sequence[Difference], scale: Sequence[float]) -> list[float]:
        """Of the tensor at each step."""
        share, typical = self.shares.get(key, 0.0), self.typical.get(key.kind, 0.0)
        own = self.own.get(key, [0.0] * len(steps))
        each = zip(steps, scale, own, strict=True)
        return [max(share * s, typical * d.size, e) + d.floor for d, s, e in each]

    def widen(self, other: Tolerance) -> None:
        """Allow what the other allows, too."""
        for key, share in other.shares.items():
            self.shares[key] = max(self.shares.get(key, 0.0), share)
            pairs = zip(self.own.get(key, other.own[key]), other.own[key], strict=True)
            self.own[key] = [max(pair) for pair in pairs]
        for kind, share in other.typical.items():
            self.typical[kind] = max(self.typical.get(kind, 0.0), share)


def judge(distances: Distances, tolerance: Tolerance) -> Iterator[ParityRow]:
    """Each tensor, in the order of `ErrorKind`."""
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
    """Loss, norm, gradients and what happened to the buffers, which were `starts` before."""
    distances = Distances()
    for ours, theirs, start in zip(steps, truth, starts, strict=True):
        distances.add(Key(ErrorKind.loss, "loss"), ours.loss, theirs.loss)
        distances.add(Key(ErrorKind.grad_norm, "grad_norm"), ours.grad_norm, theirs.grad_norm)
        names = theirs.gradients.keys() | ours.gradients.keys()
        for name in names if ours.gradients else ():  # those inside one graph may be unknown
            known = [dense(one.gradients[name]) for one in (ours, theirs) if name in one.gradients]
            zero = torch.zeros_like(known[0])
            a, b = (dense(one.gradients.get(name, zero)) for one in (ours, theirs))
            distances.add(Key(ErrorKind.gradient, name), a, b)
        _compare_buffers(distances, ours.after.buffers, theirs.after.buffers, start)
    return distances


def _compare_buffers(distances: Distances, ours: Tensors, theirs: Tensors, start: Tensors) -> None:
    """Change against change; of counts, and of buffers that are new or of another shape, values."""
    for name, value in theirs.items():
        key, before = Key(ErrorKind.buffer, name), start.get(name)
        mine = ours.get(name, torch.zeros_like(value))
        if before is None or before.shape != value.shape or not value.is_floating_point():
            distances.add(key, mine, value)
        else:
            distances.add_change(key, mine, value, before)


def compare_outputs(distances: Distances, ours: list[Any], truth: list[Any]) -> None:
    """Floating-point outputs, one validation batch after another."""
    for batch in zip(ours, truth, strict=True):
        tensors = ([t for t in tree_leaves(one) if isinstance(t, Tensor)] for one in batch)
        leaves = ([t for t in some if t.is_floating_point()] for some in tensors)
        for number, (mine, right) in enumerate(zip(*leaves, strict=True)):
            distances.add(Key(ErrorKind.output, f"output {number}"), mine, right)


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether both are there and equal bit by bit, NaN included; the sign of zero aside."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and distance(a, b) == 0.0


def norm(tensor: Tensor) -> float:
    """The square root of the sum of squares, in fp64."""
    return float(torch.linalg.vector_norm(tensor.double()))


def dense(tensor: Tensor) -> Tensor:
    """The same, with its zeros written out."""
    return tensor.to_dense() if tensor.is_sparse else tensor


def distance(a: Tensor, b: Tensor) -> float:
    """The norm of the difference; Inf where only one of them is finite."""
    if a.shape != b.shape:
        return math.inf
    a, b = a.double(), b.double()
    result = norm(torch.where(a.isfinite() | b.isfinite(), a - b, 0.0))
    return math.inf if math.isnan(result) else result


def _share(error: float, size: float) -> float:
    return error / size if size else (0.0 if not error else math.inf)


def _often(values: list[float]) -> float:
    """What one in ten is above; of a few values the largest."""
    if len(values) < 10 or not all(map(math.isfinite, values)):
        return max(values)
    return quantiles(values, n=10)[-1]
