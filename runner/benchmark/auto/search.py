"""The search of `optimization=auto`: heats, out of which drops what is shown to be slower.

What counts is how long the whole run would take: what a candidate takes to set up and compile, and
then its steps. Every heat has `none` and the best so far in it, so what drifts hits all alike. What
is left is measured afresh in a final, by the rule that the benchmark stops by: who looks best of
many looks better than it is. Only what the final shows to be faster is chosen, else `none`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from runner.benchmark.auto.budget import Budget
from runner.benchmark.auto.space import NONE, Candidate, Space
from runner.benchmark.auto.team import Team
from runner.benchmark.auto.tried import NO_TIME, Tried
from runner.benchmark.blocks import ArmEnded, Measured, Rule, run_blocks
from runner.benchmark.statistics import SAME, paired

AGAIN = "none again"
"""The control of the final: what a difference of nothing looks like."""
ALIVE = 6  # processes at a time
SHARE = 0.6  # of the budget; after that nothing new is started
LOOKS = (4, 6, 8, 12)  # numbers of blocks of a heat after which the slow ones are dropped
FINAL = Rule(narrow=0.02, budget_s=0.0, looks=(8, 12, 16, 24, 32, 48))
FINALISTS = 2
ROUNDS = 4  # finals, where those who were first turn out to compute something else
CLEARLY = 0.95  # of the best one's speed, in every block: it takes no interval to drop that
COMPILE_FROM_S = 30.0  # a run that is over sooner has no use for a compiler


@dataclass
class Search:
    """A search, and where it stands."""

    space: Space
    team: Team
    steps: int  # that the run will make
    budget_s: float
    block_s: float
    clock: Callable[[], float]
    told: Callable[[str], None]
    seed: int = 0

    def __post_init__(self) -> None:
        self.budget = Budget(self.budget_s, self.clock)
        self.must_pay = True  # False: what fits the memory is taken, however long it took to find
        self.lot = random.Random(self.seed)  # noqa: S311  # the order of turns is no secret
        self.rows = {one.name: Tried(one.name, list(one.techniques)) for one in self.space.all()}
        self.none = Tried(NONE, [])
        self.alive: list[str] = []
        self.floor = SAME

    def heats(self) -> list[Tried]:
        """Measure candidates until there are none, or the time for it is over; best first.

        Raises ArmEnded where not even `none` runs.
        """
        self._start(self.none, must=True)
        self.budget.start_s = self.none.setup_seconds
        self.budget.step_s = 1e-3 * self.none.heat_ms[-1]
        none_seconds = self.budget.step_s * self.steps
        compiling = none_seconds >= COMPILE_FROM_S
        if not compiling:
            self._drop_compiling(f"the whole run takes {none_seconds:.0f} s at none")
        queue = self.space.first(compiling)
        best: list[Tried] = []
        while queue:
            new = self._started(queue, ALIVE - 1 - len(best), best)
            if new:
                best = self._heat([*best, *new])
                for row in best[FINALISTS:]:
                    self._end(row.name)
                best = best[:FINALISTS]
            if self.budget.left() < (1 - SHARE) * self.budget_s:
                break
            queue = self._next(best, queue)
        for row in self.rows.values():
            if row.state == "not tried" and not row.why:
                row.why = NO_TIME if queue or not best else "nothing led there"
        measured = [row for row in self.rows.values() if row.heat_ratio is not None]
        return sorted((row for row in measured if row.state != "ended"), key=self.planned)

    def final(self, rows: Sequence[Tried]) -> None:
        """Measure these and `none` afresh, with an interval that holds."""
        end = self.budget.until_end
        running = [row for row in rows if row.name in self.alive or self._start(row, end())]
        self._start_control()
        names = [NONE, *([AGAIN] if AGAIN in self.alive else []), *(row.name for row in running)]
        judging = max([self.budget.judging(r.techniques, r.compiles) for r in running], default=0.0)
        rule = Rule(
            FINAL.narrow, max(self.budget.left() - judging, self.budget.final_s), FINAL.looks
        )
        measured = run_blocks(
            self.team.turn, names, NONE, rule, self.block_s, self.seed, self.clock
        )
        if measured.stopped == "interrupted":
            raise KeyboardInterrupt
        if NONE in measured.ended:
            raise measured.ended[NONE]
        control = measured.estimates.get(AGAIN)
        if control is not None:
            self.floor = max(self.floor, control.ratio - 1, 1 / control.ratio - 1)
        self.none.heat_ms = [
            self.none.samples_per_step * t.per_sample_ms for t in measured.turns[NONE]
        ]
        for row in running:
            if row.name in measured.ended:
                self._lost(row, measured.ended[row.name])
                continue
            turns = measured.turns[row.name]
            self._judge_speed(row, measured)
            row.data_wait = sum(t.data_seconds for t in turns) / sum(t.seconds for t in turns)

    def _judge_speed(self, row: Tried, measured: Measured) -> None:
        """By the faster of the two processes of `none`, and sure only where it beats both."""
        found = [measured.estimates[row.name]]
        if measured.turns.get(AGAIN):
            alpha = min(measured.alphas[AGAIN], measured.alphas[row.name])
            times = [[t.per_sample_ms for t in measured.turns[n]] for n in (AGAIN, row.name)]
            found.append(paired(times[0], times[1], alpha))
        least = min(found, key=lambda estimate: estimate.ratio)
        row.final_ratio, row.final_blocks = least.ratio, measured.blocks
        row.final_interval = min(e.low for e in found), least.high

    def drop(self, row: Tried) -> None:
        """End its process, where there is one."""
        if row.name in self.alive:
            self._end(row.name)

    def none_seconds(self) -> float:
        """What the whole run takes at `none`."""
        return 1e-3 * median(self.none.heat_ms) * self.steps

    def end(self) -> None:
        """End all that still run."""
        for name in list(self.alive):
            self._end(name)

    # -- starting and ending -------------------------------------------------------------------

    def _started(
        self, candidates: Sequence[Candidate], most: int, best: Sequence[Tried]
    ) -> list[Tried]:
        """As many of these as may be alive; of the others, those for which it is too late."""
        running: list[Tried] = []
        best_s = min([self.none_seconds(), *map(self.planned, best)])
        for one in candidates:
            spent = running and self.budget.left() < (1 - SHARE) * self.budget_s
            if spent or len(running) == most:
                break
            row = self.rows[one.name]
            row.why = self.budget.why_not(
                row.techniques, one.compiles, best_s if self.must_pay else inf
            )
            if not row.why and self._start(row, self.budget.until_end() - self.budget.finishing()):
                running.append(row)
        return running

    def _start(self, row: Tried, within_s: float | None = None, must: bool = False) -> bool:
        began = self.clock()
        if row.compiles:
            self.told(f"{row.name}: compiling, for about {self.budget.compiling_s:.0f} s")
        try:
            ready = self.team.start(row.name, within_s)
        except ArmEnded as error:
            if must:
                raise
            self._lost(row, error)
            return False
        self.alive.append(row.name)
        row.state, row.why = "running", ""
        row.samples_per_step = ready.samples_per_step
        row.setup_seconds, row.first_seconds = self.clock() - began, ready.first_seconds
        row.heat_ms = [ready.warm_ms]
        row.extra_seconds = max(0.0, row.setup_seconds - self.none.setup_seconds)
        if row.compiles:
            self.budget.compiling_s = row.extra_seconds
        self.told(
            f"{row.name}: up and compiled in {row.setup_seconds:.1f} s, then "
            f"{ready.warm_ms:.3g} ms a step"
        )
        return True

    def _start_control(self) -> None:
        if AGAIN in self.alive:
            return
        began = self.clock()
        try:
            self.team.start(AGAIN, self.budget.until_end())
        except ArmEnded as error:
            self.told(f"no control: {error}")
            return
        self.alive.append(AGAIN)
        # the first process of all also waits for the disk to bring torch: the faster start counts
        self.none.setup_seconds = min(self.none.setup_seconds, self.clock() - began)
        for row in self.rows.values():
            if row.setup_seconds:
                row.extra_seconds = max(0.0, row.setup_seconds - self.none.setup_seconds)

    def _end(self, name: str) -> None:
        self.team.end(name)
        self.alive.remove(name)

    def _lost(self, row: Tried, error: ArmEnded) -> None:
        row.state, row.why = "ended", f"{error.status}: {error.reason}"
        if row.name in self.alive:
            self.alive.remove(row.name)
        self.told(f"{row.name}: {row.why}")

    def _drop_compiling(self, why: str) -> None:
        for one in self.space.all():
            if one.compiles:
                self.rows[one.name].why = f"{why}: compiling would not pay back"

    # -- heats ---------------------------------------------------------------------------------

    def _heat(self, running: list[Tried]) -> list[Tried]:
        """Blocks of turns; those that are still in at the end, best first."""
        rows = [self.none, *running]
        for row in rows:
            row.heat_ms = []
        for block in range(1, LOOKS[-1] + 1):
            self.lot.shuffle(rows)
            for row in list(rows):
                if not self._turn(row):
                    rows.remove(row)
            if block in LOOKS:
                for row in self._slower(rows):
                    rows.remove(row)
                    self.drop(row)
                if len(rows) <= 2 or self.budget.left() < self.budget.finishing():
                    break
        self.budget.step_s = 1e-3 * median(self.none.heat_ms)
        still = [row for row in rows if row is not self.none]
        for row in running:
            blocks = min(len(row.heat_ms), len(self.none.heat_ms))
            if row.state != "ended" and blocks:
                ratios = [a / b for a, b in zip(self.none.heat_ms, row.heat_ms, strict=False)]
                row.heat_ratio = median(ratios)
        return sorted(still, key=self.planned)

    def _turn(self, row: Tried) -> bool:
        try:
            turn = self.team.turn(row.name, self.block_s)
        except ArmEnded as error:
            if row is self.none:
                raise
            self._lost(row, error)
            return False
        row.heat_ms.append(row.samples_per_step * turn.per_sample_ms)
        return True

    def _slower(self, rows: Sequence[Tried]) -> list[Tried]:
        """Those with which the run would take longer than with the best one."""
        best = min(rows, key=lambda row: median(self._totals(row)))
        found = []
        for row in rows:
            if row in (best, self.none):
                continue
            theirs, ours = self._totals(best), self._totals(row)
            clearly = all(a < CLEARLY * b for a, b in zip(theirs, ours, strict=True))
            interval = paired(theirs, ours, 0.05)
            if clearly or interval.high < 1:
                times = median(b / a for a, b in zip(theirs, ours, strict=True))
                row.state = "out"
                row.why = (
                    f"the run would take {times:.2f} times as long as with {best.name}, "
                    f"by {len(ours)} blocks"
                )
                self.told(f"{row.name}: out: {row.why}")
                found.append(row)
        return found

    def _totals(self, row: Tried) -> list[float]:
        return [row.extra_seconds + 1e-3 * ms * self.steps for ms in row.heat_ms]

    def planned(self, row: Tried) -> float:
        """The run's time by that of `none` in the same heat: heats may differ in the machine."""
        none = self.none_seconds()
        return row.extra_seconds + none / (row.heat_ratio or 1e-9)

    def _next(self, best: Sequence[Tried], queue: Sequence[Candidate]) -> list[Candidate]:
        """Those around the best one that nobody has tried."""
        names = [row.name for row in best[:1]]
        centre = [one for one in self.space.all() if one.name in names]
        around = [other for one in centre for other in self.space.neighbours(one)]
        return [
            one
            for one in dict.fromkeys([*around, *queue])
            if self.rows[one.name].state == "not tried" and not self.rows[one.name].why
        ]
