"""Which steps of a run are compared: how many, with which learning rates and batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runner import modes
from runner.batch import call, count, rows
from runner.measure.flops import flops
from runner.run import Run

STEPS = 40
LEAST = 6  # however large the model is
WEIGHTS = 2**26  # times steps; the host holds four numbers for each, which makes 1 GB
FLOPS = {"cpu": 2e11}  # of all steps together, a few seconds for each run that makes them
FLOPS_ELSEWHERE = 2e13


@dataclass(frozen=True)
class Stretch:
    """Which steps are compared: their batches and learning rates, counted from 0."""

    batch: int
    update: int
    steps: int


def choose_stretch(run: Run, asked: int | None) -> tuple[Stretch, list[str]]:
    """Past the warm-up, where the schedule changes most, around an epoch's smaller last batch.

    And what that leaves out. A resumed run goes on from where it is.
    """
    reason = None
    steps, per_epoch = asked, run.train.steps_per_epoch
    if steps is None:
        steps, reason = affordable(run)
    update = 0 if run.progress.step else first_update(run.update.factors, steps)
    batch = update
    if per_epoch > steps:  # else every stretch has the end of an epoch in it
        batch += (per_epoch - 1 - steps // 2 - update) % per_epoch
    left_out = [f"what begins after {steps} steps{f': {reason}' if reason else ''}"]
    if update:
        left_out.append(f"learning rates but those of updates {update + 1} to {update + steps}")
    return Stretch(batch, update, steps), left_out


def first_update(factors: Sequence[float], steps: int) -> int:
    """Of those after the warm-up, the first of the `steps` between which the rate changes most."""
    peak = factors.index(max(factors))
    starts = range(peak, max(peak, len(factors) - steps) + 1)
    last = len(factors) - 1
    return max(starts, key=lambda u: round(abs(factors[u] - factors[min(last, u + steps - 1)]), 9))


def affordable(run: Run) -> tuple[int, str | None]:
    """How many steps to make, and why not `STEPS`."""
    weights = sum(parameter.numel() for parameter in run.model.parameters())
    work, most = step_flops(run), FLOPS.get(run.device.kind, FLOPS_ELSEWHERE)
    by_weights, by_work = WEIGHTS // max(weights, 1), int(most / max(work, 1))
    steps = max(LEAST, min(STEPS, by_weights, by_work))
    if steps == STEPS:
        return steps, None
    if by_weights <= by_work:
        return steps, f"{weights:,} weights, of which every step is held"
    return steps, f"a step computes {work / 1e9:,.1f} GFLOP"


def step_flops(run: Run) -> float:
    """Of forward and backward of a batch; the backward computes twice as much as the forward."""
    inputs, target = run.train.at(run.progress.step)
    samples = count(target)
    part = rows(inputs, slice(0, 1))
    try:
        with modes.evaluating(run.model):  # leaves statistics alone, and takes a single sample
            counted = flops(lambda: call(run.forward, part), grad=False)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        counted = 0  # such as a model that knows its batch size
    weights = sum(parameter.numel() for parameter in run.model.parameters())
    return 3.0 * samples * max(counted, 2 * weights)
