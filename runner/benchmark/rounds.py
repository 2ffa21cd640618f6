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
        estimate = contrast(series[: len(over)], series[len(over) :], alpha)
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

    `result` is filled in on the way, for a caller that is interrupted. Without the reference
    nothing is measured, or with `needs_reference=False` times without ratios. After Ctrl-C while it
    measures `measured.stopped` is `interrupted`, and nothing is finished.
    """
    result, settings = Round() if result is None else result, options.settings
    with options.pool(arms, settings, options.folder, options.given, options.metrics) as pool:
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
            rule = StoppingRule(settings.narrow, budget_s, alpha=options.alpha)

            def watch(measured: Measured) -> None:
                ratios = [f"{n} {_describe(e)}" for n, e in measured.estimates.items()]
                spent = f"{measured.seconds:.0f} of {budget_s:g} s"
                options.announce(" · ".join([f"block {measured.blocks}", spent, *ratios]))

            result.measured = run_blocks(
                pool.turn, alive, against, rule, settings.block_s, seed, options.clock, watch
            )
            for name, ended in result.measured.ended.items():
                result.note_end(name, ended)
        for name in alive if result.measured.stopped != INTERRUPTED else ():
            if name not in result.ended:
                with result.noting_end(name):
                    result.finished[name] = pool.finish(name)
    return result


def _describe(estimate: Estimate) -> str:
    if math.isfinite(estimate.half_width):
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
