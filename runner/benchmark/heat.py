"""A few arms measured against one another: started, run in blocks, ended; what is left of each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from runner.benchmark.arms import Arm
from runner.benchmark.blocks import ArmEnded, Measured, Rule, run_blocks
from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.crew.crew import Crew, Finished, Ready
from runner.benchmark.statistics import CONFIDENCE, Estimate, contrast

INTERRUPTED = "interrupted"
Told = Callable[[str], None]


class Starter(Protocol):
    """What `Crew` is made by; a simulation stands in for it where statistics are tried."""

    def __call__(
        self,
        arms: Sequence[Arm],
        settings: BenchmarkConfig,
        folder: Path | None,
        given: Any = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> AbstractContextManager[Crew]:
        """The processes of these arms, none of them started."""
        ...


@dataclass(frozen=True)
class With:
    """What all heats of a measurement have in common."""

    settings: BenchmarkConfig
    folder: Path | None = None
    given: Any = None
    metrics: Mapping[str, Any] | None = None
    crew: Starter = Crew
    clock: Callable[[], float] = time.monotonic
    alpha: float = 1 - CONFIDENCE  # that an interval may miss with; less where it is one of many


@dataclass
class Heat:
    """What some arms came to, side by side."""

    measured: Measured
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
        alpha = self.measured.alphas[fewest]  # all that were looked at share the looks
        found = contrast(series[: len(over)], series[len(over) :], alpha)
        return None if math.isinf(found.width) else found

    def names(self) -> set[str]:
        """Of all arms that it was to have, those that did not start included."""
        return {*self.ready, *self.ended}

    def why_not(self, *names: str) -> str:
        """What became of the first of these arms that is no more; "" where all are well."""
        for name in names:
            if name in self.ended:
                return f"{name}: {self.ended[name].status}: {self.ended[name].reason}"
        return ""


def run_heat(
    arms: Sequence[Arm],
    reference: str,
    budget_s: float,
    seed: int,
    how: With,
    told: Told | None = None,
) -> Heat:
    """Measure these arms in the same blocks; one that ends early is noted, the others go on.

    After Ctrl-C while it measures `measured.stopped` is `interrupted`, and nothing is finished.
    """
    rule = Rule(how.settings.narrow, budget_s, alpha=how.alpha)
    heat = Heat(Measured({}, {}))
    with how.crew(arms, how.settings, how.folder, how.given, how.metrics) as crew:
        for arm in arms:
            if told is not None:
                told(f"starting {arm.name}")
            try:
                heat.ready[arm.name] = crew.start(arm.name)
            except ArmEnded as ended:
                heat.ended[arm.name] = ended
        alive = [arm.name for arm in arms if arm.name in heat.ready]
        if reference in alive and len(alive) > 1:
            heat.measured = run_blocks(
                crew.turn, alive, reference, rule, how.settings.block_s, seed, how.clock
            )
            heat.ended.update(heat.measured.ended)
        for name in alive if heat.measured.stopped != INTERRUPTED else ():
            if name not in heat.ended:
                try:
                    heat.finished[name] = crew.finish(name)
                except ArmEnded as ended:
                    heat.ended[name] = ended
    return heat
