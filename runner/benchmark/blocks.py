"""Arms in turn: blocks in each of which every arm has its go, in an order drawn by lot.

A drift of the machine hits all arms of a block alike, so what counts is the ratio within blocks.
Whoever looks at an interval again and again and stops when it is narrow must pay for each look:
looks come at numbers of blocks fixed beforehand, and each spends a part of the 5 %. The intervals
of all looks together miss the truth with a chance of at most 5 %, so the one that is kept does too,
whatever made it the last; and how many blocks a budget allows does not depend on the ratios. That
is counted for blocks that do not depend on each other; where they do, intervals are made wider.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from runner.benchmark.statistics import CONFIDENCE, Estimate, Spending, fewest_blocks, paired

KEPT_STEPS = 512  # of a turn, at even ranks: p95 stays, and hours of small steps fit the memory

_SHARE = 1 / 6  # of what is left, for a look that is not the last: enough for one at 8 blocks
_LOOKS = (
    8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256,
    320, 384, 448, 512, 640, 768, 896, 1024,
)  # fmt: skip


@dataclass(frozen=True)
class TurnLoad:
    """How the machine was during one arm's turn; None where it cannot be told."""

    others: float | None = None
    mhz: float | None = None
    device_mhz: float | None = None
    stolen: float | None = None


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
    load: TurnLoad = field(default_factory=TurnLoad)


class ArmEnded(Exception):
    """An arm is no more: `status` is failed, killed, timeout or oom."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(frozen=True)
class Rule:
    """When there is enough.

    A look may spend a sixth of what is left of the 5 %; the last one, at the last of `looks` or
    when the budget is spent, all of it. The budget is overdrawn only for the six blocks without
    which there is no interval at all.
    """

    target_half_width: float  # of every interval of every interval, as a share of the ratio
    budget_s: float
    looks: Sequence[int] = _LOOKS  # numbers of blocks; 8 is the first with an interval
    rest: bool = False  # a narrow arm takes no more turns, which leaves the budget to the others
    alpha: float = 1 - CONFIDENCE  # less where an interval is one of many, and all are to hold


@dataclass
class Measured:
    """What the blocks came to.

    An arm that ended or rests has fewer turns than others; its n-th is of the n-th block all the
    same. Any other ratio of the arms, taken after the end (`paired`, `contrast`), holds at 95 %
    with the alpha of that arm of it which has the fewest turns, since all share the looks.
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
    rule: Rule,
    block_s: float,
    seed: int,
    clock: Callable[[], float],
    told: Callable[[Mapping[str, Estimate], int, float], None] | None = None,
) -> Measured:
    """Measure until every interval is narrow or the budget is spent; `turn(name, seconds)` is one.

    An arm whose turn raises ArmEnded is out, and the others go on; its turns so far are kept.
    Without the reference, or with nobody but it, there are no ratios: `stopped` says so, and the
    times of those that are left are gathered up to the first look. Ctrl-C is not raised: what was
    measured so far comes back, with the intervals of the last look and `stopped="interrupted"`, for
    the caller to end with.

    `told` hears of every block (estimates so far, number of blocks, seconds spent), for a display:
    a ratio has the interval of the last look, or nan where there was none yet.
    """
    names = list(names)
    measured = Measured({name: [] for name in names}, {})
    state = _Blocks(turn, reference, rule, block_s, clock, measured, list(names))
    draw = np.random.default_rng(seed)
    try:
        while not measured.stopped:
            state.block([state.active[i] for i in draw.permutation(len(state.active))])
            measured.stopped = state.after_block()
            if told is not None:
                told(state.shown(), measured.blocks, measured.seconds)
    except KeyboardInterrupt:
        measured.stopped = "interrupted"
        state.interrupted()
    measured.seconds = clock() - state.start
    return measured


