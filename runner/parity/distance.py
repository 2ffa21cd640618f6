"""How far a run's steps are from the reference's, and how far rounding alone may bring them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
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


@dataclass
class Distances:
    """Of each tensor at each step: from the reference, and the reference's own norm."""

    error: dict[Key, list[float]] = field(default_factory=dict)
    size: dict[Key, list[float]] = field(default_factory=dict)
    floor: dict[Key, list[float]] = field(default_factory=dict)  # one rounding of it, its norm

    def add(self, key: Key, ours: Tensor, theirs: Tensor, floor: float | None = None) -> None:
        """One more step of that tensor; `floor` where one rounding is not of its own size."""
        finite = torch.where(theirs.isfinite(), theirs, torch.zeros_like(theirs))
        size, error = norm(finite), distance(ours, theirs)
        if floor is None:
            floor = ROUNDOFF.get(ours.dtype, 0.0) * size
        if error and not ours.is_floating_point():
            error = math.inf  # a count has to be the same
        self.error.setdefault(key, []).append(error)
        self.size.setdefault(key, []).append(size)
        self.floor.setdefault(key, []).append(floor)

    def scale(self) -> dict[ErrorKind, list[float]]:
        """All tensors of a kind together, by step: their size, where one may be next to nothing."""
        found: dict[ErrorKind, list[float]] = {}
        for (kind, _), sizes in self.size.items():
            before = found.get(kind, [0.0] * len(sizes))
            found[kind] = [math.hypot(*pair) for pair in zip(before, sizes, strict=False)]
        return found


class Tolerance:
    """How far each tensor may be from the reference at any step, learned from plain runs.

    `worst` times the median over the steps, or `OFTEN` times what one step in ten is above, or what
    there is at that step; and of each as far as is typical of all of its kind, since the error of a
    few numbers is zero now and then.
    """

    def __init__(self, plain: Distances, worst: float) -> None:
        scale = plain.scale()
        self.shares: dict[Key, float] = {}  # of the scale of its kind
        self.own = {key: [OFTEN * e for e in errors] for key, errors in plain.error.items()}
        shares: dict[ErrorKind, list[float]] = {}  # of the tensor's own size
        for key, errors in plain.error.items():
            parts = [_share(*pair) for pair in zip(errors, scale[key.kind], strict=True)]
            self.shares[key] = max(worst * median(parts), OFTEN * _often(parts))
            pairs = zip(errors, plain.size[key], strict=True)
            shares.setdefault(key.kind, []).append(median(_share(*pair) for pair in pairs))
        self.typical = {kind: worst * median(values) for kind, values in shares.items()}

    def bounds(self, key: Key, found: Distances, scale: list[float]) -> list[float]:
        """Of the tensor at each step."""
        share, typical = self.shares.get(key, 0.0), self.typical.get(key.kind, 0.0)
        own = self.own.get(key, [0.0] * len(scale))
        steps = zip(scale, found.size[key], found.floor[key], own, strict=True)
        return [max(share * s, typical * size, there) + floor for s, size, floor, there in steps]

    def widen(self, other: Tolerance) -> None:
        """Allow what the other allows, too."""
        for key, share in other.shares.items():
            self.shares[key] = max(self.shares.get(key, 0.0), share)
            own = self.own.get(key, other.own[key])
            self.own[key] = [max(pair) for pair in zip(own, other.own[key], strict=True)]
        for kind, share in other.typical.items():
            self.typical[kind] = max(self.typical.get(kind, 0.0), share)


class Judged(NamedTuple):
    """One tensor over all steps: the first step beyond the bound, else the nearest to it."""

    key: Key
    step: int  # 1 is the first
    error: float  # relative to the tensor's size
    bound: float
    kinks: int  # steps beyond it by as little as an activation's kink explains


