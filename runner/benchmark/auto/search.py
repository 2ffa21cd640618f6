"""The search of `optimization=auto`: rounds of successive halving, then a final against `none`.

What counts is the time of the whole run: setting up and compiling, then its steps. Every round has
`none` and the best so far in it, so a drift of the machine affects all alike. The best are measured
again in a final, by the benchmark's own stopping rule, because the best of many looks better than
it is. Only what the final shows to be faster may be selected.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from runner.benchmark.auto.candidates import NONE, Candidate, first_candidates, neighbours
from runner.benchmark.blocks import INTERRUPTED, ArmEnded, Measured, StoppingRule, run_blocks
from runner.benchmark.statistics import SAME, paired
from runner.benchmark.workers.pool import WorkerPool
from runner.techniques.cost import COLD_S

AGAIN = "none again"
"""The control of the final: what a difference of nothing looks like."""
ALIVE = 6  # processes at a time
SHARE = 0.6  # of the budget; after that nothing new is started
LOOKS = (4, 6, 8, 12)  # numbers of blocks of a round after which the slow ones are dropped
FINAL_LOOKS = (8, 12, 16, 24, 32, 48)
FINALISTS = 2
CLEARLY = 0.95  # of the best one's time, in every block: dropping that takes no interval
COMPILE_FROM_S = 30.0  # a shorter run has no use for a compiler
OVER = 1.5  # times the budget: what was started is ended then
FINAL_S = 6.0  # of the final at least
FINAL_STEPS = 108  # and so many of `none`: twelve blocks, of three steps of it and of its control
PARITY_STEPS = 100  # of the plain run that a parity check takes, all its runs together
WORTH = 10.0  # a parity check may take a tenth of the time that the candidate saves


class Budget:
    """The time of one search, from now on, and estimates of what its parts take."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self.seconds, self.clock, self.began = seconds, clock, clock()
        self.start_s = 0.0  # of a process that compiles nothing
        self.step_s = 0.0  # at `none`
        self.compiling_s = COLD_S

    def left(self) -> float:
        """Seconds left; below 0 once it is overdrawn."""
        return self.seconds - (self.clock() - self.began)

    def until_end(self) -> float:
        """Seconds until what was started is ended."""
        return max(0.0, self.left() + (OVER - 1) * self.seconds)

    def start_estimate(self, one: Candidate) -> float:
        """Seconds until a candidate has made its first steps."""
        return self.start_s + (self.compiling_s if one.compiles else 0.0)

    def parity_estimate(self, one: Candidate) -> float:
        """Seconds that a parity check takes; it compiles the candidate another way."""
        return self.start_estimate(one) + PARITY_STEPS * self.step_s

    def final_estimate(self) -> float:
        """Seconds to reserve for a final with its control, and a parity check."""
        return 2 * self.start_s + FINAL_S + PARITY_STEPS * self.step_s