class _Blocks:
    """The state of `run_blocks`."""

    def __init__(
        self,
        turn: Callable[[str, float], Turn],
        reference: str,
        rule: Rule,
        block_s: float,
        clock: Callable[[], float],
        measured: Measured,
        active: list[str],
    ) -> None:
        self.turn, self.reference, self.rule, self.block_s = turn, reference, rule, block_s
        self.measured, self.active = measured, active  # the latter take turns
        self.times: dict[str, list[float]] = {name: [] for name in active}
        self.spending = Spending(rule.alpha)
        self.least = fewest_blocks(rule.alpha)
        self.too_small = False  # the budget was, for any interval
        self.clock, self.start = clock, clock()

    def block(self, order: Sequence[str]) -> None:
        """Let every arm have its turn."""
        for name in order:
            try:
                turn = self.turn(name, self.block_s)
            except ArmEnded as error:
                self._out(name, error)
                continue
            self.measured.turns[name].append(_thin(turn))
            self.times[name].append(turn.per_sample_ms)
        self.measured.blocks += 1

    def after_block(self) -> str:
        """Why it is enough, or ""."""
        measured, rule = self.measured, self.rule
        measured.seconds = self.clock() - self.start
        spent = measured.seconds >= rule.budget_s
        if not self._comparable():
            return self._without_ratios(spent)
        if spent and measured.blocks < self.least:
            self.too_small = True
        over = spent and measured.blocks >= self.least
        last = over or measured.blocks >= max(rule.looks)
        if (last or measured.blocks in rule.looks) and self._look(last) and not self.too_small:
            which = "every ratio of the arms that are left" if measured.ended else "every ratio"
            return f"{which} is known to within {100 * rule.target_half_width:g} %"
        if over and self.too_small:
            return (
                f"the budget of {rule.budget_s:g} s was too small for the {self.least} blocks that "
                f"an interval takes: they took {measured.seconds:.1f} s"
            )
        if over:
            return f"the budget of {rule.budget_s:g} s is spent"
        return f"all {measured.blocks} blocks of the plan are made" if last else ""

    def shown(self) -> dict[str, Estimate]:
        """What a display may show of arms that are in it: no interval that no look has paid for."""
        known = self.measured.estimates
        return {
            name: known.get(name) or Estimate(ratio, math.nan, math.nan)
            for name, ratio in self._ratios().items()
            if name not in self.measured.ended
        }

    def interrupted(self) -> None:
        """Leave the last look's estimates: a person may have stopped because of the ratios."""
        measured = self.measured
        for name, ratio in self._ratios().items():
            measured.estimates.setdefault(name, Estimate(ratio, 0.0, math.inf))
        for name in self.times:
            measured.alphas.setdefault(name, self._alpha_left(name))

    def _look(self, last: bool) -> bool:
        """Estimate the arms that are still in it; whether all intervals are narrow."""
        measured = self.measured
        alpha = self.spending.look(measured.blocks, 1.0 if last else _SHARE)
        others = [name for name in self.active if name != self.reference]
        found = {name: self._estimate(name, alpha) for name in others}
        measured.estimates |= found
        measured.alphas |= dict.fromkeys(self.active, alpha)
        narrow = [name for name in others if found[name].half_width <= self.rule.target_half_width]
        if self.rule.rest:
            self.active = [name for name in self.active if name not in narrow]
        return len(narrow) == len(others)

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

    def _out(self, name: str, error: ArmEnded) -> None:
        """The arm is no more: all that is left to spend goes to what there is of it."""
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

    def _comparable(self) -> bool:
        return self.reference in self.active and len(self.active) > 1

    def _without_ratios(self, spent: bool) -> str:
        if not self.active:
            return "every arm has ended"
        self.measured.alphas |= {name: self._alpha_left(name) for name in self.active}
        if not spent and self.measured.blocks < min(self.rule.looks):
            return ""
        if self.reference in self.measured.ended:
            return f"the reference, {self.reference}, ended: there are no ratios"
        return f"nothing is left to hold against {self.reference}"


def _thin(turn: Turn) -> Turn:
    """The turn with so many of its steps as are kept, the fastest and the slowest among them."""
    if len(turn.step_ms) <= KEPT_STEPS:
        return turn
    ranks = np.linspace(0, len(turn.step_ms) - 1, KEPT_STEPS).round().astype(int)
    return replace(turn, step_ms=np.sort(turn.step_ms)[ranks].tolist())
