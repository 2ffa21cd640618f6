"""What a candidate's numbers are held against: the plain run's, and how far rounding moves them.

The plain run in fp64 says what is right. What rounding does to this very model is measured, not
assumed: by how far the plain run at the same precision ends up from fp64, and for fp32 also by
the plain run from weights that were moved to a neighbouring number. A candidate may be so many
times as far away (`SAME_ROUNDING`, `OTHER_ORDER`). Roundings fall to either side and stay within
that; what is left out, counted twice or masked wrong goes far beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from runner.batch import largest_part
from runner.build import Given
from runner.config import RunConfig
from runner.errors import RunnerError
from runner.measure import chance
from runner.measure.candidates import (
    batch_statistics,
    cut,
    eager_draws,
    fresh,
    only,
    opened,
    quiet,
    seeded,
    without_techniques,
)
from runner.measure.distance import SCALARS, distances, held, norm, relative, same
from runner.measure.numerics import Numerics, computing_in, nudge, numerics, to_double
from runner.measure.trace import Kind, Spot, Trace, follow
from runner.measure.verdict import Agreement, Parity, Row
from runner.run import Run

SAME_ROUNDING = 8.0
"""Times the error of the plain run at the same reduced precision: the same roundings, differently
correlated."""
AGAIN = 2  # further seeds with which a small failure has to repeat
KINK = 1e-2  # relative: what one activation on the other side of its kink can do
NUDGES = 1, 2, 4, 8  # units in the last place: a ReLU may flip under one and not another
OTHER_ORDER = 64.0
"""Times the error in fp32, where the order of summation is all there is: n terms one after another
are off by sqrt(n / log2 n) times what a tree of sums is (Higham 1993), 64 for n = 65,536."""
STEPS = 6
PRECISION = ("tf32", "amp")  # techniques that are there to round more


def _by_a_kink(found: Parity) -> Row | None:
    """The failure, where one rounding could have made it."""
    first = found.first
    if found.verdict is not Agreement.fail or first is None or first.kind in ("loss", "buffer"):
        return None  # a loss and what a forward keeps are smooth, a gradient is not
    return first if first.error < KINK or first.kind == Kind.parameter.name else None


@dataclass
class _Arms:
    """Runs of the baseline that a candidate is held against."""

    reference: Trace
    precise: bool
    baseline: Trace
    noise: float  # largest relative difference between two runs of the baseline
    allowed: dict[Numerics, dict[Spot, float]]  # distance from the reference, by what computes


@dataclass
class _Made:
    """What a candidate computed, and how."""

    trace: Trace
    says: Numerics
    techniques: list[str]
    refused: dict[str, str]
    micro_batch: int | None  # where samples see each other


class Yardstick:
    """The baseline's numbers and how far rounding moves them; measured once for many candidates."""

    def __init__(self, baseline: RunConfig, steps: int = STEPS, given: Given | None = None) -> None:
        self.baseline, self.steps, self.given = quiet(baseline), steps, given
        self.choices: Mapping[str, Any] = {}
        self._arms: dict[tuple[bool, int | None], _Arms] = {}
        self._others: dict[int, Yardstick] = {}  # by seed, where one candidate needed them

    def judge(self, config: RunConfig, choices: Mapping[str, Any] | None = None) -> Parity:
        """The verdict on one candidate; `choices` are those that a run of it had made.

        A small failure has to repeat with other seeds: where one rounding carries an activation
        over its kink, two right computations part, and that does not happen twice; a wrong one is
        wrong every time. So has one of a weight whose gradient was right: an update that divides by
        the gradient's size, as Adam's first, has its kink where the gradient is 0.
        """
        found = self.judge_once(config, choices)
        off = _by_a_kink(found)
        for seed in range(config.seed + 1, config.seed + 1 + AGAIN) if off else ():
            if seed not in self._others:
                other = seeded(self.baseline, seed)
                self._others[seed] = Yardstick(other, self.steps, self.given)
            again = self._others[seed].judge_once(seeded(config, seed), choices)
            if off and again.verdict is not Agreement.fail:
                was = f"seed={config.seed} was off in {off.name}"
                said = f"{was}, which did not repeat with seed={seed}"
                return replace(again, notes=[*again.notes, said])
        return found

    def judge_once(self, config: RunConfig, choices: Mapping[str, Any] | None = None) -> Parity:
        """The same by the run's own seed alone. One of reduced precision is also run without it."""
        self.choices = choices or {}
        found = self._judge(config)
        rest = [name for name in found.techniques if name not in PRECISION]
        if found.verdict is not Agreement.explained or rest in ([], found.techniques):
            return found
        # a slip smaller than 16-bit rounding shows once that is away
        precise = self._judge(only(config, rest))
        if precise.verdict is not Agreement.fail:
            return found
        without = " and ".join(name for name in found.techniques if name in PRECISION)
        note = f"seen without {without}, in {precise.precision}"
        return replace(
            precise,
            techniques=found.techniques,
            precision=found.precision,
            notes=[*precise.notes, note],
        )

    def _judge(self, config: RunConfig) -> Parity:
        made = self._make(config)
        micro = self._cut_by(made)
        found = self._compare(made, (False, micro))
        if micro is not None:
            found.notes.append(
                f"BatchNorm's statistics are of micro-batches of {micro}, which is another "
                "computation; the baseline is cut the same way"
            )
        if found.verdict is not Agreement.fail or not self._random():
            return found
        return self._without_chance(config, micro, found)

    def _without_chance(self, config: RunConfig, micro: int | None, loud: Parity) -> Parity:
        """The arithmetic with dropout off in both; then dropout by its statistics."""
        found = self._compare(self._make(config, silent=True), (True, micro))
        silent = not self._random(silent=True)
        if found.verdict is Agreement.fail and silent:
            return found
        with self._opened(quiet(config), choices=self.choices) as run:
            theirs = chance.draws(run)
        with self._opened(cut(self.baseline, micro)) as run:
            ours = chance.draws(run)
        rows = _draw_rows(ours, theirs, found if silent else loud)
        beyond = [row for row in rows if not row.within]
        note = f"dropout draws other numbers: compared over {chance.DRAWS} draws"
        if not silent:
            note = f"its random numbers are no dropout's: compared over {chance.DRAWS} draws only"
            found = replace(found, rows=[])
        return replace(
            found,
            verdict=Agreement.fail if beyond else Agreement.explained,
            first=beyond[0] if beyond else found.first,
            rows=[*found.rows, *rows],
            notes=[*loud.notes, note],
        )

    def _random(self, silent: bool = False) -> bool:
        with self._opened(self.baseline, silent) as run:
            return chance.is_random(run)

    @contextmanager
    def _opened(
        self, config: RunConfig, silent: bool = False, choices: Mapping[str, Any] | None = None
    ) -> Iterator[Run]:
        with opened(config, silent, fresh(self.given, choices)) as run:
            yield run

    def _make(self, config: RunConfig, silent: bool = False) -> _Made:
        """Follow the candidate; closed before anything else runs, so that no switch of it stays."""
        with eager_draws(), self._opened(quiet(config), silent, self.choices) as run:
            says, trace = numerics(run), follow(run, self.steps)
            return _Made(
                trace=trace,
                says=says,
                techniques=[name for name, _ in run.techniques if name not in run.fallen],
                refused={e.name: e.reason for e in run.engagements if e.requested} | run.fallen,
                micro_batch=run.micro_batch if batch_statistics(run) else None,
            )

    def _cut_by(self, made: _Made) -> int | None:
        """The candidate's micro-batch, where BatchNorm makes that part of what is computed."""
        training = self.baseline.training
        usual = largest_part(training.batch_size, training.micro_batch or training.batch_size)
        return None if made.micro_batch == usual else made.micro_batch

    # -- measuring -----------------------------------------------------------------------------

    def _measured(self, key: tuple[bool, int | None]) -> _Arms:
        if key not in self._arms:
            self._arms[key] = self._measure(*key)
        return self._arms[key]

    def _measure(self, silent: bool, micro: int | None) -> _Arms:
        usual = cut(self.baseline, micro)
        plain = without_techniques(usual)
        with self._opened(usual, silent) as run:
            says = numerics(run)
            baseline = follow(run, self.steps)
        with self._opened(usual, silent) as run:
            noise = distances(follow(run, self.steps), baseline)
        with self._opened(plain, silent) as run:
            truth = _truth(run, self.steps)
        reference = baseline if truth is None else truth
        own = distances(baseline, reference)
        scale = {s: max(own[s], noise[s]) for s in own}
        for ulps in NUDGES:
            with self._opened(plain, silent) as run, computing_in(says, run):
                nudge(run.model, run.seed + ulps, ulps)
                nudged = distances(follow(run, self.steps), reference)
            scale = {s: max(scale[s], nudged[s]) for s in scale}
        allowed = {s: OTHER_ORDER * scale[s] for s in scale}
        largest = max(relative(noise[s], norm(baseline[s])) for s in baseline)
        return _Arms(reference, truth is not None, baseline, largest, {says: allowed})

    def _allowed(self, arms: _Arms, key: tuple[bool, int | None], wanted: Numerics) -> (
        dict[Spot, float]
    ):  # fmt: skip
        """How far from the truth rounding may bring a run that computes in `wanted`."""
        for known, allowed in arms.allowed.items():
            if known.is_that_of(wanted):
                return allowed
        plain = without_techniques(cut(self.baseline, key[1]))
        with self._opened(plain, key[0]) as run, computing_in(wanted, run):
            errors = distances(follow(run, self.steps), arms.reference)
        full = next(iter(arms.allowed.values()))
        arms.allowed[wanted] = {
            spot: max(full[spot], SAME_ROUNDING * errors[spot]) for spot in full
        }
        return arms.allowed[wanted]

    # -- comparing -----------------------------------------------------------------------------

    def _compare(self, made: _Made, key: tuple[bool, int | None]) -> Parity:
        arms = self._measured(key)
        allowed = self._allowed(arms, key, made.says)
        rows, differing = [], []
        for spot, error, bound, size in held(made.trace, arms.reference, allowed):
            row = _row(spot, error, bound, size)
            rows.append(row)
            if not same(made.trace.get(spot), arms.baseline.get(spot)):
                differing.append(row)
        beyond = [row for row in rows if not row.within]
        verdict = Agreement.explained if differing else Agreement.exact
        if beyond and differing:
            verdict = Agreement.fail
        return Parity(
            verdict=verdict,
            techniques=made.techniques,
            refused=made.refused,
            precision=made.says.name,
            reference="fp64" if arms.precise else "the baseline itself",
            steps=self.steps,
            noise=arms.noise,
            first=next(iter(beyond if verdict is Agreement.fail else differing), None),
            rows=rows,
        )


