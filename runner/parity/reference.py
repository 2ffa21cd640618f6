"""A parity check: compare a candidate's steps with those of the plain run.

A candidate may deviate from fp64 by a factor times the plain run's error at the same precision
(`plain_runs.py`); its updates are compared separately, from its own gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from runner.build import Components
from runner.config import RunConfig
from runner.data.batch import largest_part
from runner.parity.candidates import cut, eager_draws, only, quiet, without_techniques
from runner.parity.distance import (
    KINK,
    Agreement,
    Distances,
    ErrorKind,
    Key,
    Parity,
    ParityRow,
    Tolerance,
    compare_outputs,
    judge,
    same,
)
from runner.parity.dropout import DRAWS, compare_draws, repeat_draws
from runner.parity.numerics import Numerics, numerics, to_double
from runner.parity.plain_runs import SAME_ROUNDING, PlainRuns
from runner.parity.trajectory import Record, updates
from runner.training.run import Run

AGAIN = 2  # additional seeds with which a small failure has to repeat
COARSE = 0.1  # relative bound above which undetectable faults are mentioned
# what other draws change
DRAWN = (ErrorKind.loss, ErrorKind.grad_norm, ErrorKind.gradient, ErrorKind.buffer)
PRECISION = ("tf32", "amp")  # techniques that reduce precision on purpose


@dataclass
class _Candidate:
    """A candidate's record and settings."""

    record: Record
    says: Numerics
    techniques: list[str]
    refused: dict[str, str]
    micro_batch: int
    batch_norm: bool  # samples of a micro-batch affect each other

    @property
    def updates_known(self) -> bool:
        """Whether the gradients of every step are known, to check its updates."""
        return not self.record.gradients_hidden or all(s.gradients for s in self.record.steps)


