"""What a candidate's numbers are held against: the plain run's, and how far rounding moves them.

The plain run makes some steps; where it was before each of them is where every other run makes
that step from, too. So a step is compared with the same step:

- loss, gradients and buffers with those of the plain run in fp64;
- the update with that of the plain optimizer in fp64, fed with the candidate's own gradients;
- at the end, outputs in evaluation mode, and metrics with those of the candidate's own outputs.

What rounding does to this very model is measured, not assumed: by how far the plain run at the
same precision is from fp64 at the same steps. A candidate may be so many times as far away
(`SAME_ROUNDING`, `OTHER_ORDER`). Roundings fall to either side and stay within that; what is left
out, counted twice or masked wrong goes far beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any

import torch

from runner.build import Components
from runner.config import RunConfig
from runner.data.batch import largest_part
from runner.errors import RunnerError
from runner.parity.candidates import (
    NOWHERE,
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
from runner.parity.distance import (
    KINK,
    Distances,
    Judged,
    Key,
    Kind,
    Tolerance,
    compare_changes,
    compare_evaluations,
    compare_steps,
    judge,
    same,
)
from runner.parity.dropout import (
    DRAWS,
    Draws,
    dropout_sites,
    is_random,
    mean_differs,
    repeat_draws,
    spread_differs,
)
from runner.parity.numerics import ROUNDOFF, Numerics, computing_in, numerics, to_double
from runner.parity.parity import Agreement, Parity, Row
from runner.parity.trajectory import (
    Record,
    Stretch,
    Tensors,
    choose_stretch,
    follow,
    metrics_of,
    updates,
)
from runner.training.run import Run

SAME_ROUNDING = 8.0
"""Times the error of the plain run at the same reduced precision: the same roundings, differently
correlated."""
OTHER_ORDER = 64.0
"""Times the error in fp32, where the order of summation is all there is: n terms one after another
are off by sqrt(n / log2 n) times what a tree of sums is (Higham 1993), 64 for n = 65,536."""
AGAIN = 2  # further seeds with which a small failure has to repeat
INFERRED = 32 * ROUNDOFF[torch.float32]
"""Of the largest gradient: what a moment's last bit makes of one that is inferred, at beta1=0.9."""
METRIC = 1e-4  # relative: what summing over samples in fp32 may change of a metric
COARSE = 0.1  # relative: a fault that is smaller than such a bound is worth a word
DRAWN = (Kind.loss, Kind.grad_norm, Kind.gradient, Kind.buffer)  # what other draws change
PRECISION = ("tf32", "amp")  # techniques that are there to round more


@dataclass
class _Plain:
    """Plain runs at the steps of the trajectory that a candidate is held against."""

    truth: Record
    precise: bool  # in fp64
    own: Record  # at the baseline's precision
    tolerances: dict[Numerics, Tolerance]


@dataclass
class _Made:
    """What a candidate computed, and how."""

    record: Record
    says: Numerics
    techniques: list[str]
    refused: dict[str, str]
    micro_batch: int
    sees_others: bool  # batch statistics: a sample depends on those of its micro-batch

    @property
    def updates_known(self) -> bool:
        """Whether there are gradients to update with, of every step."""
        return not self.record.gradients_hidden or all(s.gradients for s in self.record.steps)


@dataclass
class _Comparison:
    """All tensors of a candidate: judged, at which step they are not bit-equal, and metrics."""

    judged: list[Judged] = field(default_factory=list)
    metrics: list[Row] = field(default_factory=list)
    differing: list[tuple[int, Key]] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        return [*(_row(one) for one in self.judged), *self.metrics]


