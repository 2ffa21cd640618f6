"""Tests of a technique's gain: blocks of training steps with and without it, then a decision.

The steps of each test are planned at the start, so whether a step uses the technique is a function
of the step alone, and the same in a resumed run and a replay. Timings and decisions are in every
checkpoint, and take precedence on resume.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, NamedTuple

from runner.core.errors import CheckpointError
from runner.core.findings import Choice
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import GAIN_TEST_SHARE, Evidence, Switch

log = logging.getLogger("runner")

WARM_UP_STEPS = 5  # steps of a process before the first test
SETTLING_STEPS = 3  # steps before the first block, for a technique that compiles in them
MIN_PAIRS, PAIRS = 6, 10  # of blocks; fewer than six give no 95 % interval
MAX_BLOCK_STEPS = 40  # steps; the first of each is not timed
# (pairs, ratio): a test ends after that many pairs if all are below the ratio
EARLY_STOP_RATIOS = ((1, 0.25), (2, 0.5))
MIN_GAIN = 0.02  # less, with an interval that includes 1, counts as no gain
ALPHA = 0.05
TEST_ORDER = ("channels_last", "amp", "attention", "compile", "whole_step")
"""Order of the tests: compiling ones last, as they capture what the others decide.
Techniques that are not listed follow."""


class GainEstimate(NamedTuple):
    """Result of a test: milliseconds per step, and the speed-up by the technique."""

    with_ms: float
    without_ms: float
    ratio: float
    low: float  # of the 95 % interval
    high: float
    pairs: int

    @property
    def faster(self) -> bool:
        """Whether the technique is faster; within the noise, by more than MIN_GAIN."""
        if self.low <= 1 <= self.high:
            return self.ratio > 1 + MIN_GAIN
        return self.ratio > 1

    @property
    def reason(self) -> str:
        """The verdict with both times, as text."""
        loss = "slower here" if self.ratio < 1 else "no gain here"
        verdict = "faster here" if self.faster else loss
        noise = " (within the noise)" if self.low <= 1 <= self.high else ""
        used, without = f"{self.with_ms:.3g} ms", f"{self.without_ms:.3g} ms"
        return f"{verdict}: {used} against {without} without it{noise}"

    def facts(self) -> dict[str, Any]:
        """Return the figures for the evidence."""
        rounded = {name: float(f"{value:.4g}") for name, value in self._asdict().items()}
        return {
            "measured_ms": rounded["with_ms"],
            "without_ms": rounded["without_ms"],
            "times_as_fast": rounded["ratio"],
            "interval": [rounded["low"], rounded["high"]],
            "pairs": self.pairs,
        }


@dataclass
class GainTest:
    """The steps of a technique's test, and the fastest step of each block so far."""

    name: str
    first: int  # step
    block: int  # steps
    pairs: int  # of blocks: with and without, then without and with, and so on
    settling: int  # steps with the technique before the first block
    fastest: list[float | None] = field(default_factory=list)  # seconds, by block
    used: bool | None = None  # decided at the last step

    def __post_init__(self) -> None:
        if not self.fastest:
            self.fastest = [None] * (2 * self.pairs)

    @property
    def last(self) -> int:
        """The last step of the test."""
        return self.first + self.settling + 2 * self.pairs * self.block - 1

    def block_position(self, step: int) -> tuple[int, int]:
        """Return the block of a step, and the position in it; block -1 outside of all blocks."""
        inside = self.first + self.settling <= step <= self.last
        return divmod(step - self.first - self.settling, self.block) if inside else (-1, 0)

    def uses_technique(self, step: int, initially_on: bool) -> bool:
        """Whether `step` uses the technique; `initially_on` applies before the test."""
        if step < self.first:
            return initially_on
        if step > self.last:
            return self.used is not False
        block, _ = self.block_position(step)
        return block < 0 or block % 4 in (0, 3)

    def record_time(self, step: int, seconds: float) -> None:
        """Record the time of a step, except a block's first, which includes the switch."""
        block, position = self.block_position(step)
        if block >= 0 and position > 0:
            fastest = self.fastest[block]
            self.fastest[block] = seconds if fastest is None else min(fastest, seconds)

    def pair_times(self) -> list[tuple[float, float]]:
        """Return (seconds with, seconds without) per step, by pair of blocks."""
        pairs = zip(self.fastest[::2], self.fastest[1::2], strict=True)
        return [
            (b, a) if i % 2 else (a, b)
            for i, (a, b) in enumerate(pairs)
            if a is not None and b is not None
        ]

    def stop_early(self, step: int) -> None:
        """End the test at `step` if the technique is clearly slower (EARLY_STOP_RATIOS)."""
        block, position = self.block_position(step)
        timed, ratios = block // 2 + 1, [without / used for used, without in self.pair_times()]
        if block % 2 and position == self.block - 1 and timed < self.pairs and len(ratios) == timed:
            if any(timed >= least and max(ratios) < ratio for least, ratio in EARLY_STOP_RATIOS):
                self.pairs, self.fastest = timed, self.fastest[: 2 * timed]
                self.used = False

    def extend(self) -> int:
        """Add a pair of blocks if too few pairs were timed; return the number of added steps."""
        missing = len(self.pair_times()) < MIN_PAIRS and self.used is None
        if not missing or self.pairs >= 2 * MIN_PAIRS:
            return 0
        self.pairs += 1
        self.fastest += [None, None]
        return 2 * self.block

    def estimate(self) -> GainEstimate | None:
        """Return the estimate, or None if too few blocks were timed."""
        pairs = self.pair_times()
        if len(pairs) < MIN_PAIRS and self.used is not False:
            return None
        ratios = sorted(without / used for used, without in pairs)
        rank = max(0, _interval_rank(len(ratios)))
        with_ms, without_ms = (1e3 * median(times) for times in zip(*pairs, strict=True))
        low, high = ratios[rank], ratios[-1 - rank]
        return GainEstimate(with_ms, without_ms, median(ratios), low, high, len(pairs))


