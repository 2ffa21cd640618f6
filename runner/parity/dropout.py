"""Models that draw random numbers: switch that off, or compare the draws by their statistics."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from torch import Tensor, nn

from runner.errors import UsageError
from runner.parity.distance import dense, norm
from runner.parity.trajectory import (
    Stretch,
    Tensors,
    TrajectoryCapture,
    load,
    one_step,
    place,
    snapshot,
)
from runner.training.run import Run
from runner.training.step import forward_backward

DRAWS = 32
SIGMAS = 4.5  # a false alarm in 150,000 comparisons, were they normal
APART = 1000  # steps between the batch's own random numbers and those of the first draw


@dataclass(frozen=True)
class Draws:
    """Statistics of one batch at the same weights, over many draws of dropout."""

    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    energy: list[float] = field(default_factory=list)  # |g - g0|² / |g0|², g0 without dropout
    projection: list[float] = field(default_factory=list)  # <g - g0, g0> / |g0|²

    def add(self, loss: float, grad_norm: float, gradients: Tensors, silent: Tensors) -> None:
        """One more draw. Its gradients may be hidden within one graph."""
        self.loss.append(loss)
        self.grad_norm.append(grad_norm)
        if not gradients:
            return
        apart = {n: _gradient(gradients, n, s) - dense(s).double() for n, s in silent.items()}
        whole = math.fsum(norm(s) ** 2 for s in silent.values()) or 1.0
        along = math.fsum(float((d * dense(silent[n])).sum()) for n, d in apart.items())
        self.energy.append(math.fsum(norm(d) ** 2 for d in apart.values()) / whole)
        self.projection.append(along / whole)


def _gradient(gradients: Tensors, name: str, like: Tensor) -> Tensor:
    found = gradients.get(name)
    return dense(like).double() * 0.0 if found is None else dense(found).double()


def repeat_draws(run: Run, stretch: Stretch, silent: Tensors, count: int = DRAWS) -> Draws:
    """Steps from the same weights on the same batch, each with its own random numbers.

    `silent` are the gradients of that batch without dropout.
    """
    place(run, stretch)
    run.model.train()
    found, capture = Draws(), TrajectoryCapture()
    start = snapshot(run)
    try:
        batch = next(run.train.batches(run.progress.step))
        hidden = run.whole is not None and run.whole.takes(batch)
        run.progress.step += APART
        for _ in range(count):
            step = one_step(run, batch, [] if hidden else [capture])
            run.progress.step += 1  # the generators are seeded by it
            load(run.model, start)
            found.add(step.loss.item(), step.grad_norm.item(), capture.gradients, silent)  # waits
    finally:
        run.train.close()
    return found


def is_random(run: Run) -> bool:
    """Whether the loss of a batch depends on the step that it is computed in."""
    run.model.train()
    start = run.progress.step
    seen = []
    try:
        batch = next(run.train.batches(start))
        for offset in range(4):
            run.progress.step = start + offset
            seen.append(forward_backward(run, batch).loss.item())
            run.update.abandon()
    finally:
        run.progress.step = start
        run.train.close()
    # atomics on a GPU change last bits, dropout changes the third digit
    return max(seen) - min(seen) > 1e-5 * abs(seen[0])


def dropout_sites(model: nn.Module) -> list[str]:
    """Where the model drops something, the same place of all layers as one: `blocks.*.dropout`."""
    return list(dict.fromkeys(site for site, owner, name in _sites(model) if getattr(owner, name)))


def silence(model: nn.Module, but: str | None = None) -> None:
    """Let no dropout drop anything, wherever a module keeps its probability, but at one site."""
    for site, owner, name in _sites(model):
        if site != but:
            setattr(owner, name, 0.0)


def _sites(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    found: list[tuple[str, nn.Module, str]] = []
    for path, module in model.named_modules():
        place = re.sub(r"\b\d+\b", "*", path)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            found.append((place, module, "p"))
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):  # attention, recurrent layers
                found.append((f"{place}.{name}".lstrip("."), module, name))
    return found


def mean_differs(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """How far the means are apart, and how far chance alone may bring them."""
    a, b = _moments(ours), _moments(theirs)
    spread = math.sqrt(a[1] / len(ours) + b[1] / len(theirs))
    return abs(a[0] - b[0]), SIGMAS * spread


def spread_differs(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """How far the variances' logarithms are apart, and how far chance alone may bring them."""
    a, b = _moments(ours)[1], _moments(theirs)[1]
    bound = SIGMAS * math.sqrt(2 / (len(ours) - 1) + 2 / (len(theirs) - 1))
    if not (a and b):
        return (0.0 if a == b else math.inf), bound
    return abs(math.log(a / b)), bound


def _moments(values: list[float]) -> tuple[float, float]:
    if not all(math.isfinite(value) for value in values):
        raise UsageError("the loss or its gradient is not finite: there is nothing to compare")
    mean = math.fsum(values) / len(values)
    return mean, math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
