"""How far two traces are apart, and how far rounding alone may bring them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import median

import torch
from torch import Tensor

from runner.measure.numerics import ROUNDOFF
from runner.measure.trace import Kind, Spot, Trace

SCALARS = (Kind.loss, Kind.grad_norm)
FURTHEST = 1e6  # by then nothing is told apart
Found = tuple[Spot, float, float, float]
"""Where, the distance from the reference, how far it may be, and the reference's norm."""


def held(trace: Trace, reference: Trace, allowed: dict[Spot, float]) -> Iterator[Found]:
    """Each tensor of the candidate against the reference, in the order they are computed.

    `allowed` is the distance that was measured to come from rounding, times its margin. Beside it:

    - A tensor may be as far away as is typical of its kind, and by its own last bit: the error of
      a few numbers is zero now and then, and so no scale for another's.
    - A weight whose gradient is next to nothing may take its steps to the other side, since Adam's
      first ones are the gradient's sign; one in 10,000, at least one, of a tensor of eight or more.
    - Where weights are further apart by that, so may be what later steps compute from them.
    """
    sizes = {spot: norm(tensor) for spot, tensor in reference.items()}
    typical = _typical(allowed, sizes)
    seen = {(spot.step, spot.kind) for spot in trace}  # nobody sees a whole step's gradients
    together: dict[int, float] = {}  # distance of all parameters, by step
    apart: dict[int, float] = {}  # the same by what is allowed
    for spot in sorted(reference.keys() | trace.keys(), key=_order(reference)):
        if spot.step == 0 or (spot.step, spot.kind) not in seen:
            continue
        ours, size = filled(trace, spot, reference), sizes.get(spot, 0.0)
        error = _distance(ours, reference.get(spot))
        if not ours.is_floating_point():
            yield spot, error, 0.0, size  # a count
            continue
        bound = max(allowed.get(spot, 0.0), typical.get((spot.step, spot.kind), 0.0) * size)
        bound *= max([1.0, *(x for step, x in apart.items() if step < spot.step)])
        bound += ROUNDOFF.get(ours.dtype, 0.0) * size
        if spot.kind is Kind.parameter:
            together[spot.step] = math.hypot(together.get(spot.step, 0.0), error)
            further = relative(together[spot.step], _together(allowed, spot.step))
            apart[spot.step] = min(further, FURTHEST)
            error = _but_for_turned(ours, spot, reference, error)
        yield spot, error, bound, size


def distances(trace: Trace, reference: Trace) -> dict[Spot, float]:
    """Of each tensor of the reference."""
    return {spot: _distance(filled(trace, spot, reference), t) for spot, t in reference.items()}


def filled(trace: Trace, spot: Spot, like: Trace) -> Tensor:
    """The tensor; where there is none, as for a gradient that was not computed, zeros."""
    found = trace.get(spot)
    return torch.zeros_like(like[spot], dtype=torch.float32) if found is None else found


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether both are there and equal bit by bit, NaN included; the sign of zero aside."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and _distance(a, b) == 0.0


def norm(tensor: Tensor) -> float:
    """The square root of the sum of squares, in fp64."""
    return float(torch.linalg.vector_norm(tensor.double()))


def relative(error: float, size: float) -> float:
    """`error` by `size`."""
    return error / size if size else (0.0 if not error else math.inf)


def _distance(a: Tensor, b: Tensor | None) -> float:
    """The norm of the difference; Inf where only one of them is finite."""
    if b is None:
        return norm(a)
    if a.shape != b.shape:
        return math.inf
    a, b = a.double(), b.double()
    found = norm(torch.where(a.isfinite() | b.isfinite(), a - b, 0.0))
    return math.inf if math.isnan(found) else found


def _typical(allowed: dict[Spot, float], sizes: dict[Spot, float]) -> dict[tuple[int, Kind], float]:
    """The median of a kind at a step, relative to its tensors; of scalars the worst of all."""
    shares: dict[tuple[int, Kind], list[float]] = {}
    for spot, distance in allowed.items():
        if sizes[spot]:
            shares.setdefault((spot.step, spot.kind), []).append(distance / sizes[spot])
    found = {key: median(values) for key, values in shares.items()}
    for kind in SCALARS:
        of_kind = [key for key in found if key[1] is kind]
        worst = max((found[key] for key in of_kind), default=0.0)
        found.update(dict.fromkeys(of_kind, worst))
    return found


def _but_for_turned(ours: Tensor, spot: Spot, reference: Trace, error: float) -> float:
    """The distance without the few weights that may have gone the other way, if that is all."""
    start, truth = (reference.get(Spot(at, spot.kind, spot.name)) for at in (0, spot.step))
    if start is None or truth is None or ours.shape != truth.shape or ours.numel() < 8:
        return error
    truth = truth.double()
    difference = (ours.double() - truth).flatten().abs()
    turned = difference.topk(max(1, ours.numel() // 10_000))
    if not float(turned.values[0]) <= 2 * float((truth - start.double()).abs().max()):
        return error
    difference[turned.indices] = 0.0
    return norm(difference)


def _together(allowed: dict[Spot, float], step: int) -> float:
    return math.hypot(*(d for s, d in allowed.items() if s[:2] == (step, Kind.parameter)))


def _order(reference: Trace) -> Callable[[Spot], tuple[int, int, int]]:
    places = {spot: i for i, spot in enumerate(reference)}
    return lambda spot: (spot.step, spot.kind, places.get(spot, len(places)))
