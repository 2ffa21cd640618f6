"""A round: start a few arms, measure them in shared blocks, and finish them."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from runner.core.device.signals import raised_signals
from runner.core.errors import WorkerFailure
from runner.core.format import times_interval
from runner.core.schemas.jobs import BenchmarkConfig
from runner.measure.benchmark.arms import Arm
from runner.measure.benchmark.blocks import (
    INTERRUPTED,
    Measurements,
    StoppingRule,
    WorkerResults,
    WorkerSetup,
    run_blocks,
)
from runner.measure.benchmark.statistics import CONFIDENCE, Estimate
from runner.measure.benchmark.workers.pool import WorkerPool

log = logging.getLogger("runner")
MAX_LOGGED_WIDTH = 9.0  # half-width above which an interval is not logged
CACHED_COMPILE_SHARE = 0.5  # of the compile time, assumed to be saved at a relaunch (disk cache)


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
    # seconds for an arm, by name, to start; None: benchmark.timeout_s
    start_limit_s: Callable[[str], float | None] = lambda name: None
    overdraws: bool = True  # whether the budget may be exceeded for the blocks of an interval


@dataclass
class Round:
    """The measurements of several arms in the same blocks."""

    measurements: Measurements = field(default_factory=lambda: Measurements({}, {}))
    setups: dict[str, WorkerSetup] = field(default_factory=dict)
    results: dict[str, WorkerResults] = field(default_factory=dict)
    failures: dict[str, WorkerFailure] = field(default_factory=dict)  # arms that ended early

    def ratio(self, over: Sequence[str], under: Sequence[str]) -> Estimate | None:
        """Return the product of times per sample of `over` divided by that of `under`, by block.

        None if an arm has no blocks, or there are too few for an interval.
        """
        turns = self.measurements.turns
        if not all(turns.get(name) for name in (*over, *under)):
            return None
        # all arms share the analyses
        shortest = min((*over, *under), key=lambda name: len(turns[name]))
        estimate = self.measurements.ratio(over, under, shortest)
        return None if math.isinf(estimate.half_width) else estimate

    def describe_failure(self, *names: str) -> str:
        """Return how the first of these arms that ended early did so; "" if none has."""
        for name in names:
            if name in self.failures:
                return f"{name}: {self.failures[name].status}: {self.failures[name].reason}"
        return ""

    def record_failure(self, name: str, failure: WorkerFailure) -> None:
        """Record how the arm ended, and log it."""
        self.failures[name] = failure
        log.warning("%s: %s: %s", name, failure.status, failure)


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

    Each arm has several processes (`StoppingRule`); `results` and the record are those of the
    first. The budget covers measuring and later starts. `result` is filled in as it goes, for
    callers that are interrupted. Without the reference nothing is measured, or with
    `needs_reference=False` only times. After Ctrl-C `measurements.stop_reason` is `interrupted`.
    """
    result, settings, clock = result or Round(), options.settings, options.clock
    with options.pool(arms, settings, options.folder, options.given, options.metrics) as pool:
        start_time = clock()
        for number, arm in enumerate(arms, 1):
            options.announce(f"starting {arm.name} ({number} of {len(arms)})")
            try:
                setup = pool.start(arm.name, options.start_limit_s(arm.name))
            except WorkerFailure as error:
                result.record_failure(arm.name, error)
                continue
            result.setups[arm.name] = setup
            options.announce(f"{arm.name}: first step after {setup.setup_seconds:.1f} s")
        active = list(result.setups)
        if (reference in active and len(active) > 1) or (active and not needs_reference):
            base_arm = reference if reference in active else active[0]
            compiling_s = sum(setup.compile_seconds for setup in result.setups.values())
            restart_s = clock() - start_time - CACHED_COMPILE_SHARE * compiling_s
            rule = StoppingRule(
                settings.narrow, budget_s, settings.processes, restart_s, alpha=options.alpha,
                overdraws=options.overdraws,
            )  # fmt: skip

            result.measurements = run_blocks(
                pool.turn, active, base_arm, rule, settings.block_s, seed, clock,
                partial(_announce_progress, options, budget_s),
                partial(_relaunch_arms, pool, options, result),
            )  # fmt: skip
            for name, failure in result.measurements.failures.items():
                result.record_failure(name, failure)
        if result.measurements.stop_reason != INTERRUPTED:
            unfinished = [name for name in active if name not in result.failures]
            for name, failure in _finish_arms(pool, unfinished, result).items():
                result.record_failure(name, failure)
    return result


def _finish_arms(pool: WorkerPool, names: Sequence[str], result: Round) -> dict[str, WorkerFailure]:
    """Finish the arms without results, and store these; return those that ended early instead."""
    failures = {}
    for name in [name for name in names if name not in result.results]:
        try:
            result.results[name] = pool.finish(name)
        except WorkerFailure as error:
            failures[name] = error
    return failures


def _relaunch_arms(
    pool: WorkerPool, options: MeasureOptions, result: Round, names: Sequence[str], within_s: float
) -> dict[str, WorkerFailure]:
    """Restart these arms in new processes; keep the first results. See `run_blocks`."""
    deadline = options.clock() + within_s
    failures = _finish_arms(pool, names, result)
    pool.renew()
    for name in [name for name in names if name not in failures]:
        left_s = max(0.0, deadline - options.clock())
        try:
            pool.start(name, min(options.settings.timeout_s, left_s))
        except WorkerFailure as error:
            if error.status == "timeout" and options.clock() >= deadline:
                raise TimeoutError from None
            failures[name] = error
    return failures


def _announce_progress(
    options: MeasureOptions, budget_s: float, measurements: Measurements
) -> None:
    ratios = []
    for name, one in measurements.estimates.items():
        interval = one.interval if one.half_width < MAX_LOGGED_WIDTH else None
        ratios.append(f"{name} {times_interval(one.ratio, interval)}")
    elapsed = f"{measurements.seconds:.0f} of {budget_s:g} s"
    launch = f"process {len(measurements.launch_starts)} of each arm"
    options.announce(" · ".join([f"block {measurements.blocks}", launch, elapsed, *ratios]))


def ending_signal() -> int:
    """Return the signal that ended a measurement; for use within `raise_on_signals`."""
    return raised_signals[0] if raised_signals else signal.SIGINT