class ParityReference:
    """Judges candidates against a baseline that is measured only once."""

    def __init__(
        self, baseline: RunConfig, steps: int | None = None, given: Components | None = None
    ) -> None:
        self.plain = PlainRuns(baseline, steps, given)
        self.baseline = self.plain.baseline
        self.choices: Mapping[str, Any] = {}
        self._others: dict[int, ParityReference] = {}  # by seed, created on demand

    def judge(self, config: RunConfig, choices: Mapping[str, Any] | None = None) -> Parity:
        """Return the verdict on a candidate; `choices` are those of an earlier run of it.

        A small failure of gradients has to repeat with other seeds: rounding can push an activation
        over its kink in one of two correct computations, whereas a real fault repeats.
        """
        result = self.judge_once(config, choices)
        off = _by_a_kink(result)
        for seed in range(config.seed + 1, config.seed + 1 + AGAIN) if off else ():
            if seed not in self._others:
                other = _with_seed(self.baseline, seed)
                self._others[seed] = ParityReference(other, self.plain.asked, self.plain.given)
            again = self._others[seed].judge_once(_with_seed(config, seed), choices)
            if off and again.verdict is not Agreement.fail:
                was = f"seed={config.seed} differed in {off.name}"
                note = f"{was}, which did not repeat with seed={seed}"
                return replace(again, notes=[*again.notes, note])
        return result

    def judge_once(self, config: RunConfig, choices: Mapping[str, Any] | None = None) -> Parity:
        """Judge with the run's own seed only; reduced precision is also judged without it."""
        self.choices = choices or {}
        result = self._judge(config)
        rest = [name for name in result.techniques if name not in PRECISION]
        if result.verdict is not Agreement.explained or rest in ([], result.techniques):
            return result
        # faults smaller than 16-bit rounding only show without it
        precise = self._judge(only(config, rest))
        if precise.verdict is not Agreement.fail:
            note = f"passes in {precise.precision}, too"
            return replace(result, notes=[*result.notes, note], not_judged=precise.not_judged)
        without = " and ".join(name for name in result.techniques if name in PRECISION)
        return replace(
            precise,
            techniques=result.techniques,
            precision=result.precision,
            notes=[*precise.notes, f"seen without {without}, in {precise.precision}"],
        )

    def _judge(self, config: RunConfig) -> Parity:
        candidate = self._run_candidate(config)
        micro = candidate.micro_batch if candidate.batch_norm and self._cuts(candidate) else None
        result = self._compare(candidate, False, micro)
        if micro is not None:
            result.notes.append(
                f"BatchNorm's statistics are per micro-batch of {micro}, "
                "so the baseline uses the same micro-batches"
            )
        if result.verdict is not Agreement.fail or not self.plain.is_random(False):
            return result
        return self._judge_without_dropout(config, micro, candidate, result)

    def _judge_without_dropout(
        self, config: RunConfig, micro: int | None, candidate: _Candidate, result: Parity
    ) -> Parity:
        """Judge the arithmetic with dropout off in both, then dropout itself."""
        certain = [r for r in result.rows if not r.within and ErrorKind[r.kind] not in DRAWN]
        if certain:
            return replace(result, first=min(certain, key=_when))
        silent = self._compare(self._run_candidate(config, silent=True), True, micro)
        if self.plain.is_random(True):  # random numbers that are not dropout's
            return self._judge_draws(config, micro, replace(result, rows=[]), False)
        if silent.verdict is Agreement.fail:
            return silent
        if micro is None and self._cuts(candidate):
            parts = self._compare(candidate, False, candidate.micro_batch)
            if parts.verdict is not Agreement.fail:
                size = candidate.micro_batch
                note = f"dropout matches a plain run with micro-batches of {size}"
                return replace(silent, verdict=Agreement.explained, notes=[*silent.notes, note])
        return self._judge_draws(config, micro, silent, True)

    def _judge_draws(
        self, config: RunConfig, micro: int | None, result: Parity, silent: bool
    ) -> Parity:
        """Judge all random numbers together, by statistics of their effect on one step."""
        anchor = self.plain.measured(silent, micro).truth.steps[0].gradients
        with self.plain.opened(quiet(config), choices=self.choices) as run:
            theirs = repeat_draws(run, self.plain.stretch, anchor)
        with self.plain.opened(cut(self.baseline, micro)) as run:
            ours = repeat_draws(run, self.plain.stretch, anchor)
        rows = list(compare_draws(ours, theirs, result.rows))
        beyond = [row for row in rows if not row.within]
        hidden = "changes of loss and gradients below the noise of dropout draws"
        return replace(
            result,
            verdict=Agreement.fail if beyond else Agreement.explained,
            first=max(beyond, key=lambda row: row.excess, default=None),  # draws have no order
            rows=[*result.rows, *rows],
            notes=[*result.notes, f"it draws other random numbers: compared over {DRAWS} draws"],
            not_judged=[*result.not_judged, hidden],
        )

    def _run_candidate(self, config: RunConfig, silent: bool = False) -> _Candidate:
        """Run the candidate; it is closed before any other run, to reset global switches."""
        _ = self.plain.path  # measured first
        with eager_draws(), self.plain.opened(quiet(config), silent, self.choices) as run:
            batch_norm = nn.modules.batchnorm._BatchNorm
            return _Candidate(
                record=self.plain.follow(run),
                says=numerics(run),
                techniques=[name for name, _ in run.techniques if name not in run.fallen],
                refused={e.name: e.reason for e in run.engagements if e.requested} | run.fallen,
                micro_batch=run.micro_batch,
                batch_norm=any(isinstance(module, batch_norm) for module in run.model.modules()),
            )

    def _cuts(self, candidate: _Candidate) -> bool:
        """Whether the candidate's micro-batch size differs from the baseline's."""
        training = self.baseline.training
        usual = largest_part(training.batch_size, training.micro_batch or training.batch_size)
        return candidate.micro_batch != usual

    # -- comparing -----------------------------------------------------------------------------

    def _compare(self, candidate: _Candidate, silent: bool, micro: int | None) -> Parity:
        plain = self.plain.measured(silent, micro)
        tolerance = self.plain.tolerance(silent, micro, candidate.says)
        distances = self.plain.distances(candidate.record, plain.truth)
        self._compare_start(candidate, distances)
        rows = list(judge(distances, tolerance))
        exact = _equal_steps(candidate.record, plain.own) and candidate.updates_known
        of_updates, equal_updates = self._compare_updates(candidate)
        rows += of_updates
        beyond = sorted((row for row in rows if not row.within), key=_when)
        verdict = Agreement.exact if exact and equal_updates else Agreement.explained
        return Parity(
            verdict=Agreement.fail if beyond else verdict,
            techniques=candidate.techniques,
            refused=candidate.refused,
            precision=candidate.says.name,
            reference="fp64" if plain.precise else "the baseline itself",
            steps=self.plain.stretch.steps,
            first=next(iter(beyond), None),
            rows=rows,
            notes=list(self._notes(rows)),
            not_judged=[*self.plain.omissions, *_not_judged(candidate, rows)],
        )

    def _notes(self, rows: list[ParityRow]) -> Iterator[str]:
        limit, clip_norm = self.baseline.stability.clip_norm, self.plain.clip_norm
        if clip_norm is not None:
            unclipped = f"no gradient of these steps is above stability.clip_norm={limit:g}"
            yield f"clipped at {clip_norm:.2g}, the median norm: {unclipped}"
        kinks = max((row.kinks for row in rows), default=0)
        if kinks:
            off = f"gradients are off by up to {KINK:.0%} at {kinks} steps"
            yield f"{off}, as by an activation's kink"

    def _compare_start(self, candidate: _Candidate, distances: Distances) -> None:
        """Compare the initial weights and buffers, which must be bit-equal to the baseline's."""
        ours, theirs = candidate.record.start, self.plain.path.start
        pairs = (ours.parameters, theirs.parameters), (ours.buffers, theirs.buffers)
        for mine, right in pairs:
            for name, value in right.items():
                if name in mine:
                    distances.add(Key(ErrorKind.parameter, name), mine[name], value, floor=0.0)

    def _compare_updates(self, candidate: _Candidate) -> tuple[list[ParityRow], bool]:
        """Compare changes of weights and averages with plain updates from the same gradients.

        Also returns whether they are bit-equal.
        """
        if not candidate.updates_known:
            return [], False
        config = without_techniques(self.baseline)
        with self.plain.opened(config) as run, self.plain.opened(config) as precise:
            if run.device.kind != "mps":
                to_double(precise)
            return self._judge_updates(candidate.record, run, precise)

    def _judge_updates(
        self, record: Record, run: Run, precise: Run
    ) -> tuple[list[ParityRow], bool]:
        distances, own, equal = Distances(), Distances(), True
        path = self.plain.path
        fed = self.plain.stretch, path, record
        steps = zip(record.steps, updates(run, *fed), updates(precise, *fed), strict=True)
        for number, (step, state, truth) in enumerate(steps):
            ours, start, first = step.after, path.before(number).parameters, path.start.average
            for kind, mine, theirs, right, before in (
                (ErrorKind.update, ours.parameters, state.parameters, truth.parameters, start),
                (ErrorKind.average, ours.average, state.average, truth.average, first),
            ):
                for name, value in right.items():
                    key = Key(kind, name)
                    distances.add_change(key, mine[name], value, before[name])
                    own.add_change(key, theirs[name], value, before[name])
                    equal = equal and same(mine[name], theirs[name])
        return list(judge(distances, Tolerance(own, SAME_ROUNDING))), equal