def judge(found: Distances, tolerance: Tolerance) -> Iterator[Judged]:
    """Each tensor, in the order of `Kind`."""
    scale = found.scale()
    for key in sorted(found.error, key=lambda key: key.kind):
        errors, bounds = found.error[key], tolerance.bounds(key, found, scale[key.kind])
        sizes = found.size[key]
        beyond = [i for i, error in enumerate(errors) if not error <= bounds[i]]
        kinky = key.kind in (ErrorKind.grad_norm, ErrorKind.gradient)
        small = [i for i in beyond if kinky and errors[i] <= KINK * sizes[i]]
        if len(small) > len(errors) // KINKS:
            small = []
        ratios = [-1.0 if i in small else _share(errors[i], bounds[i]) for i in range(len(errors))]
        large = [i for i in beyond if i not in small]
        step = large[0] if large else ratios.index(max(ratios))
        size = sizes[step] if sizes[step] and math.isfinite(sizes[step]) else 1.0
        yield Judged(key, step + 1, errors[step] / size, bounds[step] / size, len(small))


def compare_steps(
    steps: list[StepRecord], truth: list[StepRecord], starts: list[Tensors]
) -> Distances:
    """Loss, norm, gradients and what happened to the buffers, which were `starts` before."""
    found = Distances()
    for ours, theirs, start in zip(steps, truth, starts, strict=True):
        found.add(Key(ErrorKind.loss, "loss"), ours.loss, theirs.loss)
        found.add(Key(ErrorKind.grad_norm, "grad_norm"), ours.grad_norm, theirs.grad_norm)
        names = theirs.gradients.keys() | ours.gradients.keys()
        for name in names if ours.gradients else ():  # those inside one graph may be unknown
            a, b = (_dense(one.gradients.get(name)) for one in (ours, theirs))
            zero = torch.zeros_like(a if b is None else b)  # type: ignore[arg-type]
            found.add(
                Key(ErrorKind.gradient, name), zero if a is None else a, zero if b is None else b
            )
        compare_buffers(found, ours.after.buffers, theirs.after.buffers, start)
    return found


def compare_buffers(found: Distances, ours: Tensors, theirs: Tensors, start: Tensors) -> None:
    """Change against change; of counts, and of buffers that are new or of another shape, values."""
    for name, value in theirs.items():
        key, before, mine = Key(ErrorKind.buffer, name), start.get(name), ours.get(name)
        if mine is None:
            found.add(key, torch.zeros_like(value), value)
        elif before is None or before.shape != value.shape or not value.is_floating_point():
            found.add(key, mine, value)
        else:
            compare_changes(found, key, mine, value, before)


def compare_changes(
    found: Distances, key: Key, ours: Tensor, theirs: Tensor, start: Tensor
) -> None:
    """How far a tensor went, against how far it should have gone, both from `start`."""
    if ours.shape != theirs.shape:
        found.add(key, ours, theirs)
        return
    before = start.double()
    mine, right = ours.double() - before, theirs.double() - before
    roundoff = ROUNDOFF.get(ours.dtype, 0.0)
    found.add(key, mine, right, floor=roundoff * (norm(before) + norm(right)))


def compare_outputs(ours: list[Any], truth: list[Any]) -> Distances:
    """Floating-point outputs, one validation batch after another."""
    found = Distances()
    for batch in zip(ours, truth, strict=True):
        leaves = ([t for t in tree_leaves(one) if _is_floating(t)] for one in batch)
        for number, (mine, right) in enumerate(zip(*leaves, strict=True)):
            found.add(Key(ErrorKind.output, f"output {number}"), mine, right)
    return found


def _is_floating(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


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


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else dense(tensor)


def distance(a: Tensor, b: Tensor) -> float:
    """The norm of the difference; Inf where only one of them is finite."""
    if a.shape != b.shape:
        return math.inf
    a, b = a.double(), b.double()
    found = norm(torch.where(a.isfinite() | b.isfinite(), a - b, 0.0))
    return math.inf if math.isnan(found) else found


def _share(error: float, size: float) -> float:
    return error / size if size else (0.0 if not error else math.inf)


def _often(values: list[float]) -> float:
    """What one in ten is above; of a few values the largest."""
    if len(values) < 10 or not all(map(math.isfinite, values)):
        return max(values)
    return quantiles(values, n=10)[-1]
