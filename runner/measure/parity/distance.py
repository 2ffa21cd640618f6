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

from runner.measure.parity.numerics import ROUNDOFF, to_fp64
from runner.measure.parity.trajectory import StepRecord, Tensors, TrajectoryState

P90_FACTOR = 8.0  # on the plain run's 90th percentile error: roundings correlate differently
KINK_ERROR = 0.1  # relative change of a gradient when one activation crosses its kink
STEPS_PER_KINK = 5  # at most one step in so many may be explained by a kink


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


class TensorKey(NamedTuple):
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
        subject = self.kind if self.name == self.kind else f"{self.kind} of {self.name}"
        places = {
            "draw": f"{self.name} over draws of dropout",
            "output": f"{self.name} in evaluation mode, of validation batch {self.step}",
            "parameter": f"{subject} before step 1",
        }
        place = places.get(self.kind, f"{subject} at step {self.step}")
        return f"{place}: off by {self.error:.1e}, rounding or chance explains {self.bound:.1e}"

    @property
    def within(self) -> bool:
        """Whether the error is within the bound."""
        return self.error <= self.bound

    @property
    def excess(self) -> float:
        """The error as a multiple of its bound."""
        return _ratio(self.error, self.bound)


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
        self.steps: dict[TensorKey, list[Difference]] = {}

    def add(
        self, key: TensorKey, actual: Tensor, expected: Tensor, floor: float | None = None
    ) -> None:
        """Add a step of a tensor; `floor` overrides the error of a single rounding."""
        size = norm(torch.where(expected.isfinite(), expected, torch.zeros_like(expected)))
        error = distance(actual, expected)
        if floor is None:
            floor = _roundoff(actual) * size
        if error and not (actual.is_floating_point() or actual.is_complex()):
            error = math.inf  # a count has to be the same
        self.steps.setdefault(key, []).append(Difference(error, size, floor))

    def add_change(self, key: TensorKey, actual: Tensor, expected: Tensor, start: Tensor) -> None:
        """Add the difference between two changes of a tensor, both from `start`."""
        if actual.shape != expected.shape:
            return self.add(key, actual, expected)
        origin = to_fp64(start)
        change, expected_change = to_fp64(actual) - origin, to_fp64(expected) - origin
        floor = _roundoff(actual) * (norm(origin) + norm(expected_change))
        return self.add(key, change, expected_change, floor)

    def kind_norms(self) -> dict[ErrorKind, list[float]]:
        """Return the combined norm of all tensors of each kind, by step."""
        norms: dict[ErrorKind, list[float]] = {}
        for key, steps in self.steps.items():
            pairs = zip(norms.get(key.kind, [0.0] * len(steps)), steps, strict=False)
            norms[key.kind] = [math.hypot(total, step.size) for total, step in pairs]
        return norms


class Tolerance:
    """Bounds on each tensor's distance from the reference, learned from plain runs.

    The maximum of `factor` times the median over steps, `P90_FACTOR` times the 90th percentile,
    `P90_FACTOR` times the error at that step, and `factor` times the median over tensors of its
    kind, since the error of a small tensor is sometimes zero.
    """

    def __init__(self, plain: Distances, factor: float) -> None:
        kind_norms = plain.kind_norms()
        self.relative_bounds: dict[TensorKey, float] = {}  # relative to the norm of its kind
        self.step_bounds: dict[TensorKey, list[float]] = {}  # absolute, by step
        typical_errors: dict[ErrorKind, list[float]] = {}  # relative to the tensor's own norm
        for key, steps in plain.steps.items():
            # where the reference is 0, the bound of that step alone holds
            sizes = kind_norms[key.kind]
            shares = [d.error / s for d, s in zip(steps, sizes, strict=True) if s] or [0.0]
            bounds = factor * median(shares), P90_FACTOR * _percentile_90(shares)
            self.relative_bounds[key] = max(bounds)
            self.step_bounds[key] = [P90_FACTOR * d.error for d in steps]
            relative_errors = [d.error / d.size for d in steps if d.size] or [0.0]
            typical_errors.setdefault(key.kind, []).append(median(relative_errors))
        self.typical_bounds = {k: factor * median(values) for k, values in typical_errors.items()}

    def bounds(
        self, key: TensorKey, steps: Sequence[Difference], kind_norm: Sequence[float]
    ) -> list[float]:
        """Return the tensor's bound at each step."""
        share, typical = self.relative_bounds.get(key, 0.0), self.typical_bounds.get(key.kind, 0.0)
        step_bounds = self.step_bounds.get(key, [0.0] * len(steps))
        each = zip(steps, kind_norm, step_bounds, strict=True)
        return [max(share * s, typical * d.size, e) + d.floor for d, s, e in each]

    def widen(self, other: Tolerance) -> None:
        """Raise the bounds to at least those of `other`."""
        for key, share in other.relative_bounds.items():
            self.relative_bounds[key] = max(self.relative_bounds.get(key, 0.0), share)
            theirs = other.step_bounds[key]
            pairs = zip(self.step_bounds.get(key, theirs), theirs, strict=True)
            self.step_bounds[key] = [max(pair) for pair in pairs]
        for kind, share in other.typical_bounds.items():
            self.typical_bounds[kind] = max(self.typical_bounds.get(kind, 0.0), share)


