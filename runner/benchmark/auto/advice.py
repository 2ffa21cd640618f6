"""What would help next: other batch sizes, timed, and what the search saw on its way."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy

from runner.benchmark.arms import Arm
from runner.benchmark.auto.look import Look, arm_config
from runner.benchmark.auto.tried import Tried
from runner.benchmark.blocks import ArmEnded, Rule, run_blocks
from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.crew.crew import Crew
from runner.benchmark.statistics import Estimate
from runner.build import Given
from runner.config import RunConfig

WORTH = 1.05  # times as efficient, from which on it is worth a word
WAITING = 0.2  # of a step
LOOKS = (6, 8, 12)


def advice_on(chosen: Tried | None) -> list[str]:
    """What was seen anyway."""
    if chosen is None:
        return []
    said = [f"did not take hold: {line}" for line in chosen.fell_back]
    if chosen.data_wait is not None and chosen.data_wait > WAITING:
        said.append(
            f"{chosen.data_wait:.0%} of a step is spent waiting for its batch: "
            "see data.workers and optimization.pipeline"
        )
    return said


def batch_sizes(config: RunConfig, look: Look) -> list[int]:
    """Twice the batch, and half of it."""
    size = config.training.batch_size
    return [s for s in (2 * size, size // 2) if 0 < s <= look.samples and s != size]


def time_batch_sizes(
    config: RunConfig,
    given: Given,
    chosen: list[str],
    sizes: list[int],
    settings: BenchmarkConfig,
    budget_s: float,
    told: Callable[[str], None],
) -> list[str]:
    """Time of a sample in steps of those sizes, held against the run's own; what is clear is said.

    A size that does not fit the memory, or fails otherwise, is left out. It takes `budget_s`, and
    what was being started then.
    """
    began, own = time.monotonic(), config.training.batch_size
    arms = [Arm(str(own), arm_config(config, chosen))]
    for size in sizes:
        other = deepcopy(arms[0].config)
        other.training.batch_size = size
        if other.training.micro_batch is not None:
            other.training.micro_batch = min(size, other.training.micro_batch)
        arms.append(Arm(str(size), other))
    with Crew(arms, settings, None, given) as crew:
        alive: list[str] = []
        for arm in arms:
            left = budget_s - (time.monotonic() - began)
            if len(alive) > 1 and left < budget_s / 2:
                break
            try:
                crew.start(arm.name)
                alive.append(arm.name)
            except ArmEnded as error:
                told(f"batches of {arm.name}: {error}")
        if len(alive) < 2 or alive[0] != str(own):
            return []
        rule = Rule(0.02, max(0.0, budget_s - (time.monotonic() - began)), LOOKS)
        measured = run_blocks(
            crew.turn, alive, alive[0], rule, settings.block_s, config.seed, time.monotonic
        )
    if measured.stopped == "interrupted":
        raise KeyboardInterrupt
    return [said for name, e in measured.estimates.items() if (said := sentence(int(name), own, e))]


def sentence(size: int, own: int, estimate: Estimate) -> str:
    """In words, where it is clear; else nothing."""
    if estimate.low <= 1 or estimate.ratio < WORTH:
        return ""
    more = "after as many samples there are half as many updates, so see to optimizer.lr"
    less = "after as many samples there are twice as many updates"
    return (
        f"training.batch_size={size} would be {estimate.ratio:.2f} times as efficient per sample "
        f"as {own} ({estimate.low:.2f} to {estimate.high:.2f}); {more if size > own else less}"
    )
