"""Randomised blocks: each block runs every arm once, in random order.

Interim looks come at fixed numbers of blocks and share the 5 % (alpha spending). Within the budget
all arms are launched several times, in new processes, with as many blocks as in the first launch;
looks at the ends of launches share a sixth of the 5 % (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from runner.benchmark.statistics import CONFIDENCE, Estimate, Spending, contrast, fewest_blocks

INTERRUPTED = "interrupted"
SHARE = 1 / 6  # of the alpha left, for each look but the last: enough for one look at 8 blocks
LAUNCH_BLOCKS = 3  # minimum blocks of each launch
FEWEST_LAUNCHES = 3  # two launches have t intervals 13 or more times as wide as their difference
FURTHER = 2 / 3  # of the budget, at most, for launches after the first and their minimum blocks
# 8, 10, 12, 14, 16, 20, 24, 28, 32, 40 … 1024
LOOKS = (*(quarter << double for double in range(1, 8) for quarter in range(4, 8)), 1024)


# -- what an arm's process sends: plain data, pickled through a pipe -------------------------------


@dataclass(frozen=True)
class Ready:
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
    others: float | None = None  # share of the CPUs that other processes used; None: unknown


@dataclass(frozen=True)
class Finished:
    """The results of an arm that finished normally."""

    summary: dict[str, Any]  # summary.json
    losses: list[float]  # of the first steps, warm-up included
    problems: list[str]  # signs that the model does not learn
    metrics: dict[str, Any]  # what `MeasureOptions.metrics` returned
    notes: list[str] = field(default_factory=list)

    def technique(self, name: str) -> dict[str, Any]:
        """Return the summary's row of a technique; a row with only a reason if it has none."""
        rows = self.summary.get("techniques") or []
        return next((row for row in rows if row["name"] == name), {"reason": "not seen"})


