"""Randomised blocks: each block runs every arm once, in random order.

Interim analyses come at fixed numbers of blocks and share the 5 % (alpha spending). Within the
budget all arms are launched several times, in new processes, with as many blocks as in the first
launch; analyses at the ends of launches share a sixth of the 5 % (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from runner.core.errors import WorkerFailure
from runner.measure.benchmark.statistics import (
    CONFIDENCE,
    AlphaSpending,
    Estimate,
    min_blocks,
    paired_ratio,
)

INTERRUPTED = "interrupted"
INTERIM_ALPHA_SHARE = 1 / 6
"""Of the alpha left, for each analysis but the last: enough for one at 8 blocks."""
MIN_LAUNCH_BLOCKS = 3
MIN_LAUNCHES = 3  # two launches have t intervals 13 or more times as wide as their difference
RELAUNCH_SHARE = 2 / 3  # of the budget, for launches after the first and their minimum blocks
# 8, 10, 12, 14, 16, 20, 24, 28, 32, 40 … 1024
INTERIM_BLOCKS = (*(quarter << double for double in range(1, 8) for quarter in range(4, 8)), 1024)


# -- what an arm's process sends: plain data, pickled through a pipe -------------------------------

FINISH = "finish"  # other requests: the seconds of a turn, and None to leave at once


@dataclass(frozen=True)
class WorkerSetup:
    """Sent by an arm after its warm-up: set-up times and batch size."""

    samples_per_step: int
    setup_seconds: float  # from the start of the process to the end of its first step
    warm_ms: float  # a late warm-up step
    compile_seconds: float = 0.0  # by the compiler's own count, until the end of the warm-up
    settling_seconds: float = 0.0  # of warm-up steps after the first, beyond as many late ones
    workers: int = 0  # data worker processes


@dataclass(frozen=True)
class Turn:
    """One arm's part of one block."""

    steps: int
    samples: int
    seconds: float  # wall time of all steps, device synchronised at both ends
    median_ms: float  # median step; on an accelerator the mean, since only whole turns are timed
    per_sample_ms: float  # of the median step (data workers: mean); arms are compared by it
    step_ms: list[float] = field(default_factory=list)  # on an accelerator only the mean
    data_seconds: float = 0.0
    other_cpu_share: float | None = None  # of the CPUs, used by other processes; None: unknown


@dataclass(frozen=True)
class WorkerResults:
    """The results of an arm that finished normally."""

    summary: dict[str, Any]  # summary.json
    losses: list[float]  # of the first steps, warm-up included
    problems: list[str]  # signs that the model does not learn
    metrics: dict[str, Any]  # what `MeasureOptions.metrics` returned
    notes: list[str] = field(default_factory=list)
    planned: dict[str, str] = field(default_factory=dict)  # see `ArmResult.planned`

    def technique(self, name: str) -> dict[str, Any]:
        """Return the summary's row of a technique; a row with only a reason if it has none."""
        rows = self.summary.get("techniques") or []
        return next((row for row in rows if row["name"] == name), {"reason": "not seen"})


Relaunch = Callable[[Sequence[str], float], dict[str, WorkerFailure]]

# -- the blocks ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoppingRule:
    """When to stop: all intervals are narrow, the budget is spent, or all launches are done.

    Only if `overdraws` it exceeds the budget, for the `min_blocks` that an interval requires.
    """

    target_half_width: float  # of every interval, as a share of the ratio
    budget_s: float  # seconds of measuring and of all launches but the first
    processes: int = 1  # launches of each arm, if the budget allows three or more
    restart_s: float = 0.0  # expected seconds of a launch; later, of the last one
    interim_blocks: Sequence[int] = INTERIM_BLOCKS  # at 8 blocks there is an interval
    alpha: float = 1 - CONFIDENCE  # less where several intervals have to hold jointly
    overdraws: bool = True  # False: the block in which the budget is spent is dropped


