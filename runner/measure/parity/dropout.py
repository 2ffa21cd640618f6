"""Parity of models with random numbers: disable dropout, or compare statistics of draws."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist

from torch import nn

from runner.core.errors import UsageError
from runner.core.interfaces.run import Run
from runner.core.models.modes import enter_training
from runner.core.train.step import forward_backward
from runner.measure.parity.distance import ErrorKind, ParityRow, dense, norm
from runner.measure.parity.numerics import to_fp64
from runner.measure.parity.trajectory import (
    StepWindow,
    Tensors,
    TrajectoryCapture,
    load_state,
    make_finite_step,
    seek_window,
    snapshot,
)

DRAWS = 96
SIGMAS = 4.5  # under normality, one false alarm in 150,000 comparisons
FALSE_ALARMS = 1e-6  # probability over all tensors of a model, under normality
SEED_OFFSET = 1000  # step offset that separates the draws' seeds from the batch's own

MODEL_STATISTICS = ("loss", "grad_norm", "energy", "projection")
ENERGY, PROJECTION = "energy of ", "projection of "  # prefixes of statistics of single tensors

DrawStatistics = dict[str, list[float]]
"""Statistics of one batch at fixed weights, each over many draws of dropout."""


def repeat_draws(run: Run, window: StepWindow, base_gradients: Tensors) -> DrawStatistics:
    """Repeat a step at fixed weights and batch, each time with other random numbers.

    `base_gradients` are the gradients of that batch without dropout.
    """
    seek_window(run, window)
    enter_training(run.model)
    draws, capture, start_state = DrawStatistics(), TrajectoryCapture(), snapshot(run)
    try:
        batch = next(run.train.batches(run.progress.step))
        gradients_hidden = run.step_graph is not None and run.step_graph.takes(batch)
        run.progress.step += SEED_OFFSET
        for _ in range(DRAWS):
            step = make_finite_step(run, batch, [] if gradients_hidden else [capture])
            run.progress.step += 1  # it seeds the generators
            load_state(run.model, start_state)
            values = {"loss": step.loss.item(), "grad_norm": step.grad_norm.item()}  # waits
            for name, value in (values | _statistics(capture.gradients, base_gradients)).items():
                draws.setdefault(name, []).append(value)
    finally:
        run.train.close()
    return draws


def _statistics(gradients: Tensors, base_gradients: Tensors) -> dict[str, float]:
    """Return |g - g0|² / |g0|² and <g - g0, g0> / |g0|² of gradients g; g0 without dropout.

    For all tensors together and each one; {} if the gradients are hidden in one graph.
    """
    if not gradients:
        return {}
    parts: dict[str, tuple[float, float, float]] = {}
    for name, value in base_gradients.items():
        base = to_fp64(dense(value))
        difference = (to_fp64(dense(gradients[name])) if name in gradients else 0 * base) - base
        projection = float((difference * base.conj()).sum().real)
        parts[name] = norm(difference) ** 2, projection, norm(base) ** 2
    sums = [math.fsum(column) for column in zip(*parts.values(), strict=True)]
    statistics = {"energy": sums[0] / (sums[2] or 1.0), "projection": sums[1] / (sums[2] or 1.0)}
    for name, (energy, projection, squared_norm) in parts.items():
        statistics[ENERGY + name] = energy / (squared_norm or 1.0)
        statistics[PROJECTION + name] = projection / (squared_norm or 1.0)
    return statistics


def compare_draws(
    baseline: DrawStatistics, candidate: DrawStatistics, rounding_rows: list[ParityRow]
) -> Iterator[ParityRow]:
    """Compare mean and variance of each statistic; `rounding_rows` are without dropout."""
    rounding_bounds = {row.kind: row.bound for row in rounding_rows}
    for name in (name for name in MODEL_STATISTICS if name in baseline and name in candidate):
        a, b = _mean_and_variance(baseline[name]), _mean_and_variance(candidate[name])
        size = 1.0 if name == "projection" else abs(a[0]) or 1.0
        chance = SIGMAS * math.sqrt((a[1] + b[1]) / DRAWS)
        rounding = rounding_bounds.get(name, rounding_bounds.get(ErrorKind.grad_norm.name, 0.0))
        yield _draw_row(f"mean of {name}", abs(a[0] - b[0]) / size, chance / size + rounding)
        chance = SIGMAS * math.sqrt(4 / (DRAWS - 1))
        log_ratio = 0.0 if a[1] == b[1] else math.inf
        if a[1] and b[1]:
            log_ratio = abs(math.log(a[1] / b[1]))
        yield _draw_row(f"log-variance of {name}", log_ratio, chance)
    yield from _compare_tensors(baseline, candidate, rounding_rows)


def _compare_tensors(
    baseline: DrawStatistics, candidate: DrawStatistics, rounding_rows: list[ParityRow]
) -> Iterator[ParityRow]:
    """Compare the mean statistics of each tensor's gradient, since the total can hide a fault.

    The limit grows with the number of tensors (multiple comparisons). Tensors without a known
    rounding bound are skipped.
    """
    gradient = ErrorKind.gradient.name
    known = baseline.keys() & candidate.keys()
    tensors = [row for row in rounding_rows if row.kind == gradient and ENERGY + row.name in known]
    sigmas = NormalDist().inv_cdf(1 - FALSE_ALARMS / (4 * len(tensors) or 1))
    for row in tensors:
        for prefix in (ENERGY, PROJECTION):
            name = prefix + row.name
            a, b = _mean_and_variance(baseline[name]), _mean_and_variance(candidate[name])
            chance, rounding = sigmas * math.sqrt((a[1] + b[1]) / DRAWS), row.bound
            if prefix == ENERGY:  # |d + r|² - |d|² of a rounding r
                rounding *= 2 * math.sqrt(a[0]) + row.bound
            yield _draw_row(f"mean of {name}", abs(a[0] - b[0]), chance + rounding)


def _draw_row(name: str, error: float, bound: float) -> ParityRow:
    return ParityRow(1, ErrorKind.draw.name, name, error, bound)


def _mean_and_variance(values: list[float]) -> tuple[float, float]:
    if not all(math.isfinite(value) for value in values):
        raise UsageError("the loss or its gradient is not finite: not comparable")
    mean = math.fsum(values) / len(values)
    return mean, math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def is_random(run: Run) -> bool:
    """Whether a batch's loss depends on the step number, which seeds the generators."""
    enter_training(run.model)
    start, losses, start_state = run.progress.step, [], snapshot(run)
    try:
        batch = next(run.train.batches(start))
        for offset in range(4):
            run.progress.step = start + offset
            losses.append(forward_backward(run, batch).loss.item())
            run.update.abandon()
            load_state(run.model, start_state)  # a forward may move weights
    finally:
        run.progress.step = start
        run.train.close()
    # atomics on a GPU change last bits, dropout changes the third digit
    return max(losses) - min(losses) > 1e-5 * abs(losses[0])


def zero_dropout(model: nn.Module) -> int:
    """Set all dropout probabilities to 0; returns how many were positive."""
    count = 0
    for module in model.modules():
        names = ["p"] if isinstance(module, nn.modules.dropout._DropoutNd) else []
        names += [name for name in vars(module) if "drop" in name]  # attention, recurrent layers
        for name in names:
            if isinstance(value := getattr(module, name), float):
                count += value > 0
                setattr(module, name, 0.0)
    return count
