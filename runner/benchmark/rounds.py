"""A round: a few arms measured against one another. Started, run in blocks, finished."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
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
from runner.training.signals import unclaimed

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

    @contextmanager
    def noting_end(self, name: str) -> Iterator[None]:
        """An arm that ends within is noted."""
        try:
            yield
        except ArmEnded as ended:
            self.note_end(name, ended)

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
    result, settings = Round() if result is None else result, options.settings
    with options.pool(arms, settings, options.folder, options.given, options.metrics) as pool:
        began = options.clock()
        for number, arm in enumerate(arms, 1):
            options.announce(f"starting {arm.name} ({number} of {len(arms)})")
            with result.noting_end(arm.name):
                start_limit_s = None if arm.name == reference else options.start_limit_s
                limit_s = start_limit_s() if start_limit_s else None
                ready = result.ready[arm.name] = pool.start(arm.name, limit_s)
                options.announce(f"{arm.name}: first step after {ready.setup_seconds:.1f} s")
        alive = [arm.name for arm in arms if arm.name in result.ready]
        if (reference in alive and len(alive) > 1) or (alive and not needs_reference):
            against = reference if reference in alive else alive[0]
            compiling_s = sum(ready.compile_seconds for ready in result.ready.values())
            rule = StoppingRule(
                settings.narrow,
                budget_s,
                settings.processes,
                restart_s=options.clock() - began - CACHED * compiling_s,
                alpha=options.alpha,
            )

            def watch(measured: Measured) -> None:
                ratios = [f"{n} {_describe(e)}" for n, e in measured.estimates.items()]
                spent = f"{measured.seconds:.0f} of {budget_s:g} s"
                launch = f"process {len(measured.starts)} of each arm"
                options.announce(" · ".join([f"block {measured.blocks}", launch, spent, *ratios]))

            def relaunch(names: Sequence[str], within_s: float) -> dict[str, ArmEnded]:
                return _relaunch(pool, names, within_s, options, result)

            result.measured = run_blocks(
                pool.turn, alive, against, rule, settings.block_s, seed, options.clock, watch,
                relaunch,
            )  # fmt: skip
            for name, ended in result.measured.ended.items():
                result.note_end(name, ended)
        for name in alive if result.measured.stopped != INTERRUPTED else ():
            if name not in result.ended and name not in result.finished:
                with result.noting_end(name):
                    result.finished[name] = pool.finish(name)
    return result


def _relaunch(
    pool: WorkerPool,
    names: Sequence[str],
    within_s: float,
    options: MeasureOptions,
    result: Round,
) -> dict[str, ArmEnded]:
    """New processes for these arms; of the first ones the results are kept. See `run_blocks`."""
    until, ended = options.clock() + within_s, dict[str, ArmEnded]()
    for name in [name for name in names if name not in result.finished]:
        try:
            result.finished[name] = pool.finish(name)
        except ArmEnded as error:
            ended[name] = error
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


def _describe(estimate: Estimate) -> str:
    if estimate.half_width < WIDEST:
        return f"{estimate.ratio:.2f}× ({estimate.low:.2f} to {estimate.high:.2f})"
    return f"{estimate.ratio:.2f}×"


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """SIGTERM and its like are a KeyboardInterrupt as Ctrl-C is; gives the signals that came."""
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {n: signal.signal(n, end) for n in {signal.SIGINT, signal.SIGTERM, *unclaimed()}}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
