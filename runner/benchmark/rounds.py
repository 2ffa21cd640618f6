"""A round: start a few arms, measure them in shared blocks, and finish them."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.benchmark.arms import Arm
from runner.benchmark.blocks import (
    INTERRUPTED,
    ArmEnded,
    Finished,
    Measured,
    Ready,
    StoppingRule,
    run_blocks,
)
from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.statistics import CONFIDENCE, Estimate, contrast
from runner.benchmark.workers.pool import WorkerPool
from runner.training.signals import raised

log = logging.getLogger("runner")
WIDEST = 9.0  # half-width above which an interval is not logged
CACHED = 0.5  # share of the compile time that the disk cache is assumed to save a relaunch


@dataclass(frozen=True)
class MeasureOptions:
    """Options shared by all rounds of a measurement."""

    settings: BenchmarkConfig
    folder: Path | None = None
    given: Any = None
    metrics: Mapping[str, Any] | None = None
    pool: Callable[..., AbstractContextManager[WorkerPool]] = WorkerPool  # or a simulation
    clock: Callable[[], float] = time.monotonic
    alpha: float = 1 - CONFIDENCE  # of each interval; less where several have to hold jointly
    announce: Callable[[str], None] = log.info  # receives progress lines
    start_limit_s: Callable[[], float] | None = None  # seconds for an arm to start
    """None, and for the reference: benchmark.timeout_s."""


@dataclass
class Round:
    """The measurements of several arms in the same blocks."""

    measured: Measured = field(default_factory=lambda: Measured({}, {}))
    ready: dict[str, Ready] = field(default_factory=dict)
    finished: dict[str, Finished] = field(default_factory=dict)
    ended: dict[str, ArmEnded] = field(default_factory=dict)  # arms that ended early

    def ratio(self, over: Sequence[str], under: Sequence[str]) -> Estimate | None:
        """Return the product of times per sample of `over` divided by that of `under`, by block.

        None if an arm has no blocks, or there are too few for an interval.
        """
        names = [*over, *under]
        series = [[t.per_sample_ms for t in self.measured.turns.get(name, [])] for name in names]
        if not all(series):
            return None
        fewest = min(names, key=lambda name: len(self.measured.turns[name]))
        alpha = self.measured.alphas[fewest]  # all arms share the looks
        measured, above = self.measured, len(over)
        between = measured.between[fewest]
        estimate = contrast(series[:above], series[above:], alpha, measured.starts, between)
        return None if math.isinf(estimate.half_width) else estimate

    def explain_end(self, *names: str) -> str:
        """Return how the first of these arms that ended early did so; "" if none has."""
        for name in names:
            if name in self.ended:
                return f"{name}: {self.ended[name].status}: {self.ended[name].reason}"
        return ""

    def note_end(self, name: str, ended: ArmEnded) -> None:
        """Record how the arm ended, and log it."""
        self.ended[name] = ended
        log.warning("%s: %s: %s", name, ended.status, ended)


def run_round(
    arms: Sequence[Arm],
    reference: str,
    budget_s: float,
    seed: int,
    options: MeasureOptions,
    result: Round | None = None,
    needs_reference: bool = True,
) -> Round:
    """Measure these arms in the same blocks; one that ends early is recorded, the others continue.

    Each arm has several successive processes (`StoppingRule`); `finished` and the record are those
    of the first. The budget covers measuring and later starts. `result` is filled in as it goes,
    for callers that are interrupted. Without the reference nothing is measured, or with
    `needs_reference=False` only times. On Ctrl-C while measuring, `measured.stopped` is
    `interrupted` and no arm is finished.
    """
    result, settings, clock = result or Round(), options.settings, options.clock
    with options.pool(arms, settings, options.folder, options.given, options.metrics) as pool:
        began = clock()
        for number, arm in enumerate(arms, 1):
            options.announce(f"starting {arm.name} ({number} of {len(arms)})")
            start_limit_s = None if arm.name == reference else options.start_limit_s
            try:
                ready = pool.start(arm.name, start_limit_s() if start_limit_s else None)
            except ArmEnded as error:
                result.note_end(arm.name, error)
                continue
            result.ready[arm.name] = ready
            options.announce(f"{arm.name}: first step after {ready.setup_seconds:.1f} s")
        alive = list(result.ready)
        if (reference in alive and len(alive) > 1) or (alive and not needs_reference):
            against = reference if reference in alive else alive[0]
            compiling_s = sum(ready.compile_seconds for ready in result.ready.values())
            restart_s = clock() - began - CACHED * compiling_s
            rule = StoppingRule(
                settings.narrow, budget_s, settings.processes, restart_s, alpha=options.alpha
            )

            def watch(measured: Measured) -> None:
                options.announce(_describe_look(measured, budget_s))

            def relaunch(names: Sequence[str], within_s: float) -> dict[str, ArmEnded]:
                return _relaunch(pool, names, within_s, options, result)

            block_s = settings.block_s
            result.measured = run_blocks(
                pool.turn, alive, against, rule, block_s, seed, clock, watch, relaunch
            )
            for name, ended in result.measured.ended.items():
                result.note_end(name, ended)
        if result.measured.stopped != INTERRUPTED:
            left = [name for name in alive if name not in {*result.ended, *result.finished}]
            for name, ended in _finish(pool, left, result).items():
                result.note_end(name, ended)
    return result


def _finish(pool: WorkerPool, names: Sequence[str], result: Round) -> dict[str, ArmEnded]:
    """Finish these arms and store their results; return those that ended early instead."""
    ended = {}
    for name in names:
        try:
            result.finished[name] = pool.finish(name)
        except ArmEnded as error:
            ended[name] = error
    return ended


def _relaunch(
    pool: WorkerPool,
    names: Sequence[str],
    within_s: float,
    options: MeasureOptions,
    result: Round,
) -> dict[str, ArmEnded]:
    """Restart these arms in new processes; keep the first results. See `run_blocks`."""
    until = options.clock() + within_s
    ended = _finish(pool, [name for name in names if name not in result.finished], result)
    pool.renew()
    for name in [name for name in names if name not in ended]:
        left_s = max(0.0, until - options.clock())
        try:
            pool.start(name, min(options.settings.timeout_s, left_s))
        except ArmEnded as error:
            if error.status == "timeout" and options.clock() >= until:
                raise TimeoutError from None
            ended[name] = error
    return ended


def _describe_look(measured: Measured, budget_s: float) -> str:
    ratios = [f"{name} {_describe(ratio)}" for name, ratio in measured.estimates.items()]
    spent = f"{measured.seconds:.0f} of {budget_s:g} s"
    launch = f"process {len(measured.starts)} of each arm"
    return " · ".join([f"block {measured.blocks}", launch, spent, *ratios])


def ending_signal() -> int:
    """Return the signal that ended a measurement; for use within `signals_unwind`."""
    return raised[0] if raised else signal.SIGINT


def _describe(estimate: Estimate) -> str:
    if estimate.half_width < WIDEST:
        return f"{estimate.ratio:.2f}× ({estimate.low:.2f} to {estimate.high:.2f})"
    return f"{estimate.ratio:.2f}×"
