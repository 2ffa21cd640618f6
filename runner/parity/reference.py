"""The reference of a parity check: the plain run's numbers, and how far rounding moves them.

The plain run makes some steps; the state before each of them is the state from which every other
run makes that step, too. So a step is compared with the same step:

- loss, gradients and buffers with those of the plain run in fp64;
- the update with that of the plain optimizer in fp64, fed with the candidate's own gradients;
- at the end, outputs in evaluation mode.

What rounding does to this very model is measured, not assumed: by how far the plain run at the
same precision is from fp64 at the same steps. A candidate may be so many times as far away
(`SAME_ROUNDING`, `OTHER_ORDER`). Roundings fall to either side and stay within that; a term that is
left out, counted twice or masked wrong goes far beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, replace
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
    without_techniques,
)
from runner.parity.distance import (
    KINK,
    Distances,
    ErrorKind,
    Judged,
    Key,
    Tolerance,
    compare_changes,
    compare_outputs,
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
from runner.parity.parity import Agreement, Parity, ParityRow
from runner.parity.trajectory import (
    Record,
    Stretch,
    Tensors,
    choose_stretch,
    follow,
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
COARSE = 0.1  # relative: a fault that is smaller than such a bound is worth a sentence
DRAWN = (
    ErrorKind.loss,
    ErrorKind.grad_norm,
    ErrorKind.gradient,
    ErrorKind.buffer,
)  # what other draws change
PRECISION = ("tf32", "amp")  # techniques that are there to round more


@dataclass
class _Plain:
    """Plain runs at the steps of the trajectory that a candidate is held against."""

    truth: Record
    precise: bool  # in fp64
    own: Record  # at the baseline's precision
    tolerances: dict[Numerics, Tolerance]


@dataclass
class _Candidate:
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
        result = self.judge_once(config, choices)
        off = _by_a_kink(result)
        for seed in range(config.seed + 1, config.seed + 1 + AGAIN) if off else ():
            if seed not in self._others:
                other = _with_seed(self.baseline, seed)
                self._others[seed] = ParityReference(other, self.asked, self.given)
            again = self._others[seed].judge_once(_with_seed(config, seed), choices)
            if off and again.verdict is not Agreement.fail:
                was = f"seed={config.seed} was off in {off.name}"
                note = f"{was}, which did not repeat with seed={seed}"
                return replace(again, notes=[*again.notes, note])
        return result

    def judge_once(self, config: RunConfig, choices: Mapping[str, Any] | None = None) -> Parity:
        """The same by the run's own seed alone. One of reduced precision is also run without it."""
        self.choices = choices or {}
        result = self._judge(config)
        rest = [name for name in result.techniques if name not in PRECISION]
        if result.verdict is not Agreement.explained or rest in ([], result.techniques):
            return result
        # a slip smaller than 16-bit rounding shows once that is away
        precise = self._judge(only(config, rest))
        if precise.verdict is not Agreement.fail:
            note = f"passes in {precise.precision}, too"
            return replace(result, notes=[*result.notes, note], not_judged=precise.not_judged)
        without = " and ".join(name for name in result.techniques if name in PRECISION)
        note = f"seen without {without}, in {precise.precision}"
        return replace(
            precise,
            techniques=result.techniques,
            precision=result.precision,
            notes=[*precise.notes, note],
        )

    def _judge(self, config: RunConfig) -> Parity:
        candidate = self._run_candidate(config)
        micro = candidate.micro_batch if candidate.sees_others and self._cuts(candidate) else None
        result = self._compare(candidate, None, micro)
        if micro is not None:
            result.notes.append(
                f"BatchNorm's statistics are of micro-batches of {micro}, which is another "
                "computation; the baseline is cut the same way"
            )
        if result.verdict is not Agreement.fail or not self._is_random(None):
            return result
        return self._judge_without_dropout(config, micro, candidate, result)

    def _judge_without_dropout(
        self, config: RunConfig, micro: int | None, candidate: _Candidate, result: Parity
    ) -> Parity:
        """The arithmetic with dropout off in both; then dropout by itself."""
        certain = [r for r in result.rows if not r.within and ErrorKind[r.kind] not in DRAWN]
        if certain:
            return replace(result, first=min(certain, key=_when))
        silent = self._compare(self._run_candidate(config, NOWHERE), NOWHERE, micro)
        if self._is_random(NOWHERE):  # not by dropout
            return self._judge_draws(config, micro, replace(result, rows=[]), [], None)
        if silent.verdict is Agreement.fail:
            return silent
        if micro is None and self._cuts(candidate):
            parts = self._compare(candidate, None, candidate.micro_batch)
            if parts.verdict is not Agreement.fail:
                size = candidate.micro_batch
                note = f"dropout is that of a plain run in micro-batches of {size}"
                return replace(silent, verdict=Agreement.explained, notes=[*silent.notes, note])
        with self._opened(self.baseline) as run:
            sites = dropout_sites(run.model)
        return self._judge_draws(config, micro, silent, sites, NOWHERE)

    def _judge_draws(
        self,
        config: RunConfig,
        micro: int | None,
        result: Parity,
        sites: list[str],
        dropout: str | None,
    ) -> Parity:
        """Dropout by its statistics: one site after another, the others off, and all together."""
        anchor = self._measured(dropout, micro).truth.steps[0].gradients
        rows: list[ParityRow] = []
        for site in [*(sites if len(sites) > 1 else ()), None]:
            with self._opened(quiet(config), site, self.choices) as run:
                theirs = repeat_draws(run, self.stretch, anchor)
            with self._opened(cut(self.baseline, micro), site) as run:
                ours = repeat_draws(run, self.stretch, anchor)
            rows += _draw_rows(site or "all dropout", ours, theirs, result.rows)
        beyond = [row for row in rows if not row.within]
        hidden = "what changes loss and gradients less than many draws of dropout show"
        return replace(
            result,
            verdict=Agreement.fail if beyond else Agreement.explained,
            first=beyond[0] if beyond else None,
            rows=[*result.rows, *rows],
            notes=[*result.notes, f"it draws other random numbers: compared over {DRAWS} draws"],
            not_judged=[*result.not_judged, hidden],
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

    def _run_candidate(self, config: RunConfig, dropout: str | None = None) -> _Candidate:
        """Follow the candidate; closed before anything else runs, so that no switch of it stays."""
        path = self.path
        with eager_draws(), self._opened(quiet(config), dropout, self.choices) as run:
            record = follow(run, self.stretch, path, validation=self.validation)
            return _Candidate(
                record=record,
                says=numerics(run),
                techniques=[name for name, _ in run.techniques if name not in run.fallen],
                refused={e.name: e.reason for e in run.engagements if e.requested} | run.fallen,
                micro_batch=run.micro_batch,
                sees_others=batch_statistics(run),
            )

    def _cuts(self, candidate: _Candidate) -> bool:
        """Whether the candidate's micro-batches are not the baseline's."""
        training = self.baseline.training
        usual = largest_part(training.batch_size, training.micro_batch or training.batch_size)
        return candidate.micro_batch != usual

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
            self.validation, whole = len(record.outputs), run.validation.steps_per_epoch
        rest = f"validation batches after the first {self.validation}"
        self.left_out = [] if self.validation == whole else [rest]
        return record

    def _distances(self, record: Record, truth: Record) -> Distances:
        buffers = [self.path.before(number).buffers for number in range(self.stretch.steps)]
        distances = compare_steps(record.steps, truth.steps, buffers)
        outputs = compare_outputs(record.outputs, truth.outputs)
        for ours, theirs in zip(vars(distances).values(), vars(outputs).values(), strict=True):
            ours.update(theirs)
        return distances

    def _follow(
        self, config: RunConfig, dropout: str | None, says: Numerics | None = None, ulps: int = 0
    ) -> Record:
        """A plain run at the steps of the trajectory."""
        with ExitStack() as stack:
            run = stack.enter_context(self._opened(config, dropout))
            if says is not None:
                stack.enter_context(computing_in(says, run))
            return follow(
                run, self.stretch, self.path, update=False, ulps=ulps, validation=self.validation
            )

    def _measured(self, dropout: str | None, micro: int | None) -> _Plain:
        key = dropout, micro
        if key not in self._plain:
            self._plain[key] = self._measure(dropout, micro)
        return self._plain[key]

    def _measure(self, dropout: str | None, micro: int | None) -> _Plain:
        usual = cut(self.baseline, micro)
        plain = without_techniques(usual)
        own = self.path
        if dropout is not None or micro is not None:
            own = self._follow(usual, dropout)
        truth = self._truth(plain, dropout)
        if truth is not None:
            errors = self._distances(own, truth)
            key = Key(ErrorKind.loss, "loss")
            apart = [e / s for e, s in zip(errors.error[key], errors.size[key], strict=True) if s]
            if apart and median(apart) > KINK:
                truth = None  # there dropout draws other numbers in fp64
        if truth is None:
            errors = self._distances(self._follow(plain, dropout, self.says, ulps=1), own)
        else:
            for ours, right in zip(own.steps, truth.steps, strict=True):
                ours.gradients = {}  # not needed any more, and large
                right.gradients = {n: g.float() for n, g in right.gradients.items()}
        tolerances = {self.says: Tolerance(errors, OTHER_ORDER)}
        return _Plain(truth or own, truth is not None, own, tolerances)

    def _truth(self, plain: RunConfig, dropout: str | None) -> Record | None:
        """The plain run in fp64; None where the device or the model cannot compute in it."""
        with self._opened(plain, dropout) as run:
            if run.device.kind == "mps":
                return None
            to_double(run)
            try:
                return follow(
                    run,
                    self.stretch,
                    self.path,
                    update=False,
                    in_double=True,
                    validation=self.validation,
                )
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

    def _compare(self, candidate: _Candidate, dropout: str | None, micro: int | None) -> Parity:
        plain = self._measured(dropout, micro)
        tolerance = self._tolerance(plain, dropout, micro, candidate.says)
        distances = self._distances(candidate.record, plain.truth)
        self._compare_start(candidate, distances)
        if candidate.record.gradients_hidden:
            for key in [key for key in distances.floor if key.kind is ErrorKind.gradient]:
                least = INFERRED * max(distances.size[key])
                distances.floor[key] = [max(least, floor) for floor in distances.floor[key]]
        judged = list(judge(distances, tolerance))
        exact = _equal_steps(candidate.record, plain.own) and candidate.updates_known
        config = without_techniques(self.baseline)
        with self._opened(config) as run, self._opened(config) as precise:
            if run.device.kind != "mps":
                to_double(precise)
            of_updates, equal_updates = self._compare_updates(candidate, run, precise)
        judged += of_updates
        rows = [_row(one) for one in judged]
        beyond = sorted((row for row in rows if not row.within), key=_when)
        verdict = Agreement.exact if exact and equal_updates else Agreement.explained
        kinks = max((one.kinks for one in judged), default=0)
        off = f"gradients are off by up to {KINK:.0%} at {kinks} steps, as by an activation's kink"
        return Parity(
            verdict=Agreement.fail if beyond else verdict,
            techniques=candidate.techniques,
            refused=candidate.refused,
            precision=candidate.says.name,
            reference="fp64" if plain.precise else "the baseline itself",
            steps=self.stretch.steps,
            first=next(iter(beyond), None),
            rows=rows,
            notes=[*self._describe_clipping(), *([off] if kinks else [])],
            not_judged=[*self._chosen[1], *self.left_out, *_not_judged(candidate, judged)],
        )

    def _describe_clipping(self) -> list[str]:
        if self.clip_norm is None:
            return []
        limit = self.baseline.stability.clip_norm
        return [
            f"clipped at {self.clip_norm:.2g}, the median norm: no gradient of these steps "
            f"is above stability.clip_norm={limit:g}"
        ]

    def _compare_start(self, candidate: _Candidate, distances: Distances) -> None:
        """The first weights and buffers: those of the baseline, to the bit."""
        ours, theirs = candidate.record.start, self.path.start
        pairs = (ours.parameters, theirs.parameters), (ours.buffers, theirs.buffers)
        for mine, right in pairs:
            for name, value in right.items():
                if name in mine:
                    distances.add(Key(ErrorKind.parameter, name), mine[name], value, floor=0.0)

    def _compare_updates(
        self, candidate: _Candidate, run: Run, precise: Run
    ) -> tuple[list[Judged], bool]:
        """The changes of weights and averages next to those of plain updates with its gradients.

        And whether they are bit-equal.
        """
        distances, own, equal = Distances(), Distances(), True
        fed = self.stretch, self.path, candidate.record
        steps = zip(candidate.record.steps, updates(run, *fed), updates(precise, *fed), strict=True)
        for number, (step, state, truth) in enumerate(steps):
            start, first = self.path.before(number).parameters, self.path.start.average
            kinds: tuple[tuple[ErrorKind, str, Tensors], ...] = (
                (ErrorKind.update, "parameters", start),
                (ErrorKind.average, "average", first),
            )
            for kind, values, before in kinds:
                for name, right in getattr(truth, values).items():
                    key = Key(kind, name)
                    mine, theirs = getattr(step.after, values)[name], getattr(state, values)[name]
                    compare_changes(distances, key, mine, right, before[name])
                    compare_changes(own, key, theirs, right, before[name])
                    equal = equal and same(mine, theirs)
        if not candidate.updates_known:
            return [], False
        return list(judge(distances, Tolerance(own, SAME_ROUNDING))), equal


def _with_seed(config: RunConfig, seed: int) -> RunConfig:
    """The same config with another seed; not checked again, the plain one asks for nothing."""
    other = copy(config)
    other.seed = seed
    return other


def _equal_steps(record: Record, own: Record) -> bool:
    """Whether losses, norms, buffers and outputs are bit-equal."""
    for ours, theirs in zip(record.steps, own.steps, strict=True):
        if not (same(ours.loss, theirs.loss) and same(ours.grad_norm, theirs.grad_norm)):
            return False
        buffers = theirs.after.buffers.items()
        if not all(same(ours.after.buffers.get(name), value) for name, value in buffers):
            return False
    errors = compare_outputs(record.outputs, own.outputs).error.values()
    return not any(any(values) for values in errors)


def _by_a_kink(result: Parity) -> ParityRow | None:
    """The failure, where one rounding could have made it."""
    first = result.first
    if result.verdict is not Agreement.fail or first is None:
        return None
    kinky = first.kind in (ErrorKind.gradient.name, ErrorKind.grad_norm.name)
    return first if kinky and first.error < KINK else None


def _when(row: ParityRow) -> tuple[bool, int, int]:
    """Sorts by the time of what was computed."""
    kind = ErrorKind[row.kind]
    return kind >= ErrorKind.output, 0 if kind is ErrorKind.parameter else row.step, kind


def _row(one: Judged) -> ParityRow:
    return ParityRow(one.step, one.key.kind.name, one.key.name, one.error, one.bound)


def _not_judged(candidate: _Candidate, judged: list[Judged]) -> Iterator[str]:
    """What a fault could hide in, of this very candidate."""
    coarse = max((j.bound for j in judged if j.key.kind is ErrorKind.gradient), default=0.0)
    if coarse > COARSE:
        yield f"gradients off by less than {coarse:.0%}: that is what rounding changes of one"
    if not candidate.updates_known:
        yield "gradients and updates inside the one graph: no moment of the optimizer tells them"
    elif candidate.record.gradients_hidden:
        yield "gradients inside the one graph but through the optimizer's moments"
    if candidate.techniques and set(candidate.techniques) <= set(PRECISION):
        names = " and ".join(candidate.techniques)
        rounds = f"gradients off by less than {candidate.says.name} rounds"
        yield f"{rounds}: {names} is judged with itself"


def _draw_rows(site: str, ours: Draws, theirs: Draws, rounded: list[ParityRow]) -> list[ParityRow]:
    """The mean and the spread of each statistic over many draws; `rounded` without dropout."""
    rows = []
    bounds = {row.kind: row.bound for row in rounded}
    for name, a in vars(ours).items():
        b = getattr(theirs, name)
        if not (a and b):
            continue
        size = abs(math.fsum(a) / len(a))
        rounding = bounds.get(name, bounds.get(ErrorKind.grad_norm.name, 0.0))
        size = 1.0 if name == "projection" else size or 1.0
        apart, by_chance = mean_differs(a, b)
        bound = by_chance / size + rounding
        rows.append(
            ParityRow(1, ErrorKind.draw.name, f"mean of {name} ({site})", apart / size, bound)
        )
        apart, by_chance = spread_differs(a, b)
        name = f"log-variance of {name} ({site})"
        rows.append(ParityRow(1, ErrorKind.draw.name, name, apart, by_chance))
    return rows


def check_parity(
    config: RunConfig, baseline: RunConfig, steps: int | None = None, attribute: bool = False
) -> Parity:
    """Hold the run of `config` against that of `baseline`, each step from the same weights.

    `STEPS` steps, or as many as are affordable with a large model; the verdict of
    `ParityReference.judge`. With `attribute` a failure is traced to the technique that causes it.
    """
    reference = ParityReference(baseline, steps)
    result = reference.judge(config)
    if attribute and result.verdict is Agreement.fail:
        return _find_culprits(reference, config, result)
    return result


def _find_culprits(reference: ParityReference, config: RunConfig, result: Parity) -> Parity:
    """Name what fails alone; if nothing does, shrink the set for as long as it fails."""
    names = result.techniques
    if len(names) == 1:
        return replace(result, culprits=names)
    verdicts = {name: reference.judge_once(only(config, [name])).verdict for name in names}
    culprits = [name for name, verdict in verdicts.items() if verdict is Agreement.fail]
    if not culprits:
        culprits = list(names)
        for name in names:
            rest = [n for n in culprits if n != name]
            if rest and reference.judge_once(only(config, rest)).verdict is Agreement.fail:
                culprits = rest
    alone = {name: verdict.value for name, verdict in verdicts.items()}
    return replace(result, culprits=culprits, alone=alone)
