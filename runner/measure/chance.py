"""Models that draw random numbers: switch that off, or compare the draws by their statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from runner.errors import UsageError
from runner.measure.trace import one_step, remembered
from runner.run import Run
from runner.step import backward

DRAWS = 32
SIGMAS = 4.5  # a false alarm in 150,000 comparisons, were they normal


@dataclass(frozen=True)
class Draws:
    """Loss and gradient norm of one batch at the same weights, over many draws of dropout."""

    loss: list[float]
    grad_norm: list[float]


def draws(run: Run, count: int = DRAWS) -> Draws:
    """Steps from the same weights on the same batch, each with its own random numbers."""
    run.model.train()
    loss, norm = [], []
    try:
        batch = next(run.train.batches(run.progress.step))
        with remembered(run) as restore:
            for _ in range(count):
                step = one_step(run, batch)
                run.progress.step += 1  # the generators are seeded by it
                restore()
                loss.append(step.loss.item())  # waits for the device
                norm.append(step.grad_norm.item())
    finally:
        run.train.close()
    return Draws(loss, norm)


def is_random(run: Run) -> bool:
    """Whether the loss of a batch depends on the step that it is computed in."""
    run.model.train()
    start = run.progress.step
    seen = []
    try:
        batch = next(run.train.batches(start))
        for offset in range(4):
            run.progress.step = start + offset
            seen.append(backward(run, batch).loss.item())
            run.update.abandon()
    finally:
        run.progress.step = start
        run.train.close()
    # atomics on a GPU change last bits, dropout changes the third digit
    return max(seen) - min(seen) > 1e-5 * abs(seen[0])


def silence(model: nn.Module) -> None:
    """Let no dropout drop anything, wherever a module keeps its probability."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):  # attention, recurrent layers
                setattr(module, name, 0.0)


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