def judge_tensors(distances: Distances, tolerance: Tolerance) -> Iterator[ParityRow]:
    """Yield a row for each tensor, in the order of `ErrorKind`."""
    kind_norms = distances.kind_norms()
    for key in sorted(distances.steps, key=lambda key: key.kind):
        steps = distances.steps[key]
        bounds = tolerance.bounds(key, steps, kind_norms[key.kind])
        exceeding = [i for i, d in enumerate(steps) if not d.error <= bounds[i]]
        has_kinks = key.kind in (ErrorKind.grad_norm, ErrorKind.gradient)
        kinks = [i for i in exceeding if has_kinks and steps[i].error <= KINK_ERROR * steps[i].size]
        if len(kinks) > len(steps) // STEPS_PER_KINK:
            kinks = []
        ratios = [_ratio(d.error, bound) for d, bound in zip(steps, bounds, strict=True)]
        for i in kinks:
            ratios[i] = -1.0
        failed_steps = [i for i in exceeding if i not in kinks]
        worst = failed_steps[0] if failed_steps else ratios.index(max(ratios))
        error, size, _ = steps[worst]
        size = size if size and math.isfinite(size) else 1.0
        kind, name = key.kind.name, key.name
        yield ParityRow(worst + 1, kind, name, error / size, bounds[worst] / size, len(kinks))


def compare_steps(
    steps: list[StepRecord], truth: list[StepRecord], starts: list[TrajectoryState]
) -> Distances:
    """Compare loss, norm, gradients, and the changes of buffers and moved weights from `starts`.

    A tensor without a gradient in some of the steps has a gradient of 0 there.
    """
    distances = Distances()
    names = dict.fromkeys(name for step in (*truth, *steps) for name in step.gradients)
    moved = dict.fromkeys(name for step in (*truth, *steps) for name in step.moved)
    for actual, expected, start in zip(steps, truth, starts, strict=True):
        distances.add(TensorKey(ErrorKind.loss, "loss"), actual.loss, expected.loss)
        distances.add(
            TensorKey(ErrorKind.grad_norm, "grad_norm"), actual.grad_norm, expected.grad_norm
        )
        for name in names if actual.gradients else ():  # gradients inside one graph may be unknown
            zero = torch.zeros_like(start.parameters[name])
            a, b = (dense(one.gradients.get(name, zero)) for one in (actual, expected))
            distances.add(TensorKey(ErrorKind.gradient, name), a, b)
        _compare_buffers(distances, actual.after.buffers, expected.after.buffers, start.buffers)
        before = {name: start.parameters[name] for name in moved if name not in actual.hidden}
        known = {name: value for name, value in expected.moved.items() if name in before}
        _compare_buffers(distances, before | actual.moved, before | known, before)
    return distances


def _compare_buffers(
    distances: Distances, actual: Tensors, expected: Tensors, start: Tensors
) -> None:
    """Compare changes; for integers, new or reshaped buffers, values."""
    for name, value in expected.items():
        key, start_value = TensorKey(ErrorKind.buffer, name), start.get(name)
        actual_value = actual.get(name, torch.zeros_like(value))
        counts = not (value.is_floating_point() or value.is_complex())
        if start_value is None or start_value.shape != value.shape or counts:
            distances.add(key, actual_value, value)
        else:
            distances.add_change(key, actual_value, value, start_value)


def compare_outputs(distances: Distances, outputs: list[Any], truth: list[Any]) -> None:
    """Compare floating-point and complex outputs, by validation batch."""
    for batch in zip(outputs, truth, strict=True):
        tensors = ([t for t in tree_leaves(one) if isinstance(t, Tensor)] for one in batch)
        leaves = ([t for t in some if t.is_floating_point() or t.is_complex()] for some in tensors)
        for number, (actual, expected) in enumerate(zip(*leaves, strict=True)):
            distances.add(TensorKey(ErrorKind.output, f"output {number}"), actual, expected)


def is_equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether both exist and are bit-equal, NaN included; 0 and -0 count as equal."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and distance(a, b) == 0.0


def norm(tensor: Tensor) -> float:
    """Return the 2-norm, computed in fp64."""
    return float(torch.linalg.vector_norm(_wide(tensor)))


def dense(tensor: Tensor) -> Tensor:
    """Convert a sparse tensor to dense."""
    return tensor.to_dense() if tensor.is_sparse else tensor


def distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference; Inf if only one of two values is finite."""
    if a.shape != b.shape:
        return math.inf
    a, b = _wide(a), _wide(b)
    result = norm(torch.where(a.isfinite() | b.isfinite(), a - b, 0.0))
    return math.inf if math.isnan(result) else result


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128) if tensor.is_complex() else tensor.double()


def _roundoff(tensor: Tensor) -> float:
    return ROUNDOFF.get(tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype, 0.0)


def _ratio(error: float, size: float) -> float:
    return error / size if size else (0.0 if not error else math.inf)


def _percentile_90(values: list[float]) -> float:
    if len(values) < 10 or not all(map(math.isfinite, values)):
        return max(values)
    return quantiles(values, n=10)[-1]