class ParityReference:
    """The baseline's numbers and how far rounding moves them; measured once for many candidates."""

    def __init__(
        self, baseline: RunConfig, steps: int | None = None, given: Components | None = None
    ) -> None:
        self.baseline, self.asked, self.given = quiet(baseline), steps, given
        self.choices: Mapping[str, Any] = {}
        self.clip_norm: float | None = None  # in place of one that no gradient reaches
        self._plain: dict[tuple[str | None, int | None], _Plain] = {}
        self._random: dict[str | None, bool] = {}
        self._others: dict[int, ParityReference] = {}  # by seed, where one candidate needed them

    def judge(self, config: RunConfig, choices: Mapping[str, Any] | None = None) -> Parity:
        """The verdict on one candidate; `choices` are those that a run of it had made.

        A small failure of gradients has to repeat with other seeds: where one rounding carries an
        activation over its kink, two right computations part; a wrong one is wrong every time.
        """
        found = self.judge_once(config, choices)
        off = _by_a_kink(found)
        for seed in range(config.seed + 1, config.seed + 1 + AGAIN) if off else ():
            if seed not in self._others:
                other = seeded(self.baseline, seed)
                self._others[seed] = ParityReference(other, self.asked, self.given)
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
            note = f"passes in {precise.precision}, too"
            return replace(found, notes=[*found.notes, note], not_judged=precise.not_judged)
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
        micro = made.micro_batch if made.sees_others and self._cuts(made) else None
        found = self._compare(made, None, micro)
        if micro is not None:
            found.notes.append(
                f"BatchNorm's statistics are of micro-batches of {micro}, which is another "
                "computation; the baseline is cut the same way"
            )
        if found.verdict is not Agreement.fail or not self._is_random(None):
            return found
        return self._without_chance(config, micro, made, found)

    def _without_chance(
        self, config: RunConfig, micro: int | None, loud: _Made, heard: Parity
    ) -> Parity:
        """The arithmetic with dropout off in both; then dropout by itself."""
        certain = [r for r in heard.rows if not r.within and Kind[r.kind] not in DRAWN]
        if certain:
            return replace(heard, first=min(certain, key=_when))
        found = self._compare(self._make(config, NOWHERE), NOWHERE, micro)
        silent = not self._is_random(NOWHERE)
        if found.verdict is Agreement.fail and silent:
            return found
        if silent and micro is None and self._cuts(loud):
            parts = self._compare(loud, None, loud.micro_batch)
            if parts.verdict is not Agreement.fail:
                note = f"dropout is that of a plain run in micro-batches of {loud.micro_batch}"
                return replace(found, verdict=Agreement.explained, notes=[*found.notes, note])
        return self._by_draws(config, micro, found if silent else heard, silent)

    def _by_draws(
        self, config: RunConfig, micro: int | None, found: Parity, silent: bool
    ) -> Parity:
        """Dropout by its statistics: one site after another, the others off, and all together."""
        with self._opened(self.baseline) as run:
            sites = dropout_sites(run.model) if silent else []
        anchor = self._measured(NOWHERE if silent else None, micro).truth.steps[0].gradients
        rows: list[Row] = []
        for site in [*(sites if len(sites) > 1 else ()), None]:
            with self._opened(quiet(config), site, self.choices) as run:
                theirs = repeat_draws(run, self.stretch, anchor)
            with self._opened(cut(self.baseline, micro), site) as run:
                ours = repeat_draws(run, self.stretch, anchor)
            rows += _draw_rows(site or "all dropout", ours, theirs, found if silent else None)
        beyond = [row for row in rows if not row.within]
        note = f"dropout draws other numbers: compared over {DRAWS} draws"
        if not silent:
            note = f"its random numbers are no dropout's: compared over {DRAWS} draws only"
            found = replace(found, rows=[])
        hidden = "what changes loss and gradients less than many draws of dropout show"
        return replace(
            found,
            verdict=Agreement.fail if beyond else Agreement.explained,
            first=beyond[0] if beyond else None,
            rows=[*found.rows, *rows],
            notes=[*found.notes, note],
            not_judged=[*found.not_judged, hidden],
        )

    def _is_random(self, dropout: str | None) -> bool:
        if dropout not in self._random:
            with self._opened(self.baseline, dropout) as run:
                self._random[dropout] = is_random(run)
        return self._random[dropout]

    @contextmanager
    def _opened(
        self,
        config: RunConfig,
        dropout: str | None = None,
        choices: Mapping[str, Any] | None = None,
    ) -> Iterator[Run]:
        if self.clip_norm is not None:
            config = copy(config)  # not checked again, as a plain run asks for nothing
            config.stability = replace(config.stability, clip_norm=self.clip_norm)
        with opened(config, dropout, fresh(self.given, choices)) as run:
            yield run

    def _make(self, config: RunConfig, dropout: str | None = None) -> _Made:
        """Follow the candidate; closed before anything else runs, so that no switch of it stays."""
        path = self.path
        with eager_draws(), self._opened(quiet(config), dropout, self.choices) as run:
            record = follow(run, self.stretch, path, validation=self.validation)
            return _Made(
                record=record,
                says=numerics(run),
                techniques=[name for name, _ in run.techniques if name not in run.fallen],
                refused={e.name: e.reason for e in run.engagements if e.requested} | run.fallen,
                micro_batch=run.micro_batch,
                sees_others=batch_statistics(run),
            )

    def _cuts(self, made: _Made) -> bool:
        """Whether the candidate's micro-batches are not the baseline's."""
        training = self.baseline.training
        usual = largest_part(training.batch_size, training.micro_batch or training.batch_size)
        return made.micro_batch != usual

    # -- measuring -----------------------------------------------------------------------------

    @cached_property
    def _chosen(self) -> tuple[Stretch, list[str]]:
        with self._opened(self.baseline) as run:
            return choose_stretch(run, self.asked)

    @property
    def stretch(self) -> Stretch:
        """The steps that are compared."""
        return self._chosen[0]

    @cached_property
    def path(self) -> Record:
        """The steps of the baseline; some are clipped, where it has a norm to clip by."""
        record = self._follow_baseline()
        norms, limit = [float(s.grad_norm) for s in record.steps], self.baseline.stability.clip_norm
        if limit is not None and 0 < max(norms) <= limit:
            self.clip_norm = median(norms)
            record = self._follow_baseline()
        return record

    def _follow_baseline(self) -> Record:
        with self._opened(self.baseline) as run:
            self.says = numerics(run)
            record = follow(run, self.stretch)
            self.validation, whole = len(record.evaluation.outputs), run.validation.steps_per_epoch
        self.left_out = [f"validation batches after the first {self.validation}"]
        if self.validation == whole:
            self.left_out.clear()
        return record

    @cached_property
    def noise(self) -> float:
        """Largest relative difference between two runs of the baseline."""
        again = replace(self.stretch, steps=min(2, self.stretch.steps))
        with self._opened(self.baseline) as run:
            record = follow(run, again, self.path, validation=1)
        found = compare_steps(record.steps, self.path.steps[: again.steps], self._buffers()[:2])
        pairs = ((key, i) for key, errors in found.error.items() for i in range(len(errors)))
        return max(
            found.error[key][i] / found.size[key][i] for key, i in pairs if found.size[key][i]
        )

    def _buffers(self) -> list[Tensors]:
        return [self.path.before(number).buffers for number in range(self.stretch.steps)]

    def _distances(self, record: Record, truth: Record) -> Distances:
        found = compare_steps(record.steps, truth.steps, self._buffers())
        outputs = compare_evaluations(record.evaluation, truth.evaluation)
        for ours, theirs in zip(vars(found).values(), vars(outputs).values(), strict=True):
            ours.update(theirs)
        return found

    def _follow(
        self, config: RunConfig, dropout: str | None, says: Numerics | None = None, ulps: int = 0
    ) -> Record:
        """A plain run at the steps of the trajectory."""
        with ExitStack() as stack:
            run = stack.enter_context(self._opened(config, dropout))
            if says is not None:
                stack.enter_context(computing_in(says, run))
            return follow(
                run, self.stretch, self.path,
                update=False, ulps=ulps, validation=self.validation,
            )  # fmt: skip

    def _measured(self, dropout: str | None, micro: int | None) -> _Plain:
        key = dropout, micro
        if key not in self._plain:
            self._plain[key] = self._measure(dropout, micro)
        return self._plain[key]

    def _measure(self, dropout: str | None, micro: int | None) -> _Plain:
        usual = cut(self.baseline, micro)
        plain = without_techniques(usual)
        own, _ = self.path, self.noise
        if dropout is not None or micro is not None:
            own = self._follow(usual, dropout)
        truth = self._truth(plain, dropout)
        if truth is not None:
            errors = self._distances(own, truth)
            loss = Key(Kind.loss, "loss")
            apart = sorted(
                e / s for e, s in zip(errors.error[loss], errors.size[loss], strict=True) if s
            )
            if apart and apart[len(apart) // 2] > KINK:
                truth = None  # there dropout draws other numbers in fp64
        if truth is None:
            errors = self._distances(self._follow(plain, dropout, self.says, ulps=1), own)
        tolerances = {self.says: Tolerance(errors, OTHER_ORDER)}
        if truth is not None:
            for ours, right in zip(own.steps, truth.steps, strict=True):
                ours.gradients = {}  # nobody needs them again, and they are large
                right.gradients = {n: g.float() for n, g in right.gradients.items()}
        return _Plain(truth or own, truth is not None, own, tolerances)

    def _truth(self, plain: RunConfig, dropout: str | None) -> Record | None:
        """The plain run in fp64; None where the device or the model cannot compute in it."""
        with self._opened(plain, dropout) as run:
            if run.device.kind == "mps":
                return None
            to_double(run)
            try:
                return follow(
                    run, self.stretch, self.path,
                    update=False, in_double=True, validation=self.validation,
                )  # fmt: skip
            except (RunnerError, RuntimeError, TypeError, ValueError):  # a type is in the model
                return None

    def _tolerance(
        self, plain: _Plain, dropout: str | None, micro: int | None, wanted: Numerics
    ) -> Tolerance:
        """How far from the truth rounding may bring a run that computes in `wanted`."""
        for known, tolerance in plain.tolerances.items():
            if known.is_that_of(wanted):
                return tolerance
        record = self._follow(without_techniques(cut(self.baseline, micro)), dropout, wanted)
        tolerance = Tolerance(self._distances(record, plain.truth), SAME_ROUNDING)
        tolerance.widen(next(iter(plain.tolerances.values())))
        plain.tolerances[wanted] = tolerance
        return tolerance

    # -- comparing -----------------------------------------------------------------------------

    def _compare(self, made: _Made, dropout: str | None, micro: int | None) -> Parity:
        plain = self._measured(dropout, micro)
        tolerance = self._tolerance(plain, dropout, micro, made.says)
        found, seen = self._distances(made.record, plain.truth), _Comparison()
        self._compare_start(made, found)
        if made.record.gradients_hidden:
            for key in [key for key in found.floor if key.kind is Kind.gradient]:
                least = INFERRED * max(found.size[key])
                found.floor[key] = [max(least, floor) for floor in found.floor[key]]
        seen.judged += judge(found, tolerance)
        self._compare_bits(made, plain, seen)
        self._compare_updates(made, plain, seen)
        rows = seen.rows
        beyond = sorted((r for r in rows if not r.within), key=_when)
        first = next(iter(beyond), None)
        if first is None and seen.differing:
            step, key = min(seen.differing)
            first = next(replace(_row(one), step=step) for one in seen.judged if one.key == key)
        verdict = Agreement.explained if seen.differing else Agreement.exact
        return Parity(
            verdict=Agreement.fail if beyond else verdict,
            techniques=made.techniques,
            refused=made.refused,
            precision=made.says.name,
            reference="fp64" if plain.precise else "the baseline itself",
            steps=self.stretch.steps,
            noise=self.noise,
            first=first,
            rows=rows,
            notes=[*self._clipped(), *_notes(seen)],
            not_judged=[*self._chosen[1], *self.left_out, *_not_judged(made, seen)],
        )

    def _clipped(self) -> Iterator[str]:
        if self.clip_norm is not None:
            limit = self.baseline.stability.clip_norm
            yield (
                f"clipped at {self.clip_norm:.2g}, the median norm: no gradient of these steps "
                f"is above stability.clip_norm={limit:g}"
            )

    def _compare_start(self, made: _Made, found: Distances) -> None:
        """The first weights and buffers: those of the baseline, to the bit."""
        ours, theirs = made.record.start, self.path.start
        for mine, right in ((ours.parameters, theirs.parameters), (ours.buffers, theirs.buffers)):
            for name, value in right.items():
                if name in mine:
                    found.add(Key(Kind.parameter, name), mine[name], value, floor=0.0)

    def _compare_bits(self, made: _Made, plain: _Plain, seen: _Comparison) -> None:
        """Against the plain run at the baseline's precision."""
        pairs = zip(made.record.steps, plain.own.steps, strict=True)
        for number, (ours, theirs) in enumerate(pairs, 1):
            values = {
                Key(Kind.loss, "loss"): (ours.loss, theirs.loss),
                Key(Kind.grad_norm, "grad_norm"): (ours.grad_norm, theirs.grad_norm),
            }
            for name, right in theirs.after.buffers.items():
                values[Key(Kind.buffer, name)] = (ours.after.buffers.get(name), right)  # type: ignore[assignment]
            seen.differing += [(number, key) for key, pair in values.items() if not same(*pair)]
        evaluations = compare_evaluations(made.record.evaluation, plain.own.evaluation)
        seen.differing += [
            (self.stretch.steps, key) for key, errors in evaluations.error.items() if any(errors)
        ]

    def _compare_updates(self, made: _Made, plain: _Plain, seen: _Comparison) -> None:
        """What became of weights and averages, and the metrics of the candidate's own outputs."""
        found, own = Distances(), Distances()
        config = without_techniques(self.baseline)
        with self._opened(config) as run, self._opened(config) as precise:
            if run.device.kind != "mps":
                to_double(precise)
            steps = zip(
                made.record.steps,
                updates(run, self.stretch, self.path, made.record),
                updates(precise, self.stretch, self.path, made.record),
                strict=True,
            )
            for number, (step, state, truth) in enumerate(steps):
                start = self.path.before(number).parameters
                first = self.path.start.average
                for kind, values, right, before in (
                    (Kind.update, "parameters", truth.parameters, start),
                    (Kind.average, "average", truth.average, first),
                ):
                    for name, value in right.items():
                        key = Key(kind, name)
                        mine = getattr(step.after, values)[name]
                        theirs = getattr(state, values)[name]
                        compare_changes(found, key, mine, value, before[name])
                        compare_changes(own, key, theirs, value, before[name])
                        if not same(mine, theirs):
                            seen.differing.append((number + 1, key))
            if not made.updates_known:
                found, own = Distances(), Distances()
                seen.differing.append((1, Key(Kind.loss, "loss")))  # not known to be exact
            seen.judged += judge(found, Tolerance(own, SAME_ROUNDING))
            seen.metrics = self._metric_rows(run, made, plain)

    def _metric_rows(self, run: Run, made: _Made, plain: _Plain) -> list[Row]:
        """Metrics against those that the plain objective computes from the same outputs."""
        rows = []
        right = metrics_of(run, made.record.evaluation.outputs)
        usual = metrics_of(run, plain.own.evaluation.outputs)
        ours, own = made.record.evaluation.metrics, plain.own.evaluation.metrics
        for name, value in right.items():
            size = abs(value) or 1.0
            error = _apart(ours.get(name, math.nan), value)
            bound = METRIC * size + OTHER_ORDER * _apart(own.get(name, 0.0), usual.get(name, 0.0))
            rows.append(Row(1, Kind.metric.name, name, error / size, bound / size))
        return rows


def _by_a_kink(found: Parity) -> Row | None:
    """The failure, where one rounding could have made it."""
    first = found.first
    if found.verdict is not Agreement.fail or first is None:
        return None
    kinky = first.kind in (Kind.gradient.name, Kind.grad_norm.name)
    return first if kinky and first.error < KINK else None


def _apart(a: float, b: float) -> float:
    if math.isnan(a) and math.isnan(b):
        return 0.0
    return math.inf if math.isnan(a - b) else abs(a - b)


def _when(row: Row) -> tuple[bool, int, int]:
    """Sorts by the time of what was computed."""
    kind = Kind[row.kind]
    return kind >= Kind.output, 0 if kind is Kind.parameter else row.step, kind


def _row(one: Judged) -> Row:
    return Row(one.step, one.key.kind.name, one.key.name, one.error, one.bound)


def _notes(seen: _Comparison) -> list[str]:
    kinks = max((one.kinks for one in seen.judged), default=0)
    if not kinks:
        return []
    return [f"gradients are off by up to {KINK:.0%} at {kinks} steps, as by an activation's kink"]


def _not_judged(made: _Made, seen: _Comparison) -> Iterator[str]:
    """What a fault could hide in, of this very candidate."""
    coarse = max((j.bound for j in seen.judged if j.key.kind is Kind.gradient), default=0.0)
    if coarse > COARSE:
        yield f"gradients off by less than {coarse:.0%}: that is what rounding changes of one"
    if made.record.gradients_hidden and made.updates_known:
        yield "gradients inside the one graph but through the optimizer's moments"
    if not made.updates_known:
        yield "gradients and updates inside the one graph: no moment of the optimizer tells them"
    if any(name in PRECISION for name in made.techniques) and all(
        name in PRECISION for name in made.techniques
    ):
        names = " and ".join(made.techniques)
        yield f"gradients off by less than {made.says.name} rounds: {names} is judged with itself"


def _draw_rows(site: str, ours: Draws, theirs: Draws, found: Parity | None) -> list[Row]:
    """The mean and the spread of each statistic over many draws."""
    rows = []
    rounded = {row.kind: row.bound for row in found.rows} if found else {}
    for name, a in vars(ours).items():
        b = getattr(theirs, name)
        if not (a and b):
            continue
        size = abs(math.fsum(a) / len(a))
        rounding = rounded.get(name, rounded.get(Kind.grad_norm.name, 0.0))
        size = 1.0 if name == "projection" else size or 1.0
        apart, by_chance = mean_differs(a, b)
        bound = by_chance / size + rounding
        rows.append(Row(1, Kind.draw.name, f"mean of {name} ({site})", apart / size, bound))
        apart, by_chance = spread_differs(a, b)
        row = Row(1, Kind.draw.name, f"log-variance of {name} ({site})", apart, by_chance)
        rows.append(row)
    return rows


def check_parity(
    config: RunConfig, baseline: RunConfig, steps: int | None = None, attribute: bool = False
) -> Parity:
    """Hold the run of `config` against that of `baseline`, each step from the same weights.

    `STEPS` steps, or as many as are affordable with a large model; what `ParityReference.judge`
    says of it. With `attribute` a failure is traced to the technique that causes it.
    """
    reference = ParityReference(baseline, steps)
    found = reference.judge(config)
    if attribute and found.verdict is Agreement.fail:
        return _find_culprits(reference, config, found)
    return found


def _find_culprits(reference: ParityReference, config: RunConfig, found: Parity) -> Parity:
    """Name what fails alone; if nothing does, shrink the set for as long as it fails."""
    names = found.techniques
    if len(names) == 1:
        return replace(found, culprits=names)
    verdicts = {name: reference.judge_once(only(config, [name])).verdict for name in names}
    culprits = [name for name, verdict in verdicts.items() if verdict is Agreement.fail]
    if not culprits:
        culprits = list(names)
        for name in names:
            rest = [n for n in culprits if n != name]
            if rest and reference.judge_once(only(config, rest)).verdict is Agreement.fail:
                culprits = rest
    alone = {name: verdict.value for name, verdict in verdicts.items()}
    return replace(found, culprits=culprits, alone=alone)