@dataclass
class Measurements:
    """The turns of all blocks and the estimates from them.

    A ratio taken later holds at 95 % with the alpha of the arm in it that has the fewest turns.
    """

    turns: dict[str, list[Turn]]  # by arm; the n-th turn is from the n-th block
    estimates: dict[str, Estimate]  # against the reference, of all arms that share a block with it
    failures: dict[str, WorkerFailure] = field(default_factory=dict)
    blocks: int = 0  # complete ones
    seconds: float = 0.0
    stop_reason: str = ""
    alphas: dict[str, float] = field(default_factory=dict)  # by arm, of its last analysis
    launch_alphas: dict[str, float] = field(default_factory=dict)  # of the t over launches
    launch_starts: list[int] = field(default_factory=lambda: [0])  # the first block of each launch
    precise: bool = False  # every interval is as narrow as the target

    def ratio(self, over: Sequence[str], under: Sequence[str], by: str) -> Estimate:
        """Return the times per sample of `over` divided by those of `under`, at arm `by`'s alphas.

        With several arms on a side it is the ratio of the products, by block.
        """
        times = {n: [turn.per_sample_ms for turn in self.turns[n]] for n in (*over, *under)}
        sides = [times[n] for n in over], [times[n] for n in under]
        alphas = self.alphas.get(by, 0.0), self.launch_alphas.get(by, 0.0)
        return paired_ratio(*sides, alphas[0], self.launch_starts, alphas[1])

    @property
    def processes(self) -> int:
        """Number of processes per arm behind the intervals, over arms that have not ended."""
        return max((one.processes for one in self.estimates.values()), default=1)


def run_blocks(
    run_turn: Callable[[str, float], Turn],
    names: Sequence[str],
    reference: str,
    rule: StoppingRule,
    block_s: float,
    seed: int,
    clock: Callable[[], float],
    on_analysis: Callable[[Measurements], None] | None = None,
    relaunch: Relaunch | None = None,
) -> Measurements:
    """Measure until every interval is narrow or the budget is spent, by `run_turn(name, seconds)`.

    `relaunch(names, within_s)` restarts the arms in new processes and returns those that failed to
    start; it raises TimeoutError if the time runs out. Without it each arm has one process.
    `on_analysis` receives the measurements so far at every analysis.

    An arm whose turn raises WorkerFailure leaves, keeping its turns. Without the reference, or with
    it alone, only times are gathered, up to the first analysis. Ctrl-C is not raised: what was
    measured is returned with the intervals of the last analysis and `stop_reason="interrupted"`.
    """
    measurements = Measurements({name: [] for name in names}, {})
    if relaunch is None:
        relaunch, rule = lambda names, within_s: {}, replace(rule, processes=1)
    state = _BlockRunner(
        run_turn, relaunch, reference, rule, block_s, clock, measurements, list(names), on_analysis
    )
    generator = np.random.default_rng(seed)
    try:
        while not measurements.stop_reason:
            state.run_block([state.active[i] for i in generator.permutation(len(state.active))])
            measurements.stop_reason = state.finish_block()
    except KeyboardInterrupt:
        measurements.stop_reason = INTERRUPTED
        state.complete_estimates()
    measurements.seconds = clock() - state.start_time
    return measurements


