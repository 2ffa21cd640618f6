"""The search of `optimization=auto`: successive halving of one space, then a duel with `none`.

Groups of candidates are measured beside `none`, and the best by the time of the whole run again in
a final, as the best of many measurements is biased upwards. The winner's numbers have to be right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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

COMPILE_TECHNIQUES = ("compile", "whole_step", "cuda_graphs")  # each needs the one before
AXES: dict[str, tuple[tuple[str, ...], ...]] = {
    "precision": ((), ("tf32",), ("amp",), ("tf32", "amp")),
    "graph": tuple(COMPILE_TECHNIQUES[:count] for count in range(4)),
    "layout": ((), ("channels_last",), ("attention",), ("channels_last", "attention")),
}
FREE_TECHNIQUES = ("system", "fused_optimizer", "pipeline")
"""In every candidate: they cost nothing and change numbers only by rounding."""
MAX_CANDIDATES = 16
EQUAL_GAIN_SHARE = 0.98  # of the best gain; candidates above it tie, and the plainest wins
NONE = "none"
CONTROL_ARM = "none again"
"""A second `none` process in the final: its ratio to `none` shows the noise."""
CANDIDATES_PER_ROUND, FINALISTS = 4, 2
ROUNDS_SHARE = 0.6  # of the budget; no round starts after that
MAX_OVERRUN = 1.5  # times the budget; a measurement still running then is stopped
ROUND_S, FINAL_S = 10.0, 6.0  # seconds of measuring: maximum of a round, minimum of a final
ROUND_HALF_WIDTH, FINAL_HALF_WIDTH = 0.05, 0.02  # target half-widths of the intervals
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
        return not {*COMPILE_TECHNIQUES}.isdisjoint(self.techniques)

    def run_seconds(self, none_seconds: float, ratio: float) -> float:
        """Return the seconds of the whole run for a step speedup `ratio`, with extra set-up."""
        return self.extra_seconds + (none_seconds / ratio if ratio else math.inf)


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


def sort_techniques(names: Iterable[str]) -> list[str]:
    """Sort technique names by order of application."""
    chosen = set(names)
    return [name for name, _ in Optimization().techniques() if name in chosen]


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
        """Halve the candidates and run the final; the first by rank that passes parity is chosen.

        Raises WorkerFailure if `none` itself does not run.
        """
        finalists = self._run_rounds()
        chosen = self._run_final(finalists) if finalists else None
        for row in self.candidates:
            if row.state == "measured":
                row.state, row.why = "out", "not shown to be faster than none"
        result = SearchResult(
            steps=self.steps,
            none_ms=1e3 * self.step_s,
            noise_floor=self.noise_floor,
            seconds=self.options.clock() - self.start_time,
            budget_s=self.budget_s,
            tried=list(self.candidates),
        )
        if chosen is None:
            untried = sum(row.state == "not tried" for row in self.candidates)
            tried = f"{untried} of {len(self.candidates)} candidates were not tried"
            over = f"over {self.steps:,} steps"
            result.reason = f"no candidate was faster than none beyond noise {over} ({tried})"
            return result
        result.chosen, result.techniques = chosen.name, chosen.techniques
        low, high = chosen.final_interval or (0.0, 0.0)
        result.reason = (
            f"{chosen.final_ratio:.2f} times as fast as none ({low:.2f} to {high:.2f}, "
            f"{chosen.final_blocks} blocks, processes of each: {chosen.final_processes}), "
            f"{chosen.gain:.2f} times over {self.steps:,} steps "
            f"with {chosen.extra_seconds:.0f} s of set-up; numbers: {chosen.parity}"
        )
        return result

    # -- time ----------------------------------------------------------------------------------

    def _remaining_s(self, share: float = 1.0) -> float:
        """Return the seconds left of this share of the budget; negative once it is overdrawn."""
        return share * self.budget_s - (self.options.clock() - self.start_time)

    def _seconds_until_final(self) -> float:
        """Return the seconds left for a round to start its arms before the final has to begin."""
        arms = 3 + FINALISTS  # with `none`, its control, and the best that does not compile
        turn_s = max(self.options.settings.block_s, MIN_TURN_STEPS * self.step_s)
        measuring_s = max(FINAL_S, min_blocks(self.options.alpha) * arms * turn_s)
        return max(0.0, self._remaining_s() - measuring_s - arms * self.start_s)

    # -- rounds and final ----------------------------------------------------------------------

    def _run_rounds(self) -> list[Candidate]:
        """Measure groups of candidates while time is left; return those of the final.

        They are the best `FINALISTS`, and the best one that does not compile: it always starts.
        """
        none_s = self.steps * self.step_s
        for row in self.candidates:
            if row.compiles and none_s < MIN_COMPILE_RUN_S:
                row.why = f"compiling does not pay back in a run of {none_s:.0f} s"
        # the plainest, then the largest first of those that start fast, then of the others
        order = {row.name: (row.compiles, -len(row.techniques)) for row in self.candidates[1:]}
        queue = sorted(self.candidates, key=lambda row: order.get(row.name, (False, -math.inf)))
        queue, measured = [row for row in queue if not row.why], []
        while group := self._next_group(queue):
            queue = [row for row in queue if row not in group]
            round_ = self._measure(group, min(ROUND_S, max(0.0, self._remaining_s())))
            for row in group:
                if row.state == "measured":
                    ratio = row.round_ratio = round_.measurements.estimates[row.name].ratio
                    measured.append((row.run_seconds(self.steps * self.step_s, ratio), row))
        for row in queue:
            row.why = f"no time left of optimization.auto.budget_s={self.budget_s:g}"
        measured.sort(key=lambda pair: pair[0])
        best = [row for _, row in measured[:FINALISTS]]
        plain = [row for _, row in measured if not row.compiles and row not in best][:1]
        for seconds, row in measured:
            if row not in [*best, *plain]:
                factor = seconds / measured[0][0]
                row.why = f"the run would take {factor:.2f} times as long as with {best[0].name}"
                row.state = "out"
        return sorted([*best, *plain], key=lambda row: row.compiles)

    def _next_group(self, queue: Sequence[Candidate]) -> list[Candidate]:
        """Return the first candidates of the queue that there is time to start."""
        seconds = min(self._remaining_s(ROUNDS_SHARE), self._seconds_until_final()) - self.start_s
        group = []
        for row in queue[:CANDIDATES_PER_ROUND]:
            seconds -= self.start_s + self.compiling_s * row.compiles
            if seconds > 0:
                group.append(row)
        return group

    def _measure(self, rows: Sequence[Candidate], seconds: float, final: bool = False) -> Round:
        """Measure `none` and `rows` in the same blocks, in new processes; a final has a control."""
        narrow, processes = ROUND_HALF_WIDTH, 1
        if final:
            narrow, processes = FINAL_HALF_WIDTH, self.options.settings.processes
        settings = replace(self.options.settings, narrow=narrow, processes=processes)

        def limit_s(name: str) -> float | None:
            if name == NONE:
                return None
            if final:
                return max(0.0, self._remaining_s(MAX_OVERRUN))
            return self._seconds_until_final()

        options = replace(self.options, settings=settings, start_limit_s=limit_s)
        names = [NONE, *([CONTROL_ARM] if final else []), *(row.name for row in rows)]
        round_ = run_round([self.arms[name] for name in names], NONE, seconds, self.seed, options)
        if round_.measurements.stop_reason == INTERRUPTED:
            raise KeyboardInterrupt
        if NONE in round_.failures:
            raise round_.failures[NONE]
        starts = {name: r.setup_seconds + r.settling_seconds for name, r in round_.setups.items()}
        # the first process also waits for torch to be read from disk, so the faster start is used
        self.start_s = min(starts[name] for name in (NONE, CONTROL_ARM) if name in starts)
        if turns := round_.measurements.turns.get(NONE):
            self.step_s = median(turn.median_ms for turn in turns) / 1e3
        for row in rows:
            row.state, row.why = "measured", ""
            if failure := round_.failures.get(row.name):
                row.state, row.why = "ended", f"{failure.status}: {failure.reason}"
            row.extra_seconds = max(0.0, starts.get(row.name, 0.0) - self.start_s)
            if row.compiles and row.name in starts:
                self.compiling_s = row.extra_seconds
        return round_

    def _run_final(self, rows: Sequence[Candidate]) -> Candidate | None:
        """Measure `rows` against `none` and its control, of which the worse ratio counts.

        Returns the first by rank that passes parity, checked within `MAX_OVERRUN` times the budget.
        """
        starts_s = (2 + len(rows)) * self.start_s + sum(row.extra_seconds for row in rows)
        round_ = self._measure(rows, max(FINAL_S, self._remaining_s() - starts_s), final=True)
        if (control := round_.ratio([NONE], [CONTROL_ARM])) is not None:
            self.noise_floor = max(self.noise_floor, control.ratio - 1, 1 / control.ratio - 1)
        none_s, faster = self.steps * self.step_s, []
        for row in rows:
            ratios = [round_.ratio([reference], [row.name]) for reference in (NONE, CONTROL_ARM)]
            estimates = [ratio for ratio in ratios if ratio is not None]
            if row.state != "measured" or not estimates:
                continue
            slowest, low = min(estimates, key=lambda x: x.ratio), min(x.low for x in estimates)
            row.final_ratio, row.final_interval = slowest.ratio, (low, slowest.high)
            row.final_blocks, row.final_processes = round_.measurements.blocks, slowest.processes
            row.gain = none_s / row.run_seconds(none_s, slowest.ratio)
            self.options.announce(f"final: {row.name}: {row.final_ratio:.2f}")
            if none_s > row.run_seconds(none_s, low) and row.gain > 1 + self.noise_floor:
                faster.append((row.gain, row))
        limit = EQUAL_GAIN_SHARE * max((gain for gain, _ in faster), default=0.0)
        # of those that tie the plainest is first
        faster.sort(key=lambda x: (-min(x[0], limit), x[1].compiles, len(x[1].techniques)))
        for _, row in faster:
            if self._passes_parity(row, round_):
                for other in rows:
                    if other.state == "measured":
                        other.state, other.why = "ran up", f"{row.name} was as good or better"
                row.state, row.why = "chosen", ""
                return row
        return None

    def _passes_parity(self, row: Candidate, round_: Round) -> bool:
        """Check numerical parity, within a time limit that depends on how much the row saves."""
        saved_s = self.steps * self.step_s * (1 - 1 / (row.gain or 1.0))
        limit_s = max(0.0, self._remaining_s(MAX_OVERRUN), saved_s / MIN_SAVING_RATIO)
        self.options.announce(f"{row.name}: checking parity, for {limit_s:.0f} s at most")
        choices = collect_choices(round_.results.get(row.name))
        verdict = self.check_parity(self.arms[row.name], choices, limit_s)
        row.parity, row.parity_reason = verdict.parity, verdict.reason
        outcome = f"parity: {row.parity or 'not known'} ({row.parity_reason})"
        self.options.announce(f"{row.name}: {outcome}")
        if row.parity in (None, "FAIL"):
            row.state, row.why = "out", outcome
        return row.state != "out"
