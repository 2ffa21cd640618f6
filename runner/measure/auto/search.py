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

from runner.core.schemas.optimization import Optimization
from runner.core.techniques.cost import COLD_COMPILE_S
from runner.measure.benchmark.arms import Arm
from runner.measure.benchmark.blocks import INTERRUPTED
from runner.measure.benchmark.engine import collect_choices
from runner.measure.benchmark.parity_checker import ParityVerdict
from runner.measure.benchmark.result import NEGLIGIBLE
from runner.measure.benchmark.rounds import MeasureOptions, Round, run_round
from runner.measure.benchmark.statistics import min_blocks

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
FREE_TECHNIQUES = ("system", "fused_optimizer", "pipeline")
"""In every candidate: they cost nothing and change numbers only by rounding."""
COMPILE_TECHNIQUES = frozenset({"compile", "whole_step", "cuda_graphs"})
MAX_CANDIDATES = 16
EQUAL_GAIN_SHARE = 0.98  # of the best gain; candidates above it tie, and the plainest wins
NONE = "none"
CONTROL_ARM = "none again"
"""A second `none` process in the final: its ratio to `none` shows the noise."""
CANDIDATES_PER_ROUND = 4
ROUNDS_SHARE = 0.6  # of the budget; no round starts after that
MAX_OVERRUN = 1.5  # times the budget; a measurement still running then is stopped
ROUND_S, FINAL_S = 10.0, 6.0  # seconds of measuring: maximum of a round, minimum of a final
ROUND_HALF_WIDTH, FINAL_HALF_WIDTH = 0.05, 0.02  # target half-widths of the intervals
FINALISTS, MAX_FINALS = 2, 4  # candidates of a final; finals, at most
MIN_TURN_STEPS = 3  # however slow
MIN_COMPILE_RUN_S = 30.0  # seconds; in shorter runs candidates that compile are not tried
MIN_SAVING_RATIO = 10.0  # time that a candidate saves over the time of its parity check

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
        return not COMPILE_TECHNIQUES.isdisjoint(self.techniques)

    def distance(self, other: Candidate) -> int:
        """Number of techniques that only one of the two has."""
        return len(set(self.techniques) ^ set(other.techniques))

    def run_speedup(self, none_seconds: float, ratio: float) -> float:
        """Return the speedup of the whole run for a step speedup `ratio`, with the extra set-up."""
        share = self.extra_seconds / none_seconds + (1 / ratio if ratio else math.inf)
        return 1 / share if share else math.inf  # an interval of few blocks may be open


def make_candidates(excluded: Collection[str]) -> list[Candidate]:
    """Return at most `MAX_CANDIDATES`, plainest first, without the `excluded` techniques."""
    axes = []
    for settings in AXES.values():
        allowed = [tuple(name for name in setting if name not in excluded) for setting in settings]
        axes.append(list(dict.fromkeys(allowed)))
    while math.prod(map(len, axes)) > MAX_CANDIDATES:
        max(axes, key=len).pop(-2)  # settings in the middle of the longest axis go first
    free = [name for name in FREE_TECHNIQUES if name not in excluded]
    combinations = [sort_techniques([*sum(point, ()), *free]) for point in product(*axes)]
    return [Candidate(" ".join(names), names) for names in combinations if names]


