"""Randomised blocks: each block runs every arm once, in random order.

A drift of the machine hits all arms of a block alike, so what counts is the ratio within blocks.
Looks come at numbers of blocks fixed beforehand, and each spends a part of the 5 % (alpha
spending), so the interval that is kept misses the truth with a chance of at most 5 %, whatever made
it the last one. That is counted for independent blocks; where they are not, intervals are wider.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from runner.benchmark.statistics import CONFIDENCE, Estimate, Spending, fewest_blocks, paired

INTERRUPTED = "interrupted"
SHARE = 1 / 6  # of what is left, for a look that is not the last: enough for one at 8 blocks
LOOKS = (
    *range(8, 17, 2),
    *range(20, 33, 4),
    *range(40, 65, 8),
    *range(80, 129, 16),
    *range(160, 257, 32),
    *range(320, 513, 64),
    *range(640, 1025, 128),
)


# -- what an arm's process answers: plain data that goes through a pipe ----------------------------


@dataclass(frozen=True)
class Ready:
    """An arm that has made its first steps."""

    samples_per_step: int
    setup_seconds: float  # from the start of the process to the end of its first step
    warm_ms: float  # a late warm-up step
    compile_seconds: float = 0.0  # as the compiler itself counts them, until the warm-up's end
    settling_seconds: float = 0.0  # of the warm-up steps but the first, beyond as many late ones
    workers: int = 0  # processes that fetch its data


@dataclass(frozen=True)
class Turn:
    """One arm's part of one block."""

    steps: int
    samples: int
    seconds: float  # wall time of the steps, the device waited for at both ends
    median_ms: float  # of a step; on an accelerator the mean, since only the whole turn is timed
    per_sample_ms: float  # of the median step, or with data workers the mean: what is compared
    step_ms: list[float] = field(default_factory=list)  # on an accelerator the mean one alone
    data_seconds: float = 0.0
    others: float | None = None  # share of the CPUs that other processes took; None: not known


@dataclass(frozen=True)
class Finished:
    """An arm that has ended as it should."""

    summary: dict[str, Any]  # summary.json
    losses: list[float]  # of the first steps, warm-up included
    problems: list[str]  # signs that it does not train
    metrics: dict[str, float]  # of `MeasureOptions.metrics`
    notes: list[str] = field(default_factory=list)


