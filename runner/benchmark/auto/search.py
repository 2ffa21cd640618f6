"""The search of `optimization=auto`: rounds of successive halving, then a final against `none`.

What counts is the time of the whole run, set-up included. The best are measured again in a final,
because the best of many looks better than it is.
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
from runner.benchmark.result import SAME
from runner.benchmark.rounds import MeasureOptions, Round, run_round
from runner.benchmark.statistics import fewest_blocks
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
"""Cost nothing and change the numbers by rounding only: every candidate has them."""
COMPILING = frozenset({"compile", "whole_step", "cuda_graphs"})
MOST = 16  # candidates
ALIKE = 0.98  # of the best gain: among these the plainest one is preferred
NONE = "none"
AGAIN = "none again"
"""The control of the final: what a difference of nothing looks like."""
TOGETHER = 4  # candidates of a round
SHARE = 0.6  # of the budget; after that no round is begun
OVER = 1.5  # times the budget: what was started is ended then
ROUND_S, FINAL_S = 10.0, 6.0  # of measuring: a round at most, a final at least
ROUND_NARROW, FINAL_NARROW = 0.05, 0.02  # half-widths of intervals that are precise enough
FINALISTS, FINALS = 2, 4  # a further final where those of the first one compute something else
TURN_STEPS = 3  # that a turn has at least, however long they take
COMPILE_FROM_S = 30.0  # a shorter run has no use for a compiler
WORTH = 10.0  # a parity check may take a tenth of the time that the candidate saves

CheckParity = Callable[[Arm, Mapping[str, Any], float], ParityVerdict]
"""Whether a candidate's numbers are right, by its choices; and the seconds that this may take."""


@dataclass(eq=False)
class Candidate:
    """One combination of techniques, and what is known of it.

    `state`: not tried, measured, out (and why), ended (by itself), ran up, chosen.
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
    final_processes: int = 0  # of each arm; of one, how these differ is not in the interval
    gain: float | None = None  # time of the whole run at `none` over its time with this
    parity: str | None = None
    parity_reason: str = ""

    @property
    def compiles(self) -> bool:
        """Whether it spends time before it saves any."""
        return not COMPILING.isdisjoint(self.techniques)

    def distance(self, other: Candidate) -> int:
        """How many techniques only one of the two has."""
        return len(set(self.techniques) ^ set(other.techniques))

    def over_the_run(self, none_seconds: float, ratio: float) -> float:
        """Speedup of the whole run where a step has the speedup `ratio`: set-up is included."""
        share = self.extra_seconds / none_seconds + (1 / ratio if ratio else math.inf)
        return 1 / share if share else math.inf  # an interval of few blocks may be open


def make_candidates(excluded: Collection[str]) -> list[Candidate]:
    """All candidates, the plainest first, without the `excluded` techniques."""
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
    """Where a search begins: what is free, everything but compiling, everything; then the rest."""
    most = sorted(candidates, key=lambda one: -len(one.techniques))
    plain = [one for one in most if not one.compiles]
    return list(dict.fromkeys([*candidates[:1], *plain[:1], *most]))


def rank(rows: Sequence[Candidate], none_seconds: float, floor: float) -> list[Candidate]:
    """Those that make the whole run faster than `none` beyond noise, set-up included; best first.

    Among those as good as the best one the plainest is first.
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
    """In order of application."""
    chosen = set(names)
    return [name for name, _ in Optimization().techniques() if name in chosen]


def enable_techniques(optimization: Optimization, names: Iterable[str]) -> Optimization:
    """The same knobs with these techniques on as well; the level is no longer `auto`."""
    chosen = {*names, *pinned_techniques(optimization)}
    enabled = deepcopy(optimization)
    enabled.level = "custom" if chosen else NONE
    for name, technique in enabled.techniques():
        technique.enabled = name in chosen
    return enabled


def pinned_techniques(optimization: Optimization) -> list[str]:
    """Techniques that are switched on by name."""
    return [name for name, technique in optimization.techniques() if technique.enabled]


# -- the search -----------------------------------------------------------------------------------


@dataclass
class SearchResult:
    """What a search selected, and everything that it measured: `optimization_evidence.json`."""

    chosen: str = NONE
    techniques: list[str] = field(default_factory=list)
    reason: str = ""
    steps: int = 0  # that were planned
    none_ms: float = 0.0  # a step at `none`
    noise_floor: float = 0.0
    seconds: float = 0.0
    budget_s: float = 0.0
    tried: list[Candidate] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # techniques, and why