@dataclass
class Search:
    """A search, and its state."""

    candidates: Sequence[Candidate]
    workers: WorkerPool
    steps: int  # that the run will make
    budget_s: float
    block_s: float
    clock: Callable[[], float]
    told: Callable[[str], None]
    seed: int = 0

    def __post_init__(self) -> None:
        self.budget = Budget(self.budget_s, self.clock)
        self.random = random.Random(self.seed)  # noqa: S311  # the order of turns is no secret
        self.none = Candidate(NONE, [])
        self.alive: list[str] = []
        self.floor = SAME

    def run_rounds(self) -> list[Candidate]:
        """Measure candidates until none or no time is left; the measured ones, best first.

        Raises ArmEnded where not even `none` runs.
        """
        self._start_none()
        queue, best = first_candidates(self.candidates), list[Candidate]()
        while queue := [one for one in queue if one.state == "not tried" and not one.why]:
            started = self._start_some(queue, ALIVE - 1 - len(best))
            if started:
                best = self._run_round([*best, *started])
                for row in best[FINALISTS:]:
                    self.end(row)
                best = best[:FINALISTS]
            if self._is_late():
                break
            around = neighbours(best[0], self.candidates) if best else []
            queue = [*around, *(one for one in queue if one not in around)]
        for row in self.candidates:
            if row.state == "not tried" and not row.why:
                row.why = "no better candidate is next to it"
                if queue or not best:
                    row.why = f"no time left of optimization.auto.budget_s={self.budget_s:g}"
        measured = [row for row in self.candidates if row.round_ratio and row.state != "ended"]
        return sorted(measured, key=self.planned_seconds)

    def run_final(self, rows: Sequence[Candidate]) -> None:
        """Measure these against `none` and its control again, with an interval that holds."""
        end = self.budget.until_end
        running = [row for row in rows if row.name in self.alive or self._start(row, end())]
        self._start_control()
        names = [NONE, *([AGAIN] if AGAIN in self.alive else []), *(row.name for row in running)]
        reserved = max(map(self.budget.parity_estimate, running), default=0.0)
        seconds = max(self.budget.left() - reserved, FINAL_S, FINAL_STEPS * self.budget.step_s)
        rule = StoppingRule(0.02, seconds, FINAL_LOOKS)
        measured = run_blocks(
            self.workers.turn, names, NONE, rule, self.block_s, self.seed, self.clock
        )
        if measured.stopped == INTERRUPTED:
            raise KeyboardInterrupt
        if NONE in measured.ended:
            raise measured.ended[NONE]
        if (control := measured.estimates.get(AGAIN)) is not None:
            self.floor = max(self.floor, control.ratio - 1, 1 / control.ratio - 1)
        turns = measured.turns[NONE]
        self.none.round_ms = [self.none.samples_per_step * t.per_sample_ms for t in turns]
        for row in running:
            if row.name in measured.ended:
                self._note_end(row, measured.ended[row.name])
            else:
                _note_final(row, measured)

    def planned_seconds(self, row: Candidate) -> float:
        """The time of the whole run with it, by `none` in the same round: rounds may differ."""
        return row.extra_seconds + self.none_seconds() / (row.round_ratio or 1e-9)

    def none_seconds(self) -> float:
        """The time of the whole run at `none`."""
        return 1e-3 * median(self.none.round_ms) * self.steps

    def parity_limit(self, row: Candidate) -> float:
        """Seconds that its parity check may take."""
        saved = self.none_seconds() * (1 - 1 / (row.gain or 1.0))
        return max(self.budget.until_end(), saved / WORTH)

    def end(self, row: Candidate) -> None:
        """End its process, where there is one."""
        if row.name in self.alive:
            self.workers.end(row.name)
            self.alive.remove(row.name)

    def end_all(self) -> None:
        """End all that still run."""
        while self.alive:
            self.workers.end(self.alive.pop())

    # -- starting ------------------------------------------------------------------------------

    def _start_none(self) -> None:
        self._start(self.none, None)
        if self.none.state == "ended":
            raise ArmEnded(*self.none.why.split(": ", 1))
        self.budget.start_s = self.none.setup_seconds
        self.budget.step_s = 1e-3 * self.none.round_ms[-1]
        if (seconds := self.none_seconds()) < COMPILE_FROM_S:
            for row in self.candidates:
                if row.compiles:
                    row.why = f"compiling does not pay back in a run of {seconds:.0f} s"

    def _start_some(self, candidates: Sequence[Candidate], most: int) -> list[Candidate]:
        """As many of these as may be alive and there is time for."""
        running: list[Candidate] = []
        reserved = self.budget.final_estimate()
        for row in candidates:
            if len(running) == most or (running and self._is_late()):
                break
            takes = self.budget.start_estimate(row)
            if takes + reserved > self.budget.left():
                row.why = (
                    f"starting it takes about {takes:.0f} s, the final {reserved:.0f} s, and "
                    f"{max(0.0, self.budget.left()):.0f} s are left of "
                    f"optimization.auto.budget_s={self.budget_s:g}"
                )
            elif self._start(row, self.budget.until_end() - reserved):
                running.append(row)
        return running

    def _start(self, row: Candidate, within_s: float | None) -> bool:
        began = self.clock()
        self.told(f"starting {row.name}")
        try:
            ready = self.workers.start(row.name, within_s)
        except ArmEnded as error:
            self._note_end(row, error)
            return False
        self.alive.append(row.name)
        row.state, row.why = "running", ""
        row.samples_per_step = ready.samples_per_step
        row.setup_seconds, row.round_ms = self.clock() - began, [ready.warm_ms]
        row.extra_seconds = max(0.0, row.setup_seconds - self.none.setup_seconds)
        if row.compiles:
            self.budget.compiling_s = row.extra_seconds
        self.told(f"{row.name}: {ready.warm_ms:.3g} ms a step, after {row.setup_seconds:.1f} s")
        return True

    def _start_control(self) -> None:
        control = Candidate(AGAIN, [])
        if AGAIN in self.alive or not self._start(control, self.budget.until_end()):
            return
        # the first process of all also waits for the disk to bring torch: the faster start counts
        self.none.setup_seconds = min(self.none.setup_seconds, control.setup_seconds)
        for row in self.candidates:
            if row.setup_seconds:
                row.extra_seconds = max(0.0, row.setup_seconds - self.none.setup_seconds)

    def _note_end(self, row: Candidate, error: ArmEnded) -> None:
        row.state, row.why = "ended", f"{error.status}: {error.reason}"
        if row.name in self.alive:
            self.alive.remove(row.name)
        self.told(f"{row.name}: {row.why}")

    def _is_late(self) -> bool:
        return self.budget.left() < (1 - SHARE) * self.budget_s

    # -- rounds --------------------------------------------------------------------------------

    def _run_round(self, running: list[Candidate]) -> list[Candidate]:
        """Blocks of turns, slow candidates dropped on the way; the remaining ones, best first."""
        rows = [self.none, *running]
        for row in rows:
            row.round_ms = []
        for block in range(1, LOOKS[-1] + 1):
            self.random.shuffle(rows)
            rows = [row for row in rows if self._take_turn(row)]
            if block in LOOKS:
                self._drop_slow(rows)
                if len(rows) <= 2 or self.budget.left() < self.budget.final_estimate():
                    break
        self.budget.step_s = 1e-3 * median(self.none.round_ms)
        for row in running:
            if row.state != "ended" and row.round_ms:
                pairs = zip(self.none.round_ms, row.round_ms, strict=False)
                row.round_ratio = median(a / b for a, b in pairs)
        return sorted((row for row in rows if row is not self.none), key=self.planned_seconds)

    def _take_turn(self, row: Candidate) -> bool:
        try:
            turn = self.workers.turn(row.name, self.block_s)
        except ArmEnded as error:
            if row is self.none:
                raise
            self._note_end(row, error)
            return False
        row.round_ms.append(row.samples_per_step * turn.per_sample_ms)
        return True

    def _drop_slow(self, rows: list[Candidate]) -> None:
        """Drop candidates with which the run would take longer than with the best one."""
        totals = {
            row.name: [row.extra_seconds + 1e-3 * ms * self.steps for ms in row.round_ms]
            for row in rows
        }
        best = min(rows, key=lambda row: median(totals[row.name]))
        for row in [row for row in rows if row not in (best, self.none)]:
            theirs, ours = totals[best.name], totals[row.name]
            clearly = all(a < CLEARLY * b for a, b in zip(theirs, ours, strict=True))
            if clearly or paired(theirs, ours, 0.05).high < 1:
                times = median(b / a for a, b in zip(theirs, ours, strict=True))
                row.state = "out"
                row.why = f"the run would take {times:.2f} times as long as with {best.name}"
                self.told(f"{row.name}: out: {row.why}, by {len(ours)} blocks")
                rows.remove(row)
                self.end(row)


def _note_final(row: Candidate, measured: Measured) -> None:
    """Its speedup over the faster of the two `none` processes, and an interval that covers both."""
    estimates = [measured.estimates[row.name]]
    if measured.turns.get(AGAIN):
        alpha = min(measured.alphas[AGAIN], measured.alphas[row.name])
        times = [[t.per_sample_ms for t in measured.turns[n]] for n in (AGAIN, row.name)]
        estimates.append(paired(times[0], times[1], alpha))
    least = min(estimates, key=lambda estimate: estimate.ratio)
    row.final_ratio, row.final_blocks = least.ratio, measured.blocks
    row.final_interval = min(e.low for e in estimates), least.high