class ArmEnded(Exception):
    """An arm has ended: `status` is failed, killed, timeout or oom."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


# -- the blocks ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoppingRule:
    """When to stop: every interval is narrow, the budget is spent, or the looks are made.

    The budget is overdrawn only for the six blocks without which there is no interval at all.
    """

    target_half_width: float  # of every interval, as a share of the ratio
    budget_s: float
    looks: Sequence[int] = LOOKS  # numbers of blocks; 8 is the first with an interval
    alpha: float = 1 - CONFIDENCE  # less where an interval is one of many, and all are to hold


@dataclass
class Measured:
    """The turns of all blocks and the estimates from them.

    Any other ratio of the arms, taken after the end (`paired`, `contrast`), holds at 95 % with the
    alpha of that arm of it which has the fewest turns, since all share the looks.
    """

    turns: dict[str, list[Turn]]  # by arm; the n-th is of the n-th block
    estimates: dict[str, Estimate]  # against the reference, of all others with a block in common
    ended: dict[str, ArmEnded] = field(default_factory=dict)
    blocks: int = 0  # whole ones
    seconds: float = 0.0
    stopped: str = ""
    alphas: dict[str, float] = field(default_factory=dict)  # by arm: what its last look could spend


def run_blocks(
    turn: Callable[[str, float], Turn],
    names: Sequence[str],
    reference: str,
    rule: StoppingRule,
    block_s: float,
    seed: int,
    clock: Callable[[], float],
    watch: Callable[[Measured], None] | None = None,
) -> Measured:
    """Measure until every interval is narrow or the budget is spent; `turn(name, seconds)` is one.

    An arm whose turn raises ArmEnded is out, and the others continue; its turns so far are kept.
    Without the reference, or with nothing but it, there are no ratios: times are gathered up to the
    first look. Ctrl-C is not raised: the measurements so far come back, with the intervals of the
    last look and `stopped="interrupted"`.

    `watch` receives the measurements so far at every look.
    """
    measured = Measured({name: [] for name in names}, {})
    state = _Blocks(turn, reference, rule, block_s, clock, measured, list(names))
    draw = np.random.default_rng(seed)
    try:
        while not measured.stopped:
            state.block([state.active[i] for i in draw.permutation(len(state.active))])
            measured.stopped = state.after_block()
            if watch is not None and measured.blocks in rule.looks:
                watch(measured)
    except KeyboardInterrupt:
        measured.stopped = INTERRUPTED
        state.interrupted()
    measured.seconds = clock() - state.start
    return measured


@dataclass
class _Blocks:
    """The state of `run_blocks`."""

    turn: Callable[[str, float], Turn]
    reference: str
    rule: StoppingRule
    block_s: float
    clock: Callable[[], float]
    measured: Measured
    active: list[str]  # take turns

    def __post_init__(self) -> None:
        self.times: dict[str, list[float]] = {name: [] for name in self.active}
        self.spending = Spending(self.rule.alpha)
        self.least = fewest_blocks(self.rule.alpha)
        self.overdrawn = False  # the budget was too small for any interval
        self.start = self.clock()

    def block(self, order: Sequence[str]) -> None:
        """Give every arm its turn."""
        for name in order:
            try:
                turn = self.turn(name, self.block_s)
            except ArmEnded as error:
                self._drop(name, error)
                continue
            self.measured.turns[name].append(turn)
            self.times[name].append(turn.per_sample_ms)
        self.measured.blocks += 1

    def after_block(self) -> str:
        """Why to stop, or ""."""
        measured, rule = self.measured, self.rule
        measured.seconds = self.clock() - self.start
        spent = measured.seconds >= rule.budget_s
        if self.reference not in self.active or len(self.active) < 2:
            return self._without_ratios(spent)
        self.overdrawn |= spent and measured.blocks < self.least
        over = spent and measured.blocks >= self.least
        last = over or measured.blocks >= max(rule.looks)
        if (last or measured.blocks in rule.looks) and self._look(last) and not self.overdrawn:
            left = " of the arms that are left" if measured.ended else ""
            return f"every ratio{left} is known to within {100 * rule.target_half_width:g} %"
        if over and self.overdrawn:
            return (
                f"the budget of {rule.budget_s:g} s was too small for the {self.least} blocks that "
                f"an interval takes: they took {measured.seconds:.1f} s"
            )
        if over:
            return f"the budget of {rule.budget_s:g} s is spent"
        return f"all {measured.blocks} blocks of the plan are made" if last else ""

    def interrupted(self) -> None:
        """Keep the last look's estimates: a person may have stopped because of the ratios."""
        for name, ratio in self._ratios().items():
            self.measured.estimates.setdefault(name, Estimate(ratio, 0.0, math.inf))
        for name in self.times:
            self.measured.alphas.setdefault(name, self._alpha_left(name))

    def _look(self, last: bool) -> bool:
        """Estimate the arms that are still active; whether all intervals are narrow."""
        measured = self.measured
        alpha = self.spending.interim_alpha(measured.blocks, 1.0 if last else SHARE)
        estimates = {n: self._estimate(n, alpha) for n in self.active if n != self.reference}
        measured.estimates |= estimates
        measured.alphas |= dict.fromkeys(self.active, alpha)
        widest = max(estimate.half_width for estimate in estimates.values())
        return widest <= self.rule.target_half_width

    def _estimate(self, name: str, alpha: float) -> Estimate:
        return paired(self.times[self.reference], self.times[name], alpha)

    def _ratios(self) -> dict[str, float]:
        """Of all that have a block in common with the reference: cheap, for every block."""
        if self.reference in self.measured.ended:
            return {}
        base = self.times[self.reference]
        return {
            name: median(a / b for a, b in zip(base, times, strict=False))
            for name, times in self.times.items()
            if name != self.reference and base and times
        }

    def _drop(self, name: str, error: ArmEnded) -> None:
        """Estimate an arm that has ended from its turns so far, with all that is left to spend."""
        measured = self.measured
        measured.ended[name] = error
        self.active.remove(name)
        measured.alphas[name] = alpha = self._alpha_left(name)
        if name == self.reference:
            measured.estimates = {}
        elif name in self._ratios():
            measured.estimates[name] = self._estimate(name, alpha)

    def _alpha_left(self, name: str) -> float:
        return self.spending.last(max(len(self.times[name]), self.spending.blocks))

    def _without_ratios(self, spent: bool) -> str:
        if not self.active:
            return "every arm has ended"
        self.measured.alphas |= {name: self._alpha_left(name) for name in self.active}
        if not spent and self.measured.blocks < min(self.rule.looks):
            return ""
        if self.reference in self.measured.ended:
            return f"the reference, {self.reference}, ended: there are no ratios"
        return f"there is no arm to compare with {self.reference}"