def order_candidates(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sort for the rounds: the plainest, the largest that does not compile, then by size."""
    largest_first = sorted(candidates, key=lambda one: -len(one.techniques))
    uncompiled = [one for one in largest_first if not one.compiles]
    return list(dict.fromkeys([*candidates[:1], *uncompiled[:1], *largest_first]))


def rank_candidates(
    rows: Sequence[Candidate], none_seconds: float, floor: float
) -> list[Candidate]:
    """Return the rows that make the whole run faster than `none` beyond `floor`, best first.

    Of rows within `EQUAL_GAIN_SHARE` of the best gain the plainest comes first. Sets each row's
    `gain`.
    """
    faster = []
    for row in rows:
        if row.final_ratio is None or row.final_interval is None:
            continue
        row.gain = row.run_speedup(none_seconds, row.final_ratio)
        if row.run_speedup(none_seconds, row.final_interval[0]) > 1 and row.gain > 1 + floor:
            faster.append(row)
    faster.sort(key=lambda row: -(row.gain or 0.0))
    limit = EQUAL_GAIN_SHARE * (faster[0].gain or 0.0) if faster else 0.0
    tied = [row for row in faster if (row.gain or 0.0) >= limit]
    plainest_first = sorted(tied, key=lambda row: (row.compiles, len(row.techniques)))
    return plainest_first + faster[len(tied) :]


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
        self.start_time = self.options.clock()
        self.noise_floor = NEGLIGIBLE
        self.start_s, self.compiling_s = 0.0, COLD_COMPILE_S  # to start `none`; extra, to compile

    def run(self) -> SearchResult:
        """Run rounds and finals; select the first finalist that passes parity, else `none`.

        Raises WorkerFailure if `none` itself does not run.
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
            noise_floor=self.noise_floor,
            seconds=self.options.clock() - self.start_time,
            budget_s=self.budget_s,
            tried=list(self.candidates),
        )

    # -- time ----------------------------------------------------------------------------------

    def _remaining_s(self) -> float:
        """Return the seconds left of the budget; negative once it is overdrawn."""
        return self.budget_s - (self.options.clock() - self.start_time)

    def _seconds_until_stop(self) -> float:
        """Return the seconds until measurements are stopped (`MAX_OVERRUN` times the budget)."""
        return max(0.0, self._remaining_s() + (MAX_OVERRUN - 1) * self.budget_s)

    def _seconds_until_final(self) -> float:
        """Return the seconds left for a round to start its arms before the final has to begin."""
        arms = 2 + FINALISTS
        final_s = max(FINAL_S, self._min_measuring_s(arms)) + arms * self.start_s
        return max(0.0, self._remaining_s() - final_s)

    def _min_measuring_s(self, arms: int) -> float:
        """Return the seconds that the fewest blocks with an interval take for `arms` arms."""
        turn_s = max(self.options.settings.block_s, MIN_TURN_STEPS * self.step_s)
        return min_blocks(self.options.alpha) * arms * turn_s

    def _estimate_start_s(self, candidate: Candidate) -> float:
        return self.start_s + (self.compiling_s if candidate.compiles else 0.0)

    def _estimate_run_s(self, row: Candidate) -> float:
        """Return the estimated time of the whole run with it, from its last round."""
        return row.extra_seconds + self.steps * self.step_s / (row.round_ratio or 1e-9)

    # -- rounds --------------------------------------------------------------------------------

    def _run_rounds(self) -> list[Candidate]:
        """Measure candidates while time is left; return the measured ones, best first."""
        seconds = self.steps * self.step_s
        for row in self.candidates:
            if row.compiles and seconds < MIN_COMPILE_RUN_S:
                row.why = f"compiling does not pay back in a run of {seconds:.0f} s"
        queue = [row for row in order_candidates(self.candidates) if not row.why]
        measured: list[Candidate] = []
        while group := self._next_group(queue):
            queue = [row for row in queue if row not in group]
            seconds = min(ROUND_S, max(0.0, self._remaining_s()))
            round_ = self._measure(group, seconds, ROUND_HALF_WIDTH, 1, self._seconds_until_final)
            for row in group:
                if row.state == "measured":
                    row.round_ratio = round_.measurements.estimates[row.name].ratio
                    measured.append(row)
            measured.sort(key=self._estimate_run_s)
            if measured:  # next, the candidates most similar to the best one
                queue.sort(key=measured[0].distance)
        for row in queue:
            row.why = f"no time left of optimization.auto.budget_s={self.budget_s:g}"
        for row in measured[FINALISTS:]:
            factor = self._estimate_run_s(row) / self._estimate_run_s(measured[0])
            row.why = f"the run would take {factor:.2f} times as long as with {measured[0].name}"
            row.state = "out"
        return measured

    def _next_group(self, queue: Sequence[Candidate]) -> list[Candidate]:
        """Return the first candidates of the queue that there is time to start and measure."""
        group: list[Candidate] = []
        rounds_s = self._remaining_s() - (1 - ROUNDS_SHARE) * self.budget_s
        remaining_s = min(rounds_s, self._seconds_until_final()) - self.start_s
        remaining_s -= self._min_measuring_s(1)  # of `none`
        for row in queue[:CANDIDATES_PER_ROUND]:
            needed_s = self._estimate_start_s(row) + self._min_measuring_s(1)
            if remaining_s > needed_s:
                remaining_s -= needed_s
                group.append(row)
        return group

    def _measure(
        self,
        rows: Sequence[Candidate],
        seconds: float,
        half_width: float,
        processes: int,
        start_limit_s: Callable[[], float],
        *extra_arms: str,
    ) -> Round:
        """Measure `none`, `rows` and `extra_arms` in the same blocks, in new processes."""
        settings = replace(self.options.settings, narrow=half_width, processes=processes)
        options = replace(self.options, settings=settings, start_limit_s=start_limit_s)
        arms = [self.arms[name] for name in (NONE, *extra_arms, *(row.name for row in rows))]
        round_ = run_round(arms, NONE, seconds, self.seed, options)
        if round_.measurements.stop_reason == INTERRUPTED:
            raise KeyboardInterrupt
        if NONE in round_.failures:
            raise round_.failures[NONE]
        starts = {name: r.setup_seconds + r.settling_seconds for name, r in round_.setups.items()}
        # the first process also waits for torch to be read from disk, so the faster start is used
        self.start_s = min(starts[name] for name in (NONE, *extra_arms) if name in starts)
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
        """Run up to `MAX_FINALS` finals; return the best finalist that passes parity, or None."""
        for _ in range(MAX_FINALS):
            finalists = _pop_finalists(remaining)
            if not finalists:
                break
            round_ = self._run_final(finalists)
            ranked = rank_candidates(finalists, self.steps * self.step_s, self.noise_floor)
            for row in ranked:
                if self._passes_parity(row, round_):
                    for other in finalists:
                        if other.state == "measured":
                            other.state, other.why = "ran up", f"{row.name} was as good or better"
                    row.state, row.why = "chosen", ""
                    return row
            ended = any(row.state == "ended" for row in finalists)
            if self._remaining_s() < 0 or not (ranked or ended):
                break  # the remaining ones are slower still
        return None

    def _run_final(self, rows: Sequence[Candidate]) -> Round:
        """Measure `rows` against `none` and its control; the worse of both ratios counts.

        It may use all of the budget: parity is checked after it, within `MAX_OVERRUN` times the
        budget.
        """
        starts_s = sum(map(self._estimate_start_s, rows)) + 2 * self.start_s
        seconds = max(FINAL_S, self._remaining_s() - starts_s)
        processes = self.options.settings.processes
        limit_s = self._seconds_until_stop
        round_ = self._measure(rows, seconds, FINAL_HALF_WIDTH, processes, limit_s, CONTROL_ARM)
        if (control := round_.ratio([NONE], [CONTROL_ARM])) is not None:
            self.noise_floor = max(self.noise_floor, control.ratio - 1, 1 / control.ratio - 1)
        for row in rows:
            ratios = [round_.ratio([reference], [row.name]) for reference in (NONE, CONTROL_ARM)]
            estimates = [ratio for ratio in ratios if ratio is not None]
            if row.state == "measured" and estimates:
                slowest = min(estimates, key=lambda estimate: estimate.ratio)
                row.final_ratio, row.final_blocks = slowest.ratio, round_.measurements.blocks
                row.final_processes = slowest.processes
                row.final_interval = min(one.low for one in estimates), slowest.high
                self.options.announce(f"final: {row.name}: {row.final_ratio:.2f}")
        return round_

    def _passes_parity(self, row: Candidate, round_: Round) -> bool:
        """Check numerical parity, within a time limit that depends on how much the row saves."""
        saved_s = self.steps * self.step_s * (1 - 1 / (row.gain or 1.0))
        limit_s = max(self._seconds_until_stop(), saved_s / MIN_SAVING_RATIO)
        self.options.announce(f"{row.name}: checking parity, for {limit_s:.0f} s at most")
        choices = collect_choices(round_.results.get(row.name))
        verdict = self.check_parity(self.arms[row.name], choices, limit_s)
        row.parity, row.parity_reason = verdict.parity, verdict.reason
        self.options.announce(f"{row.name}: parity: {row.parity or 'not known'} ({verdict.reason})")
        if row.parity in (None, "FAIL"):
            wrong = "wrong" if row.parity else "not known"
            row.state, row.why = "out", f"its numbers are {wrong}: {row.parity_reason}"
        return row.state != "out"


def _pop_finalists(remaining: list[Candidate]) -> list[Candidate]:
    """Remove and return the next finalists, in the order in which they start.

    They include the best one that does not compile, since it starts in any time left.
    """
    finalists = remaining[:FINALISTS]
    uncompiled = next((row for row in remaining if not row.compiles), None)
    if uncompiled is not None and uncompiled not in finalists:
        finalists[-1] = uncompiled
    for row in finalists:
        remaining.remove(row)
    return sorted(finalists, key=lambda row: row.compiles)