def _with_seed(config: RunConfig, seed: int) -> RunConfig:
    """Return the config with another seed, without validating it again."""
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
    outputs = Distances()
    compare_outputs(outputs, record.outputs, own.outputs)
    return not any(step.error for steps in outputs.steps.values() for step in steps)


def _by_a_kink(result: Parity) -> ParityRow | None:
    """Return the failure, if rounding at a kink could explain it."""
    first = result.first
    if result.verdict is not Agreement.fail or first is None:
        return None
    kinky = first.kind in (ErrorKind.gradient.name, ErrorKind.grad_norm.name)
    return first if kinky and first.error < KINK else None


def _when(row: ParityRow) -> tuple[bool, int, int]:
    """Sort key: the order in which the values are computed."""
    kind = ErrorKind[row.kind]
    return kind >= ErrorKind.output, 0 if kind is ErrorKind.parameter else row.step, kind


def _not_judged(candidate: _Candidate, rows: list[ParityRow]) -> Iterator[str]:
    """Yield where a fault could go unnoticed for this candidate."""
    gradient = ErrorKind.gradient.name
    coarse = max((row.bound for row in rows if row.kind == gradient), default=0.0)
    if coarse > COARSE:
        yield f"gradients off by less than {coarse:.0%}, the size of rounding errors"
    if not candidate.updates_known:
        yield "gradients and updates inside the one graph: no optimizer moments show them"
    elif candidate.record.gradients_hidden:
        yield "gradients inside the one graph, except through the optimizer's moments"
    if candidate.techniques and set(candidate.techniques) <= set(PRECISION):
        names = " and ".join(candidate.techniques)
        rounds = f"gradient errors smaller than {candidate.says.name} rounding"
        yield f"{rounds}: the tolerance comes from {names} itself"


def check_parity(
    config: RunConfig, baseline: RunConfig, steps: int | None = None, attribute: bool = False
) -> Parity:
    """Compare the run of `config` with that of `baseline`, each step from equal weights.

    `STEPS` steps, or fewer for a large model. `attribute` traces a failure to the techniques that
    cause it.
    """
    reference = ParityReference(baseline, steps)
    result = reference.judge(config)
    if attribute and result.verdict is Agreement.fail:
        return _find_culprits(reference, config, result)
    return result


def _find_culprits(reference: ParityReference, config: RunConfig, result: Parity) -> Parity:
    """Find the techniques that fail alone; if none does, shrink the failing set."""
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