def _interval_rank(n: int) -> int:
    """Return the index, from either end of n sorted values, of a 95 % interval of the median."""
    rank, tail = -1, 0.0
    while tail + 2 * math.comb(n, rank + 1) / 2**n <= ALPHA:
        rank += 1
        tail += 2 * math.comb(n, rank) / 2**n
    return rank


class GainTests:
    """The tests of a run, in sequence; nothing is timed before `plan`."""

    def __init__(self, switches: Iterable[Switch], recorded: Sequence[Mapping[str, Any]]) -> None:
        self.switches = {switch.name: switch for switch in switches}
        tests = [_parse_test(row) for row in recorded]
        self.tests = [test for test in tests if test.name in self.switches]
        self.is_timing, self.step_budget = False, 0  # steps that all tests may take
        self.finished = False  # no later step is part of a test

    def plan(self, run: Run) -> None:
        """Plan tests for techniques that have none, and start timing."""
        self.is_timing = True
        order = [*TEST_ORDER, *(name for name in self.switches if name not in TEST_ORDER)]
        new = [name for name in order if name in self.switches and self.find(name) is None]
        step = max([run.progress.step + WARM_UP_STEPS, *(test.last for test in self.tests)]) + 1
        share = self.step_budget // max(1, len(new))
        pairs = PAIRS if share >= SETTLING_STEPS + 2 * PAIRS * 3 else MIN_PAIRS
        block = min(MAX_BLOCK_STEPS, (share - SETTLING_STEPS) // (2 * pairs))
        for name in new:
            settling = 0 if self.switches[name].initially_on else SETTLING_STEPS
            test = GainTest(name, step, block, pairs, settling)
            if block > 1 and test.last < run.total_steps:
                self.tests.append(test)
                step = test.last + 1
        self.finished = False

    def find(self, name: str) -> GainTest | None:
        """Return a technique's test, or None."""
        return next((test for test in self.tests if test.name == name), None)

    def is_rejected(self, name: str) -> bool:
        """Whether the technique was measured and rejected."""
        test = self.find(name)
        return test is not None and test.used is False

    def enter(self, run: Run, step: int) -> None:
        """Switch each technique on or off for `step`."""
        for name, switch in self.switches.items():
            test = self.find(name)
            on = switch.initially_on
            if test is not None:
                on = test.uses_technique(step, on)
            if on is not switch.on:
                switch.set_enabled(run, on)
                switch.on = on
        self.finished = all(step > test.last for test in self.tests)

    def end(self, run: Run, started: float, regular: bool) -> None:
        """Record the time of a `regular` step, decide at a test's end, and switch for the next."""
        step = run.progress.step + 1
        test = next((t for t in self.tests if t.first <= step <= t.last), None)
        if test is not None and self.is_timing:
            seconds = run.device.clock() - started
            if regular and test.name not in run.fallback_reasons:
                test.record_time(step, seconds)
            test.stop_early(step)
            if step == test.last and (added_steps := test.extend()):
                for following in self.tests[self.tests.index(test) + 1 :]:
                    following.first += added_steps
            elif step == test.last:
                estimate = test.estimate()
                test.used = estimate is None or estimate.faster
                if estimate is not None:
                    run.choices.append(make_choice(test, estimate))
                    log.info("optimization.%s: %s", test.name, estimate.reason)
                    if run.gains is not None:
                        row = [estimate.with_ms, estimate.without_ms, estimate.faster]
                        run.gains.store(test.name, row)
        self.enter(run, step + 1)
        if test is not None and self.is_timing and test.used is False and step == test.last:
            if (discard := self.switches[test.name].discard) is not None:
                discard(run)

    def evidence(self, name: str, evidence: Evidence | None) -> Evidence | None:
        """Return the evidence with the figures of the technique's test, once that is decided."""
        test = self.find(name)
        estimate = None if test is None or test.used is None else test.estimate()
        if test is None or estimate is None:
            return evidence
        if not test.used:
            return Evidence(False, estimate.reason, estimate.facts())
        if evidence is None:
            return None
        facts = {**evidence.facts, **estimate.facts()}
        return Evidence(evidence.engaged, evidence.reason, facts)

    def history(self) -> list[dict[str, Any]]:
        """Return all tests as dicts, for the checkpoint."""
        return [asdict(test) for test in self.tests]


def prepare_gain_tests(run: Run, recorded: Sequence[Mapping[str, Any]], enabled: bool) -> None:
    """Create the run's tests, and switch techniques for the next step as recorded."""
    run.gain_tests = tests = GainTests(run.switches, recorded)
    tests.step_budget = int(GAIN_TEST_SHARE * run.total_steps) if enabled else 0
    decided = [(test, test.estimate()) for test in tests.tests if test.used is not None]
    run.choices += [make_choice(test, found) for test, found in decided if found is not None]
    tests.enter(run, run.progress.step + 1)


def _parse_test(row: Mapping[str, Any]) -> GainTest:
    """Parse a test of a checkpoint. Raises CheckpointError."""
    try:
        test = GainTest(**row)
        numbers = (test.first, test.block, test.pairs, test.settling + 1)
        valid = all(type(n) is int and 0 < n < 2**31 for n in numbers)
        valid = valid and len(test.fastest) == 2 * test.pairs
        if valid and all(x is None or type(x) is float for x in test.fastest):
            return test
    except TypeError:
        pass
    raise CheckpointError("the checkpoint's gain tests are corrupt; start a new run")


def make_choice(test: GainTest, estimate: GainEstimate) -> Choice:
    """Return the decision as a choice."""
    return Choice(f"optimization.{test.name}.enabled", bool(test.used), estimate.reason)