@dataclass
class Search:
    """A search, and its state."""

    candidates: Sequence[Candidate]
    arms: Mapping[str, Arm]  # of these, of `none` and of its control
    options: MeasureOptions
    check_parity: CheckParity
    steps: int  # that the run will make
    step_s: float  # at `none`
    budget_s: float  # of starting, compiling, timing and parity
    seed: int = 0

    def __post_init__(self) -> None:
        self.began = self.options.clock()
        self.floor = SAME
        self.start_s, self.compiling_s = 0.0, COLD_S  # of `none`; of one that compiles, beyond it

    def run(self) -> SearchResult:
        """Run the rounds and finals, and select the first candidate that may be taken; else `none`.

        Raises ArmEnded where not even `none` runs.
        """
        chosen = self._run_finals(self._run_rounds())
        for row in self.candidates:
            if row.state == "measured":
                row.state, row.why = "out", "not shown to be faster than none"
        untried = sum(row.state == "not tried" for row in self.candidates)
        reason = (
            f"nothing was shown to be faster beyond noise over {self.steps:,} steps "
            f"({untried} of {len(self.candidates)} candidates were not tried)"
        )
        if chosen is not None:
            low, high = chosen.final_interval or (0.0, 0.0)
            processes = "one process of each, so that how processes differ is not in it"
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
        """Seconds left of the budget; below 0 once it is overdrawn."""
        return self.budget_s - (self.options.clock() - self.began)

    def _until_end(self) -> float:
        """Seconds until what was started is ended."""
        return max(0.0, self._left() + (OVER - 1) * self.budget_s)

    def _until_final(self) -> float:
        """Seconds until the final has to begin, for what is started in a round."""
        arms = 2 + FINALISTS
        return max(0.0, self._left() - max(FINAL_S, self._fewest_s(arms)) - arms * self.start_s)

    def _fewest_s(self, arms: int) -> float:
        """Seconds of the blocks without which these arms have no interval."""
        turn_s = max(self.options.settings.block_s, TURN_STEPS * self.step_s)
        return fewest_blocks(self.options.alpha) * arms * turn_s

    def _start_estimate(self, one: Candidate) -> float:
        return self.start_s + (self.compiling_s if one.compiles else 0.0)

    def _run_seconds(self, row: Candidate) -> float:
        """The time of the whole run with it, by its last round."""
        return row.extra_seconds + self.steps * self.step_s / (row.round_ratio or 1e-9)

    # -- rounds --------------------------------------------------------------------------------

    def _run_rounds(self) -> list[Candidate]:
        """Measure candidates until none or no time is left; the measured ones, best first."""
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
                    row.round_ratio = round_.measured.estimates[row.name].ratio
                    measured.append(row)
            measured.sort(key=self._run_seconds)
            if measured:  # next those that are most like the best one
                queue.sort(key=measured[0].distance)
        for row in queue:
            row.why = f"no time left of optimization.auto.budget_s={self.budget_s:g}"
        for row in measured[FINALISTS:]:
            times = self._run_seconds(row) / self._run_seconds(measured[0])
            row.why = f"the run would take {times:.2f} times as long as with {measured[0].name}"
            row.state = "out"
        return measured

    def _next_group(self, queue: Sequence[Candidate]) -> list[Candidate]:
        """The first candidates for whose start there is time."""
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
        """Measure `none`, these and `more` arms in the same blocks, in fresh processes."""
        settings = replace(self.options.settings, narrow=narrow, processes=processes)
        options = replace(self.options, settings=settings, start_limit_s=start_limit_s)
        arms = [self.arms[name] for name in (NONE, *more, *(row.name for row in rows))]
        round_ = run_round(arms, NONE, seconds, self.seed, options)
        if round_.measured.stopped == INTERRUPTED:
            raise KeyboardInterrupt
        if NONE in round_.ended:
            raise round_.ended[NONE]
        starts = {name: r.setup_seconds + r.settling_seconds for name, r in round_.ready.items()}
        # the first process of all also waits for the disk to bring torch: the faster start counts
        self.start_s = min(starts[name] for name in (NONE, *more) if name in starts)
        if turns := round_.measured.turns.get(NONE):
            self.step_s = median(turn.median_ms for turn in turns) / 1e3
        for row in rows:
            row.state, row.why = "measured", ""
            if row.name in round_.ended:
                row.state, row.why = "ended", round_.explain_end(row.name).partition(": ")[2]
            row.extra_seconds = max(0.0, starts.get(row.name, 0.0) - self.start_s)
            if row.compiles and row.name in starts:
                self.compiling_s = row.extra_seconds
        return round_

    # -- finals --------------------------------------------------------------------------------

    def _run_finals(self, remaining: list[Candidate]) -> Candidate | None:
        """The best candidate that may be taken; the next ones follow where the first may not."""
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
        """Measure these against `none` and its control again; what counts is the worse of both.

        It takes all that is left: parity is judged after the budget, within `OVER`.
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
                row.final_ratio, row.final_blocks = least.ratio, round_.measured.blocks
                row.final_processes = least.processes
                row.final_interval = min(one.low for one in estimates), least.high
                self.options.announce(f"final: {row.name}: {row.final_ratio:.2f}")
        return round_

    def _has_parity(self, row: Candidate, round_: Round) -> bool:
        """Check the numbers, for no longer than the candidate is worth."""
        saved_s = self.steps * self.step_s * (1 - 1 / (row.gain or 1.0))
        limit_s = max(self._until_end(), saved_s / WORTH)
        self.options.announce(f"{row.name}: checking parity, for {limit_s:.0f} s at most")
        choices = collect_choices(round_.finished.get(row.name))
        verdict = self.check_parity(self.arms[row.name], choices, limit_s)
        row.parity, row.parity_reason = verdict.parity, verdict.reason
        self.options.announce(f"{row.name}: parity: {row.parity or 'not known'} ({verdict.reason})")
        if row.parity in (None, "FAIL"):
            wrong = "wrong" if row.parity else "not known"
            row.state, row.why = "out", f"its numbers are {wrong}: {row.parity_reason}"
        return row.state != "out"


def _take_finalists(remaining: list[Candidate]) -> list[Candidate]:
    """The next ones; the best that compiles nothing among them, since it starts in any time left.

    They are started in this order.
    """
    finalists = remaining[:FINALISTS]
    plain = next((row for row in remaining if not row.compiles), None)
    if plain is not None and plain not in finalists:
        finalists[-1] = plain
    for row in finalists:
        remaining.remove(row)
    return sorted(finalists, key=lambda row: row.compiles)
