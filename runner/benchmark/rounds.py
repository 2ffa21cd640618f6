"""A round: a few arms measured against one another. Started, run in blocks, finished."""

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
WIDEST = 9.0  # half-width of an interval that is worth a log line
CACHED = 0.5  # share of the compile time that the cache on disk saves the next process, at least


@dataclass(frozen=True)
class MeasureOptions:
    """What all rounds of a measurement have in common."""

    settings: BenchmarkConfig
    folder: Path | None = None
    given: Any = None
    metrics: Mapping[str, Any] | None = None
    pool: Callable[..., AbstractContextManager[WorkerPool]] = WorkerPool  # or a simulation
    clock: Callable[[], float] = time.monotonic
    alpha: float = 1 - CONFIDENCE  # of each interval; less where it is one of many
    announce: Callable[[str], None] = log.info  # receives lines about the progress
    start_limit_s: Callable[[], float] | None = None  # for an arm but the reference
    """None, and the reference: benchmark.timeout_s."""


@dataclass
class Round:
    """The measurements of some arms, side by side."""

    measured: Measured = field(default_factory=lambda: Measured({}, {}))
    ready: dict[str, Ready] = field(default_factory=dict)
    finished: dict[str, Finished] = field(default_factory=dict)
    ended: dict[str, ArmEnded] = field(default_factory=dict)  # before their time

    def ratio(self, over: Sequence[str], under: Sequence[str]) -> Estimate | None:
        """Time per sample of `over`, multiplied, by that of `under`, block by block.

        None where an arm has no blocks, or all have too few for an interval.
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
        """How the first of these arms ended that ended before its time; "" where none did."""
        for name in names:
            if name in self.ended:
                return f"{name}: {self.ended[name].status}: {self.ended[name].reason}"
        return ""

    def note_end(self, name: str, ended: ArmEnded) -> None:
        """Keep how the arm ended, and log it."""
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
    """Measure these arms in the same blocks; one that ends early is noted, the others continue.

    Each has several processes, one after the other, as `StoppingRule` says; its results are those
    of the first, which has a record. The budget is for measuring and for starting the further ones.
    `result` is filled in on the way, for a caller that is interrupted. Without the reference
    nothing is measured, or with `needs_reference=False` times without ratios. After Ctrl-C while it
    measures `measured.stopped` is `interrupted`, and nothing is finished.
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
    """Let these arms end; those that ended by themselves."""
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
    """New processes for these arms; of the first ones the results are kept. See `run_blocks`."""
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
    """The signal that ended a measurement, within `signals_unwind`."""
    return raised[0] if raised else signal.SIGINT


def _describe(estimate: Estimate) -> str:
    if estimate.half_width < WIDEST:
        return f"{estimate.ratio:.2f}× ({estimate.low:.2f} to {estimate.high:.2f})"
    return f"{estimate.ratio:.2f}×"