class ArmEnded(Exception):
    """An arm's process has ended early: `status` is failed, killed, timeout or oom."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


Relaunch = Callable[[Sequence[str], float], dict[str, ArmEnded]]

# -- the blocks ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoppingRule:
    """When to stop: all intervals are narrow, the budget is spent, or all launches are done.

    The budget is overdrawn only for the `fewest_blocks` (six at 5 %) that an interval requires.
    """

    target_half_width: float  # of every interval, as a share of the ratio
    budget_s: float  # seconds of measuring and of all launches but the first
    processes: int = 1  # launches of each arm, if the budget allows three or more
    restart_s: float = 0.0  # expected seconds of a launch; later, of the last one
    looks: Sequence[int] = LOOKS  # numbers of blocks; 8 is the first with an interval
    alpha: float = 1 - CONFIDENCE  # less where several intervals have to hold jointly


@dataclass
class Measured:
    """The turns of all blocks and the estimates from them.

    A ratio taken afterwards (`contrast`) holds at 95 % with the alpha of the arm in it that has the
    fewest turns, since all arms share the looks.
    """

    turns: dict[str, list[Turn]]  # by arm; the n-th turn is from the n-th block
    estimates: dict[str, Estimate]  # against the reference, of all arms that share a block with it
    ended: dict[str, ArmEnded] = field(default_factory=dict)
    blocks: int = 0  # complete ones
    seconds: float = 0.0
    stopped: str = ""
    alphas: dict[str, float] = field(default_factory=dict)  # by arm: alpha of its last look
    between: dict[str, float] = field(default_factory=dict)  # the same, of the t over launches
    starts: list[int] = field(default_factory=lambda: [0])  # the first block of each launch
    precise: bool = False  # every interval is as narrow as the target

    @property
    def processes(self) -> int:
        """Number of processes per arm behind the intervals, over arms that have not ended."""
        return max((one.processes for one in self.estimates.values()), default=1)


def run_blocks(
    turn: Callable[[str, float], Turn],
    names: Sequence[str],
    reference: str,
    rule: StoppingRule,
    block_s: float,
    seed: int,
    clock: Callable[[], float],
    watch: Callable[[Measured], None] | None = None,
    relaunch: Relaunch | None = None,
) -> Measured:
    """Measure until every interval is narrow or the budget is spent, by `turn(name, seconds)`.

    `relaunch(names, within_s)` restarts the arms in new processes and returns those that failed to
    start; it raises TimeoutError if the time runs out. Without it each arm has one process.

    An arm whose turn raises ArmEnded leaves, keeping its turns; the others continue. Without the
    reference, or with it alone, no ratios are estimated: times are gathered up to the first look.
    Ctrl-C is not raised: the measurements so far are returned with the intervals of the last look
    and `stopped="interrupted"`.

    `watch` receives the measurements so far at every look.
    """
    measured = Measured({name: [] for name in names}, {})
    if relaunch is None:
        relaunch, rule = lambda names, within_s: {}, replace(rule, processes=1)
    state = _Blocks(turn, relaunch, reference, rule, block_s, clock, measured, list(names), watch)
    draw = np.random.default_rng(seed)
    try:
        while not measured.stopped:
            state.block([state.active[i] for i in draw.permutation(len(state.active))])
            measured.stopped = state.after_block()
    except KeyboardInterrupt:
        measured.stopped = INTERRUPTED
        state.interrupted()
    measured.seconds = clock() - state.start
    return measured


@dataclass
class _Blocks:
    """The state of `run_blocks`."""

    turn: Callable[[str, float], Turn]
    relaunch: Relaunch
    reference: str
    rule: StoppingRule
    block_s: float
    clock: Callable[[], float]
    measured: Measured
    active: list[str]  # arms that still take turns
    watch: Callable[[Measured], None] | None

    def __post_init__(self) -> None:
        self.spending = Spending(self.rule.alpha)
        self.least = fewest_blocks(self.rule.alpha)
        self.overdrawn = False  # the budget was too small for any interval
        self.between = self.rule.alpha  # alpha left for looks at the ends of launches
        self.restart_s, self.restarting_s = self.rule.restart_s, 0.0  # of the last launch; of all
        self.looked_at, self.widest = 0, math.inf  # the last look's block, and widest half-width
        self.until = 0.0  # when the launch has used its budget share; 0: first launch
        self.start = self.clock()

    def block(self, order: Sequence[str]) -> None:
        """Run one turn of each arm, in this order."""
        for name in order:
            try:
                turn = self.turn(name, self.block_s)
            except ArmEnded as error:
                self._drop(name, error)
                continue
            self.measured.turns[name].append(turn)
        self.measured.blocks += 1

    def after_block(self) -> str:
        """Return why to stop; "" to continue."""
        measured, rule = self.measured, self.rule
        measured.seconds = self.clock() - self.start
        spent = measured.seconds >= rule.budget_s
        if self.reference not in self.active or len(self.active) < 2:
            return self._without_ratios(spent)
        self.overdrawn |= spent and measured.blocks < self.least
        launches, blocks = len(measured.starts), measured.blocks - measured.starts[-1]
        least = self.least if launches == 1 else LAUNCH_BLOCKS
        over = (spent and blocks >= least) or measured.blocks >= max(rule.looks)
        if not over and not self._ends_launch(blocks):
            return ""
        further = 0 if over else self._further_launches(rule.budget_s - measured.seconds)
        if self.looked_at < measured.blocks or (not further and not self._is_precise()):
            self._look(last=not further)
        if further and (launches == 1 or not self._is_precise()):
            if self._launch():
                return "" if self.active else "every arm ended early"
            self._look(last=True)
        return self._describe_end(spent)

    def _is_precise(self) -> bool:
        return self.widest <= self.rule.target_half_width and not self.overdrawn

    def _describe_end(self, spent: bool) -> str:
        measured, rule = self.measured, self.rule
        measured.precise = self._is_precise()
        if measured.precise:
            left = " of the remaining arms" if measured.ended else ""
            return f"every ratio{left} is known to within {100 * rule.target_half_width:g} %"
        if self.overdrawn:
            return (
                f"the budget of {rule.budget_s:g} s was too small for the {self.least} blocks that "
                f"an interval needs; they took {measured.seconds:.1f} s"
            )
        if spent or len(measured.starts) < rule.processes:
            return f"the budget of {rule.budget_s:g} s is spent"
        if rule.processes > 1:
            return f"all {rule.processes} processes of each arm are measured"
        return f"all {measured.blocks} planned blocks are measured"

    # -- launches --------------------------------------------------------------------------------

    def _ends_launch(self, blocks: int) -> bool:
        """Whether the current launch of `blocks` blocks is complete or has used its budget share.

        The first is complete when narrow enough for its part of the precision; the others match it.
        """
        measured, rule = self.measured, self.rule
        until = self.until
        if len(measured.starts) > 1:
            enough = blocks >= measured.starts[1]
        else:
            further = self._further_launches(FURTHER * rule.budget_s)
            until = self._share(0.0, further) if further else math.inf
            target = rule.target_half_width * math.sqrt(1 + further)
            enough = blocks in rule.looks and self._look(last=False) <= target
        return enough or (measured.seconds >= until and blocks >= LAUNCH_BLOCKS)

    def _further_launches(self, seconds: float) -> int:
        """Return how many more launches fit into `seconds`; 0 if the total would be too small."""
        measured, done = self.measured, len(self.measured.starts)
        each_block_s = (measured.seconds - self.restarting_s) / measured.blocks
        each_s = self.restart_s + LAUNCH_BLOCKS * each_block_s
        wanted = self.rule.processes - done
        further = wanted if each_s * wanted <= seconds else max(0, int(seconds / each_s))
        fewest = min(FEWEST_LAUNCHES, self.rule.processes)
        return further if done > 1 or 1 + further >= fewest else 0

    def _share(self, begun: float, further: int) -> float:
        """Return when a launch begun at `begun` has used its share, with `further` ones to come."""
        left = self.rule.budget_s - begun - further * self.restart_s
        return begun + left / (1 + further)

    def _launch(self) -> bool:
        """Restart all arms; False if that took longer than the budget allows."""
        began = self.clock()
        try:
            ended = self.relaunch(list(self.active), self.rule.budget_s - (began - self.start))
        except TimeoutError:
            return False
        finally:
            self.restart_s = self.clock() - began
            self.restarting_s += self.restart_s
            self.measured.seconds = self.clock() - self.start
        for name, error in ended.items():
            self._drop(name, error)
        self.measured.starts.append(self.measured.blocks)
        self.widest = math.inf
        begun = self.measured.seconds
        further = self._further_launches(self.rule.budget_s - begun)
        self.until = self._share(begun, further)
        return True

    # -- estimates -------------------------------------------------------------------------------

    def interrupted(self) -> None:
        """Complete the estimates after Ctrl-C; those of the last look are kept."""
        for name in self.measured.turns:
            if name not in self.measured.estimates and self._is_comparable(name):
                self.measured.estimates[name] = self._estimate(name)  # a ratio without an interval
            self.measured.alphas.setdefault(name, self._alpha_left(name))
            self.measured.between.setdefault(name, self.between)

    def _look(self, last: bool) -> float:
        """Estimate the ratios of the active arms. Returns the widest half-width."""
        measured = self.measured
        alpha = self.spending.interim_alpha(measured.blocks, 1.0 if last else SHARE)
        between = self.between
        if not last and len(measured.starts) > 1:
            between = self.rule.alpha * SHARE / (self.rule.processes - 2)
            self.between -= between
        measured.alphas |= dict.fromkeys(self.active, alpha)
        measured.between |= dict.fromkeys(self.active, between)
        estimates = {n: self._estimate(n) for n in self.active if n != self.reference}
        measured.estimates |= estimates
        self.looked_at = measured.blocks
        self.widest = max(estimate.half_width for estimate in estimates.values())
        if self.watch is not None:
            self.watch(measured)
        return self.widest

    def _estimate(self, name: str) -> Estimate:
        measured = self.measured
        base, times = (
            [turn.per_sample_ms for turn in measured.turns[n]] for n in (self.reference, name)
        )
        alpha, between = measured.alphas.get(name, 0.0), measured.between.get(name, 0.0)
        return contrast([base], [times], alpha, measured.starts, between)

    def _is_comparable(self, name: str) -> bool:
        """Whether it shares a block with the reference, and the reference has not ended."""
        turns = self.measured.turns
        both = name != self.reference and turns[self.reference] and turns[name]
        return bool(both) and self.reference not in self.measured.ended

    def _drop(self, name: str, error: ArmEnded) -> None:
        """Remove an arm that has ended; estimate its ratio with all the alpha that is left."""
        measured = self.measured
        measured.ended[name] = error
        self.active.remove(name)
        measured.alphas[name], measured.between[name] = self._alpha_left(name), self.between
        if name == self.reference:
            measured.estimates = {}
        elif self._is_comparable(name):
            measured.estimates[name] = self._estimate(name)

    def _alpha_left(self, name: str) -> float:
        return self.spending.last(max(len(self.measured.turns[name]), self.spending.blocks))

    def _without_ratios(self, spent: bool) -> str:
        if not self.active:
            return "every arm ended early"
        self.measured.alphas |= {name: self._alpha_left(name) for name in self.active}
        self.measured.between |= dict.fromkeys(self.active, self.between)
        if not spent and self.measured.blocks < min(self.rule.looks):
            return ""
        if self.reference in self.measured.ended:
            return f"the reference, {self.reference}, ended early: no ratios"
        return f"no arm to compare with {self.reference}"