@dataclass
class _BlockRunner:
    """The state of `run_blocks`."""

    run_turn: Callable[[str, float], Turn]
    relaunch: Relaunch
    reference: str
    rule: StoppingRule
    block_s: float
    clock: Callable[[], float]
    measurements: Measurements
    active: list[str]  # arms that still take turns
    on_analysis: Callable[[Measurements], None] | None

    def __post_init__(self) -> None:
        self.spending = AlphaSpending(self.rule.alpha)
        self.min_blocks = min_blocks(self.rule.alpha)
        self.overdrawn = False  # the budget was too small for any interval
        self.launch_alpha = self.rule.alpha  # left for analyses at the ends of launches
        self.restart_s = self.rule.restart_s  # of the last launch
        self.total_restart_s = 0.0
        self.analyzed_blocks, self.widest_half_width = 0, math.inf  # of the last analysis
        self.launch_deadline = 0.0  # when the launch has used its budget share; 0: first launch
        self.start_time = self.clock()

    def run_block(self, order: Sequence[str]) -> None:
        """Run one turn of each arm, in this order."""
        block: dict[str, Turn] = {}
        for name in order:
            if not self.rule.overdraws and self.clock() - self.start_time >= self.rule.budget_s:
                for taken in block:
                    self.measurements.turns[taken].pop()
                return
            try:
                turn = self.run_turn(name, self.block_s)
            except WorkerFailure as error:
                self._drop(name, error)
                continue
            self.measurements.turns[name].append(turn)
            block[name] = turn
        self.measurements.blocks += 1

    def finish_block(self) -> str:
        """Return why to stop; "" to continue."""
        measurements, rule = self.measurements, self.rule
        measurements.seconds = self.clock() - self.start_time
        over_budget = measurements.seconds >= rule.budget_s
        if over_budget and not measurements.blocks:
            return f"the budget of {rule.budget_s:g} s was too small for a turn of each arm"
        if self.reference not in self.active or len(self.active) < 2:
            return self._stop_without_ratios(over_budget)
        self.overdrawn |= over_budget and measurements.blocks < self.min_blocks and rule.overdraws
        launches = len(measurements.launch_starts)
        blocks = measurements.blocks - measurements.launch_starts[-1]
        required = self.min_blocks if launches == 1 else MIN_LAUNCH_BLOCKS
        finished = over_budget and (blocks >= required or not rule.overdraws)
        finished = finished or measurements.blocks >= max(rule.interim_blocks)
        if not finished and not self._is_launch_complete(blocks):
            return ""
        remaining_s = rule.budget_s - measurements.seconds
        more_launches = 0 if finished else self._affordable_launches(remaining_s)
        ends_imprecise = not more_launches and not self._is_precise()
        if self.analyzed_blocks < measurements.blocks or ends_imprecise:
            self._analyze(last=not more_launches)
        if more_launches and (launches == 1 or not self._is_precise()):
            if self._start_launch():
                return "" if self.active else "every arm ended early"
            self._analyze(last=True)
        return self._describe_stop(over_budget)

    def _is_precise(self) -> bool:
        return self.widest_half_width <= self.rule.target_half_width and not self.overdrawn

    def _describe_stop(self, over_budget: bool) -> str:
        measurements, rule = self.measurements, self.rule
        measurements.precise = self._is_precise()
        budget = f"the budget of {rule.budget_s:g} s"
        if measurements.precise:
            left = " of the remaining arms" if measurements.failures else ""
            return f"every ratio{left} is known to within {100 * rule.target_half_width:g} %"
        if self.overdrawn:
            needed = f"the {self.min_blocks} blocks that an interval needs"
            return f"{budget} was too small for {needed}; they took {measurements.seconds:.1f} s"
        if over_budget or len(measurements.launch_starts) < rule.processes:
            return f"{budget} is spent"
        if rule.processes > 1:
            return f"all {rule.processes} processes of each arm are measured"
        return f"all {measurements.blocks} planned blocks are measured"

    # -- launches --------------------------------------------------------------------------------

    def _is_launch_complete(self, blocks: int) -> bool:
        """Whether the current launch of `blocks` blocks is complete or has used its budget share.

        The first is complete when narrow enough for its part of the precision; the others match it.
        """
        measurements, rule = self.measurements, self.rule
        deadline = self.launch_deadline
        if len(measurements.launch_starts) > 1:
            complete = blocks >= measurements.launch_starts[1]
        else:
            later_launches = self._affordable_launches(RELAUNCH_SHARE * rule.budget_s)
            deadline = self._launch_deadline(0.0, later_launches) if later_launches else math.inf
            target = rule.target_half_width * math.sqrt(1 + later_launches)
            complete = blocks in rule.interim_blocks and self._analyze(last=False) <= target
        return complete or (measurements.seconds >= deadline and blocks >= MIN_LAUNCH_BLOCKS)

    def _affordable_launches(self, seconds: float) -> int:
        """Return how many more launches fit into `seconds`; 0 if the total would be too small."""
        measurements, launches = self.measurements, len(self.measurements.launch_starts)
        block_s = (measurements.seconds - self.total_restart_s) / measurements.blocks
        launch_s = self.restart_s + MIN_LAUNCH_BLOCKS * block_s
        remaining = self.rule.processes - launches
        fit = launch_s * remaining <= seconds
        affordable = remaining if fit else max(0, int(seconds / launch_s))
        min_launches = min(MIN_LAUNCHES, self.rule.processes)
        return affordable if launches > 1 or 1 + affordable >= min_launches else 0

    def _launch_deadline(self, start: float, later_launches: int) -> float:
        """Return when a launch that begins at `start` has used its share of the budget."""
        remaining_s = self.rule.budget_s - start - later_launches * self.restart_s
        return start + remaining_s / (1 + later_launches)

    def _start_launch(self) -> bool:
        """Restart all arms; False if that took longer than the budget allows."""
        restart_time = self.clock()
        remaining_s = self.rule.budget_s - (restart_time - self.start_time)
        try:
            failures = self.relaunch(list(self.active), remaining_s)
        except TimeoutError:
            return False
        finally:
            self.restart_s = self.clock() - restart_time
            self.total_restart_s += self.restart_s
            self.measurements.seconds = self.clock() - self.start_time
        for name, error in failures.items():
            self._drop(name, error)
        self.measurements.launch_starts.append(self.measurements.blocks)
        self.widest_half_width = math.inf
        launch_start = self.measurements.seconds
        later_launches = self._affordable_launches(self.rule.budget_s - launch_start)
        self.launch_deadline = self._launch_deadline(launch_start, later_launches)
        return True

    # -- estimates -------------------------------------------------------------------------------

    def complete_estimates(self) -> None:
        """Complete the estimates after Ctrl-C; those of the last analysis are kept."""
        measurements = self.measurements
        for name in measurements.turns:
            if name not in measurements.estimates and self._is_comparable(name):
                measurements.estimates[name] = self._estimate(name)  # a ratio without an interval
            measurements.alphas.setdefault(name, self._alpha_left(name))
            measurements.launch_alphas.setdefault(name, self.launch_alpha)

    def _analyze(self, last: bool) -> float:
        """Estimate the ratios of the active arms. Returns the widest half-width."""
        measurements = self.measurements
        share = 1.0 if last else INTERIM_ALPHA_SHARE
        alpha = self.spending.interim_alpha(measurements.blocks, share)
        launch_alpha = self.launch_alpha
        if not last and len(measurements.launch_starts) > 1:
            launch_alpha = self.rule.alpha * INTERIM_ALPHA_SHARE / (self.rule.processes - 2)
            self.launch_alpha -= launch_alpha
        measurements.alphas |= dict.fromkeys(self.active, alpha)
        measurements.launch_alphas |= dict.fromkeys(self.active, launch_alpha)
        estimates = {n: self._estimate(n) for n in self.active if n != self.reference}
        measurements.estimates |= estimates
        self.analyzed_blocks = measurements.blocks
        self.widest_half_width = max(estimate.half_width for estimate in estimates.values())
        if self.on_analysis is not None:
            self.on_analysis(measurements)
        return self.widest_half_width

    def _estimate(self, name: str) -> Estimate:
        return self.measurements.ratio([self.reference], [name], name)

    def _is_comparable(self, name: str) -> bool:
        """Whether it shares a block with the reference, and the reference has not ended."""
        turns = self.measurements.turns
        both = name != self.reference and turns[self.reference] and turns[name]
        return bool(both) and self.reference not in self.measurements.failures

    def _drop(self, name: str, error: WorkerFailure) -> None:
        """Remove an arm that has ended; estimate its ratio with all the alpha that is left."""
        measurements = self.measurements
        measurements.failures[name] = error
        self.active.remove(name)
        measurements.alphas[name] = self._alpha_left(name)
        measurements.launch_alphas[name] = self.launch_alpha
        if name == self.reference:
            measurements.estimates = {}
        elif self._is_comparable(name):
            measurements.estimates[name] = self._estimate(name)

    def _alpha_left(self, name: str) -> float:
        turns = len(self.measurements.turns[name])
        return self.spending.final_alpha(max(turns, self.spending.blocks))

    def _stop_without_ratios(self, over_budget: bool) -> str:
        if not self.active:
            return "every arm ended early"
        self.measurements.alphas |= {name: self._alpha_left(name) for name in self.active}
        self.measurements.launch_alphas |= dict.fromkeys(self.active, self.launch_alpha)
        if not over_budget and self.measurements.blocks < min(self.rule.interim_blocks):
            return ""
        if self.reference in self.measurements.failures:
            return f"the reference, {self.reference}, ended early: no ratios"
        return f"no arm to compare with {self.reference}"
