"""The search of `optimization=auto`: rounds in groups, then a final against `none`.

Candidates are ranked by the time of the whole run, set-up included. The best are measured again in
a final, because the best of many measurements is biased upwards (winner's curse).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import median
from typing import Any

from runner.benchmark.arms import Arm
from runner.benchmark.blocks import INTERRUPTED
from runner.benchmark.engine import collect_choices
from runner.benchmark.parity_checker import ParityVerdict
from runner.benchmark.result import NEGLIGIBLE
from runner.benchmark.rounds import MeasureOptions, Round, run_round
from runner.benchmark.statistics import min_blocks
from runner.techniques.config import Optimization
from runner.techniques.cost import COLD_S

AXES: dict[str, tuple[tuple[str, ...], ...]] = {
    "precision": ((), ("tf32",), ("amp",), ("tf32", "amp")),
    "graph": (
        (),
        ("compile",),
        ("compile", "whole_step"),
        ("compile", "whole_step", "cuda_graphs"),
    ),
    "layout": ((), ("channels_last",), ("attention",), ("channels_last", "attention")),
}
FREE = ("system", "fused_optimizer", "pipeline")
"""In every candidate: they cost nothing and change numbers only by rounding."""
COMPILING = frozenset({"compile", "whole_step", "cuda_graphs"})
MOST = 16  # candidates
ALIKE = 0.98  # share of the best gain; candidates above it count as equal, and the plainest wins
NONE = "none"
AGAIN = "none again"
"""A second `none` process in the final: its ratio to `none` shows the noise."""
TOGETHER = 4  # candidates per round
SHARE = 0.6  # of the budget; no round starts after that
OVER = 1.5  # times the budget; a measurement still running then is stopped
ROUND_S, FINAL_S = 10.0, 6.0  # seconds of measuring: maximum of a round, minimum of a final
ROUND_NARROW, FINAL_NARROW = 0.05, 0.02  # target half-widths of the intervals
FINALISTS, FINALS = 2, 4  # candidates of a final; finals, at most
TURN_STEPS = 3  # minimum steps of a turn, however slow
COMPILE_FROM_S = 30.0  # seconds; in shorter runs candidates that compile are not tried
WORTH = 10.0  # a parity check may take 1/WORTH of the time that the candidate saves

CheckParity = Callable[[Arm, Mapping[str, Any], float], ParityVerdict]
"""(arm, its automatic choices, time limit in s) → verdict on the arm's numerical parity."""


@dataclass(eq=False)
class Candidate:
    """One combination of techniques and its measurements.

    `state`: not tried, measured, out (`why` says why), ended (its process did), ran up, chosen.
    """

    name: str
    techniques: list[str]  # in order of application
    state: str = "not tried"
    why: str = ""
    extra_seconds: float = 0.0  # to build and compile it, beyond what `none` takes
    round_ratio: float | None = None  # speedup over `none`, in its last round
    final_ratio: float | None = None  # speedup over `none`, in blocks of the final alone
    final_interval: tuple[float, float] | None = None
    final_blocks: int = 0
    final_processes: int = 0  # per arm; with one, the interval omits variance between processes
    gain: float | None = None  # time of the whole run at `none` over its time with the candidate
    parity: str | None = None
    parity_reason: str = ""

    @property
    def compiles(self) -> bool:
        """Whether it has to compile, so that it starts slowly."""
        return not COMPILING.isdisjoint(self.techniques)

    def distance(self, other: Candidate) -> int:
        """Number of techniques that only one of the two has."""
        return len(set(self.techniques) ^ set(other.techniques))

    def over_the_run(self, none_seconds: float, ratio: float) -> float:
        """Return the speedup of the whole run for a step speedup `ratio`, with the extra set-up."""
        share = self.extra_seconds / none_seconds + (1 / ratio if ratio else math.inf)
        return 1 / share if share else math.inf  # an interval of few blocks may be open


def make_candidates(excluded: Collection[str]) -> list[Candidate]:
    """Return at most `MOST` candidates, plainest first, without the `excluded` techniques."""
    axes = []
    for settings in AXES.values():
        able = [tuple(name for name in setting if name not in excluded) for setting in settings]
        axes.append(list(dict.fromkeys(able)))
    while math.prod(map(len, axes)) > MOST:  # settings in the middle of the longest axis go first
        max(axes, key=len).pop(-2)
    free = [name for name in FREE if name not in excluded]
    combinations = [sort_techniques([*sum(one, ()), *free]) for one in product(*axes)]
    return [Candidate(" ".join(names), names) for names in combinations if names]


