"""Whether a backward is the derivative of its forward: gradients held against differences.

As in the fast mode of torch.autograd.gradcheck, Jacobians are compared along directions only, which
takes two forwards a direction however large a tensor is. Other than there, the measure is relative
(an absolute tolerance does not see a wrong gradient that is small), and a step that is too short
for code that computes in float32 inside, or that falls on a kink, is told from a wrong gradient.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Evaluate = Callable[[], Sequence[Tensor]]

# how far each element moves, as a share of the tensor's root mean square; the first that agrees
# counts: rounding spoils short steps where something computes in 32 bits, curvature long ones
STEPS = (1e-6, 1e-4, 1e-3)
POINTS = 3  # a kink is one point; two near it must be wrong as well
APART = 0.03  # of those points, as a share of each element
ROUNDING = 100.0  # units in the last place that an output may be off by
REPEATS = 1e-4  # relative, by which two calls that do the same may differ


class Inconclusive(Exception):
    """Nothing can be said, and why."""


def worst_error(
    evaluate: Evaluate, leaves: Mapping[str, Tensor], tolerance: float, deadline: float
) -> tuple[float, str]:
    """The largest |gradient - difference| over the larger of the two, and the leaf it is of.

    `evaluate` computes float64 outputs from the leaves as they are at that time, and must do the
    same each time. They are moved in place, and restored. Raises Inconclusive, also after the
    `deadline` of `time.monotonic`.
    """
    draw = torch.Generator().manual_seed(0)
    origin = {name: leaf.detach().clone() for name, leaf in leaves.items()}
    errors = dict.fromkeys(leaves, float("inf"))
    try:
        for point in range(POINTS):
            doubted = [name for name, error in errors.items() if error > tolerance]
            if not doubted:
                break
            for name, leaf in leaves.items():
                if point:
                    leaf.detach().copy_(_near(origin[name], draw))
            try:
                forward = _Forward(evaluate, [leaves[name] for name in doubted], draw)
            except Inconclusive:
                if not point:
                    raise
                continue  # beside it there is nothing to compute, such as the root of less than 0
            for name, gradient in zip(doubted, forward.gradients, strict=True):
                if time.monotonic() > deadline:
                    raise Inconclusive("no time was left")
                error = _error(forward, leaves[name].detach(), gradient, tolerance, draw)
                errors[name] = min(errors[name], error)
    finally:
        for name, leaf in leaves.items():
            leaf.detach().copy_(origin[name])
    where = max(errors, key=lambda name: errors[name])
    return errors[where], where


class _Forward:
    """Outputs at one point as a weighted sum, and its gradients with respect to some leaves."""

    def __init__(self, evaluate: Evaluate, leaves: list[Tensor], draw: torch.Generator) -> None:
        self.evaluate = evaluate
        with torch.enable_grad():
            outputs = list(evaluate())
            self.used = [i for i, output in enumerate(outputs) if output.requires_grad]
            if not self.used:
                raise Inconclusive("nothing that it puts out needs a gradient")
            self.weights = [_normal(outputs[i], draw) for i in self.used]
            given = torch.autograd.grad(
                [outputs[i] for i in self.used], leaves, self.weights, allow_unused=True
            )
        self.gradients = [
            torch.zeros_like(leaf) if gradient is None else _dense(gradient)
            for leaf, gradient in zip(leaves, given, strict=True)
        ]
        parts = zip(self.weights, self.used, strict=True)
        self.size = sum(_norm(w * outputs[i].detach()) ** 2 for w, i in parts) ** 0.5
        if not self.size < float("inf"):
            raise Inconclusive("its outputs are not finite")
        if abs(self.difference(outputs)) > REPEATS * max(self.size, 1e-30):
            raise Inconclusive("two calls with the same inputs and random numbers differ")

    def difference(self, ahead: Sequence[Tensor]) -> float:
        """The weighted sum of these outputs less that of the outputs now."""
        with torch.no_grad():
            behind = list(self.evaluate())
        parts = zip(self.weights, self.used, strict=True)
        return sum(_inner(w, ahead[i].detach() - behind[i]) for w, i in parts)


def _error(
    forward: _Forward, leaf: Tensor, gradient: Tensor, tolerance: float, draw: torch.Generator
) -> float:
    """The worse of two directions: along the gradient, and a random one.

    The first shows by how much a gradient is off, the second what it leaves out.
    """
    steepest = _norm(gradient)
    if not steepest < float("inf"):
        return float("inf")
    directions = [_normal(leaf, draw)]
    if steepest:
        directions.append(gradient)
    origin, move, error = leaf.clone(), _size(leaf), 0.0
    try:
        for direction in directions:
            direction = direction * (move / float(direction.abs().max()))
            slope = _inner(gradient, direction)
            # a random direction may happen to be flat: then the steepest one says what is small
            flat = steepest * _norm(direction) / leaf.numel() ** 0.5
            best, blind = float("inf"), False
            for step in STEPS:
                with torch.no_grad():
                    leaf.copy_(origin + step * direction)
                    ahead = [t.clone() for t in forward.evaluate()]  # one may be the leaf itself
                    leaf.copy_(origin - step * direction)
                measured = forward.difference(ahead) / (2 * step)
                if measured - measured != 0:  # not finite so close by
                    continue
                off = abs(slope - measured)
                noise = ROUNDING * torch.finfo(torch.float64).eps * forward.size / step
                scale = max(abs(slope), abs(measured), flat)
                if off <= noise and noise > tolerance * scale:
                    blind = True  # what this step can see says nothing; a longer one sees more
                    continue
                best = min(best, off / scale if scale else 0.0)
                if best <= tolerance:
                    break
            error = max(error, 0.0 if blind and best == float("inf") else best)
    finally:
        leaf.copy_(origin)
    return error


def _near(tensor: Tensor, draw: torch.Generator) -> Tensor:
    """A point close by; signs stay, and what was 0 is above it."""
    noise = _normal(tensor, draw)
    spread = APART * _size(tensor)
    return torch.where(tensor == 0, spread * noise.abs(), tensor * (1 + APART * noise))


def _dense(gradient: Tensor) -> Tensor:
    gradient = gradient.detach()
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _normal(like: Tensor, draw: torch.Generator) -> Tensor:
    return torch.randn(like.shape, dtype=like.dtype, generator=draw)


def _inner(a: Tensor, b: Tensor) -> float:
    """Of complex numbers, as autograd has it: real and imaginary parts are two numbers."""
    return float((torch.conj(a) * b).real.sum()) if a.is_complex() else float((a * b).sum())


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


def _size(tensor: Tensor) -> float:
    """Root mean square, or 1 where all is 0."""
    return (_norm(tensor) / max(tensor.numel(), 1) ** 0.5) or 1.0
