"""A round: a few arms measured against one another. Started, run in blocks, finished."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.benchmark.arms import Arm
from runner.benchmark.blocks import INTERRUPTED, ArmEnded, Measured, StoppingRule, run_blocks
from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.statistics import CONFIDENCE, Estimate, contrast
from runner.benchmark.workers.messages import Finished, Ready
from runner.benchmark.workers.pool import WorkerPool

Told = Callable[[str], None]
"""Receives lines about the progress."""
Watched = Callable[[Mapping[str, Estimate], int, float], None]
"""Receives, after each block, the estimates so far, the number of blocks, the seconds spent."""

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


def run_round(
    arms: Sequence[Arm],
    reference: str,
    budget_s: float,
    seed: int,
    options: MeasureOptions,
    told: Told | None = None,
    watched: Watched | None = None,
    result: Round | None = None,
    needs_reference: bool = True,
) -> Round:
    """Measure these arms in the same blocks; one that ends early is noted, the others continue.

    `result` is filled in on the way, for a caller that is interrupted. Without the reference
    nothing is measured, or with `needs_reference=False` times without ratios. After Ctrl-C while it
    measures `measured.stopped` is `interrupted`, and nothing is finished.
    """
    told, result = told or (lambda line: None), Round() if result is None else result
    settings = options.settings
    with options.pool(arms, settings, options.folder, options.given, options.metrics) as pool:
        for number, arm in enumerate(arms, 1):
            told(f"starting {arm.name} ({number} of {len(arms)})")
            with _noting_end(arm.name, result):
                ready = result.ready[arm.name] = pool.start(arm.name)
                told(f"{arm.name}: first step after {ready.setup_seconds:.1f} s")
        alive = [arm.name for arm in arms if arm.name in result.ready]
        if (reference in alive and len(alive) > 1) or (alive and not needs_reference):
            against = reference if reference in alive else alive[0]
            rule = StoppingRule(settings.narrow, budget_s, alpha=options.alpha)
            result.measured = run_blocks(
                pool.turn, alive, against, rule, settings.block_s, seed, options.clock, watched
            )
            for name, ended in result.measured.ended.items():
                _note_end(name, ended, result)
        for name in alive if result.measured.stopped != INTERRUPTED else ():
            if name not in result.ended:
                with _noting_end(name, result):
                    result.finished[name] = pool.finish(name)
    return result


@contextmanager
def _noting_end(name: str, result: Round) -> Iterator[None]:
    try:
        yield
    except ArmEnded as ended:
        _note_end(name, ended, result)


def _note_end(name: str, ended: ArmEnded, result: Round) -> None:
    result.ended[name] = ended
    log.warning("%s: %s: %s", name, ended.status, ended)