def order_by_promise(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sort for the rounds: the plainest, the largest that does not compile, then by size."""
    most = sorted(candidates, key=lambda one: -len(one.techniques))
    plain = [one for one in most if not one.compiles]
    return list(dict.fromkeys([*candidates[:1], *plain[:1], *most]))


def rank(rows: Sequence[Candidate], none_seconds: float, floor: float) -> list[Candidate]:
    """Return the rows that make the whole run faster than `none` beyond `floor`, best first.

    Of rows within `ALIKE` of the best gain the plainest comes first. Sets each row's `gain`.
    """
    paying = []
    for row in rows:
        if row.final_ratio is None or row.final_interval is None:
            continue
        row.gain = row.over_the_run(none_seconds, row.final_ratio)
        if row.over_the_run(none_seconds, row.final_interval[0]) > 1 and row.gain > 1 + floor:
            paying.append(row)
    paying.sort(key=lambda row: -(row.gain or 0.0))
    alike = [row for row in paying if (row.gain or 0.0) >= ALIKE * (paying[0].gain or 0.0)]
    plainest_first = sorted(alike, key=lambda row: (row.compiles, len(row.techniques)))
    return plainest_first + paying[len(alike) :]


def sort_techniques(names: Iterable[str]) -> list[str]:
    """Sort technique names by order of application."""
    chosen = set(names)
    return [name for name, _ in Optimization().techniques() if name in chosen]


def enable_techniques(optimization: Optimization, names: Iterable[str]) -> Optimization:
    """Return a copy with these and the pinned techniques on; the level is no longer `auto`."""
    chosen = {*names, *pinned_techniques(optimization)}
    enabled = deepcopy(optimization)
    enabled.level = "custom" if chosen else NONE
    for name, technique in enabled.techniques():
        technique.enabled = name in chosen
    return enabled


def pinned_techniques(optimization: Optimization) -> list[str]:
    """Return the names of the techniques that the config switches on explicitly."""
    return [name for name, technique in optimization.techniques() if technique.enabled]


# -- the search -----------------------------------------------------------------------------------


@dataclass
class SearchResult:
    """A search's selection and all its measurements: `optimization_evidence.json`."""

    chosen: str = NONE
    techniques: list[str] = field(default_factory=list)
    reason: str = ""
    steps: int = 0  # planned
    none_ms: float = 0.0  # a step at `none`, in milliseconds
    noise_floor: float = 0.0
    seconds: float = 0.0
    budget_s: float = 0.0
    tried: list[Candidate] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # excluded techniques, with the reason


@dataclass
class Search:
    """The search and its state."""

    candidates: Sequence[Candidate]
    arms: Mapping[str, Arm]  # by name: the candidates, `none` and its control
    options: MeasureOptions
    check_parity: CheckParity
    steps: int  # of the planned run
    step_s: float  # seconds of a step at `none`
    budget_s: float  # covers starting, compiling, timing and parity checks
    seed: int = 0

    def __post_init__(self) -> None:
        self.began = self.options.clock()
        self.floor = NEGLIGIBLE
        self.start_s, self.compiling_s = 0.0, COLD_S  # to start `none`; extra, to compile

    def run(self) -> SearchResult:
        """Run rounds and finals; select the first finalist that passes parity, else `none`.

        Raises ArmEnded if `none` itself does not run.
        """
        chosen = self._run_finals(self._run_rounds())
        for row in self.candidates:
            if row.state == "measured":
                row.state, row.why = "out", "not shown to be faster than none"
        untried = sum(row.state == "not tried" for row in self.candidates)
        reason = (
            f"no candidate was faster than none beyond noise over {self.steps:,} steps "
            f"({untried} of {len(self.candidates)} candidates were not tried)"
        )
        if chosen is not None:
            low, high = chosen.final_interval or (0.0, 0.0)
            processes = "one process each, so without variation between processes"
            if chosen.final_processes > 1:
                processes = f"{chosen.final_processes} processes of each"
            reason = (
                f"{chosen.final_ratio:.2f} times as fast as none ({low:.2f} to {high:.2f}, "
                f"{chosen.final_blocks} blocks, {processes}), "
                f"{chosen.gain:.2f} times over {self.steps:,} steps "
                f"with {chosen.extra_seconds:.0f} s of set-up; numbers: {chosen.parity}"
            )
        return SearchResult(
            chosen.name if chosen is not None else NONE,
            chosen.techniques if chosen is not None else [],
            reason,
            self.steps,
            none_ms=1e3 * self.step_s,
            noise_floor=self.floor,
            seconds=self.options.clock() - self.began,
            budget_s=self.budget_s,
            tried=list(self.candidates),
        )

    # -- time ----------------------------------------------------------------------------------

    def _left(self) -> float:
        """Return the seconds left of the budget; negative once it is overdrawn."""
        return self.budget_s - (self.options.clock() - self.began)

    def _until_end(self) -> float:
        """Return the seconds until running measurements are stopped (`OVER` times the budget)."""
        return max(0.0, self._left() + (OVER - 1) * self.budget_s)

    def _until_final(self) -> float:
        """Return the seconds left for a round to start its arms before the final has to begin."""
        arms = 2 + FINALISTS
        return max(0.0, self._left() - max(FINAL_S, self._fewest_s(arms)) - arms * self.start_s)

    def _fewest_s(self, arms: int) -> float:
        """Return the seconds that the fewest blocks with an interval take for `arms` arms."""
        turn_s = max(self.options.settings.block_s, TURN_STEPS * self.step_s)
        return min_blocks(self.options.alpha) * arms * turn_s

    def _start_estimate(self, one: Candidate) -> float:
        return self.start_s + (self.compiling_s if one.compiles else 0.0)

    def _run_seconds(self, row: Candidate) -> float:
        """Return the estimated time of the whole run with it, from its last round."""
        return row.extra_seconds + self.steps * self.step_s / (row.round_ratio or 1e-9)

    # -- rounds --------------------------------------------------------------------------------

    def _run_rounds(self) -> list[Candidate]:
        """Measure candidates while time is left; return the measured ones, best first."""
        seconds = self.steps * self.step_s
        for row in self.candidates:
            if row.compiles and seconds < COMPILE_FROM_S:
                row.why = f"compiling does not pay back in a run of {seconds:.0f} s"
        queue = [row for row in order_by_promise(self.candidates) if not row.why]
        measured: list[Candidate] = []
        while group := self._next_group(queue):
            queue = [row for row in queue if row not in group]
            seconds = min(ROUND_S, max(0.0, self._left()))
            round_ = self._measure(group, seconds, ROUND_NARROW, 1, self._until_final)
            for row in group:
                if row.state == "measured":
                    row.round_ratio = round_.measurements.estimates[row.name].ratio
                    measured.append(row)
            measured.sort(key=self._run_seconds)
            if measured:  # next, the candidates most similar to the best one
                queue.sort(key=measured[0].distance)
        for row in queue:
            row.why = f"no time left of optimization.auto.budget_s={self.budget_s:g}"
        for row in measured[FINALISTS:]:
            times = self._run_seconds(row) / self._run_seconds(measured[0])
            row.why = f"the run would take {times:.2f} times as long as with {measured[0].name}"
            row.state = "out"
        return measured

    def _next_group(self, queue: Sequence[Candidate]) -> list[Candidate]:
        """Return the first candidates of the queue that there is time to start and measure."""
        group: list[Candidate] = []
        left = min(self._left() - (1 - SHARE) * self.budget_s, self._until_final()) - self.start_s
        left -= self._fewest_s(1)  # of `none`
        for row in queue[:TOGETHER]:
            takes_s = self._start_estimate(row) + self._fewest_s(1)
            if left > takes_s:
                left -= takes_s
                group.append(row)
        return group

    def _measure(
        self,
        rows: Sequence[Candidate],
        seconds: float,
        narrow: float,
        processes: int,
        start_limit_s: Callable[[], float],
        *more: str,
    ) -> Round:
        """Measure `none`, `rows` and the arms `more` in the same blocks, in new processes."""
        settings = replace(self.options.settings, narrow=narrow, processes=processes)
        options = replace(self.options, settings=settings, start_limit_s=start_limit_s)
        arms = [self.arms[name] for name in (NONE, *more, *(row.name for row in rows))]
        round_ = run_round(arms, NONE, seconds, self.seed, options)
        if round_.measurements.stop_reason == INTERRUPTED:
            raise KeyboardInterrupt
        if NONE in round_.failures:
            raise round_.failures[NONE]
        starts = {name: r.setup_seconds + r.settling_seconds for name, r in round_.setups.items()}
        # the first process also waits for torch to be read from disk, so the faster start is used
        self.start_s = min(starts[name] for name in (NONE, *more) if name in starts)
        if turns := round_.measurements.turns.get(NONE):
            self.step_s = median(turn.median_ms for turn in turns) / 1e3
        for row in rows:
            row.state, row.why = "measured", ""
            if row.name in round_.failures:
                row.state, row.why = "ended", round_.describe_failure(row.name).partition(": ")[2]
            row.extra_seconds = max(0.0, starts.get(row.name, 0.0) - self.start_s)
            if row.compiles and row.name in starts:
                self.compiling_s = row.extra_seconds
        return round_

    # -- finals --------------------------------------------------------------------------------

    def _run_finals(self, remaining: list[Candidate]) -> Candidate | None:
        """Run up to `FINALS` finals; return the best finalist that passes parity, or None."""
        for _ in range(FINALS):
            finalists = _take_finalists(remaining)
            if not finalists:
                break
            round_ = self._run_final(finalists)
            ranked = rank(finalists, self.steps * self.step_s, self.floor)
            for row in ranked:
                if self._has_parity(row, round_):
                    for other in finalists:
                        if other.state == "measured":
                            other.state, other.why = "ran up", f"{row.name} was as good or better"
                    row.state, row.why = "chosen", ""
                    return row
            ended = any(row.state == "ended" for row in finalists)
            if self._left() < 0 or not (ranked or ended):
                break  # the remaining ones are slower still
        return None

    def _run_final(self, rows: Sequence[Candidate]) -> Round:
        """Measure `rows` against `none` and its control; the worse of both ratios counts.

        It may use all of the budget: parity is checked after it, within `OVER` times the budget.
        """
        starts_s = sum(map(self._start_estimate, rows)) + 2 * self.start_s
        seconds = max(FINAL_S, self._left() - starts_s)
        processes = self.options.settings.processes
        round_ = self._measure(rows, seconds, FINAL_NARROW, processes, self._until_end, AGAIN)
        if (control := round_.ratio([NONE], [AGAIN])) is not None:
            self.floor = max(self.floor, control.ratio - 1, 1 / control.ratio - 1)
        for row in rows:
            ratios = [round_.ratio([plain], [row.name]) for plain in (NONE, AGAIN)]
            estimates = [ratio for ratio in ratios if ratio is not None]
            if row.state == "measured" and estimates:
                least = min(estimates, key=lambda estimate: estimate.ratio)
                row.final_ratio, row.final_blocks = least.ratio, round_.measurements.blocks
                row.final_processes = least.processes
                row.final_interval = min(one.low for one in estimates), least.high
                self.options.announce(f"final: {row.name}: {row.final_ratio:.2f}")
        return round_

    def _has_parity(self, row: Candidate, round_: Round) -> bool:
        """Check numerical parity, within a time limit that depends on how much the row saves."""
        saved_s = self.steps * self.step_s * (1 - 1 / (row.gain or 1.0))
        limit_s = max(self._until_end(), saved_s / WORTH)
        self.options.announce(f"{row.name}: checking parity, for {limit_s:.0f} s at most")
        choices = collect_choices(round_.results.get(row.name))
        verdict = self.check_parity(self.arms[row.name], choices, limit_s)
        row.parity, row.parity_reason = verdict.parity, verdict.reason
        self.options.announce(f"{row.name}: parity: {row.parity or 'not known'} ({verdict.reason})")
        if row.parity in (None, "FAIL"):
            wrong = "wrong" if row.parity else "not known"
            row.state, row.why = "out", f"its numbers are {wrong}: {row.parity_reason}"
        return row.state != "out"


def _take_finalists(remaining: list[Candidate]) -> list[Candidate]:
    """Remove and return the next finalists, in the order in which they start.

    They include the best one that does not compile, since it starts in any time left.
    """
    finalists = remaining[:FINALISTS]
    plain = next((row for row in remaining if not row.compiles), None)
    if plain is not None and plain not in finalists:
        finalists[-1] = plain
    for row in finalists:
        remaining.remove(row)
    return sorted(finalists, key=lambda row: row.compiles)