def _draw_rows(ours: chance.Draws, theirs: chance.Draws, found: Parity) -> list[Row]:
    """The mean and the spread of loss and gradient norm over many draws."""
    rows = []
    for kind in SCALARS:
        a, b = getattr(ours, kind.name), getattr(theirs, kind.name)
        size = abs(math.fsum(a) / len(a))
        rounding = next((row.bound for row in found.rows if row.kind == kind.name), 0.0)
        apart, by_chance = chance.mean_differs(a, b)
        bound = by_chance + rounding * size
        rows.append(_row(Spot(1, Kind.draw, f"mean of {kind.name}"), apart, bound, size))
        apart, by_chance = chance.spread_differs(a, b)
        rows.append(Row(1, Kind.draw.name, f"log-variance of {kind.name}", apart, by_chance))
    return rows


def _truth(run: Run, steps: int) -> Trace | None:
    """The plain run in fp64; None where the device or the model cannot compute in it."""
    if run.device.kind == "mps":
        return None
    to_double(run)
    try:
        return follow(run, steps, in_double=True)
    except (RunnerError, RuntimeError, TypeError, ValueError):  # a type is written into the model
        return None


def _row(spot: Spot, error: float, bound: float, size: float) -> Row:
    """Errors by the tensor's size; of one that is zero in the reference, as they are."""
    size = size if size and math.isfinite(size) else 1.0
    return Row(spot.step, spot.kind.name, spot.name, error / size, bound / size)
