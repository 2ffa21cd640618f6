"""A parity check: compare a candidate's steps with those of the plain run.

A candidate may deviate from fp64 by a factor times the plain run's error at the same precision
(`plain_runs.py`); its updates are compared separately, from its own gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from runner.core.build.setup import Components
from runner.core.config.run_config import RunConfig
from runner.core.config.variants import (
    keep_techniques,
    with_micro_batch,
    without_side_effects,
    without_techniques,
)
from runner.core.interfaces.batch import largest_slice
from runner.core.interfaces.run import Run
from runner.measure.parity.distance import (
    KINK_ERROR,
    Agreement,
    Distances,
    ErrorKind,
    Parity,
    ParityRow,
    TensorKey,
    Tolerance,
    compare_outputs,
    is_equal,
    judge_tensors,
)
from runner.measure.parity.dropout import DRAWS, compare_draws, repeat_draws
from runner.measure.parity.numerics import Numerics, convert_run_to_fp64, read_numerics
from runner.measure.parity.plain_runs import SAME_ROUNDING_FACTOR, PlainRuns, eager_random_numbers
from runner.measure.parity.trajectory import Trajectory, replay_updates, update_names

log = logging.getLogger("runner")

COARSE_BOUND = 0.1  # relative bound above which undetectable faults are mentioned
# what other draws change
DROPOUT_KINDS = (ErrorKind.loss, ErrorKind.grad_norm, ErrorKind.gradient, ErrorKind.buffer)
PRECISION_TECHNIQUES = ("tf32", "amp")  # techniques that reduce precision on purpose


@dataclass
class _CandidateRun:
    """A candidate's record and settings."""

    trajectory: Trajectory
    numerics: Numerics
    techniques: list[str]
    refused: dict[str, str]
    micro_batch: int
    batch_norm: bool  # samples of a micro-batch affect each other

    @property
    def updates_known(self) -> bool:
        """Whether the gradients of every step are known, to check its updates."""
        steps = self.trajectory.steps
        return not self.trajectory.gradients_hidden or all(s.gradients for s in steps)


class ParityReference:
    """Judges candidates against a baseline that is measured only once."""

    def __init__(
        self, baseline: RunConfig, steps: int | None = None, given: Components | None = None
    ) -> None:
        self.plain = PlainRuns(baseline, steps, given)
        self.baseline = self.plain.baseline
        self.choices: Mapping[str, Any] = {}
        self.report_progress: Callable[[str], object] = lambda text: None

    def judge(self, config: RunConfig, choices: Mapping[str, Any] | None = None) -> Parity:
        """Return the verdict on a candidate; `choices` are those of an earlier run of it.

        Reduced precision is also judged without it.
        """
        self.choices = choices or {}
        result = self._judge(config)
        full_precision = [name for name in result.techniques if name not in PRECISION_TECHNIQUES]
        if result.verdict is not Agreement.explained or full_precision in ([], result.techniques):
            return result
        # faults smaller than 16-bit rounding only show without it
        precise = self._judge(keep_techniques(config, full_precision))
        if precise.verdict is not Agreement.fail:
            note = f"passes in {precise.precision}, too"
            return replace(result, notes=[*result.notes, note], not_judged=precise.not_judged)
        reduced = " and ".join(name for name in result.techniques if name in PRECISION_TECHNIQUES)
        notes = [*precise.notes, f"seen without {reduced}, in {precise.precision}"]
        return replace(
            precise, techniques=result.techniques, precision=result.precision, notes=notes
        )

    def _judge(self, config: RunConfig) -> Parity:
        candidate = self._run_candidate(config)
        per_micro_batch = candidate.batch_norm and self._changes_micro_batch(candidate)
        micro_batch = candidate.micro_batch if per_micro_batch else None
        result = self._compare(candidate, False, micro_batch)
        if micro_batch is not None:
            subject = f"BatchNorm's statistics are per micro-batch of {micro_batch}"
            result.notes.append(f"{subject}, so the baseline uses the same micro-batches")
        if result.verdict is not Agreement.fail or not self.plain.is_random(False):
            return result
        return self._judge_without_dropout(config, micro_batch, candidate, result)

    def _judge_without_dropout(
        self, config: RunConfig, micro_batch: int | None, candidate: _CandidateRun, result: Parity
    ) -> Parity:
        """Judge the arithmetic with dropout off in both, then dropout itself."""
        failures = [row for row in result.rows if not row.within]
        certain = [row for row in failures if ErrorKind[row.kind] not in DROPOUT_KINDS]
        if certain:
            return replace(result, first=min(certain, key=_computation_order))
        arithmetic = self._compare(self._run_candidate(config, dropout_off=True), True, micro_batch)
        if self.plain.is_random(True):  # random numbers that are not dropout's
            return self._judge_draws(config, micro_batch, replace(result, rows=[]), False)
        if arithmetic.verdict is Agreement.fail:
            return arithmetic
        if micro_batch is None and self._changes_micro_batch(candidate):
            size = candidate.micro_batch
            if self._compare(candidate, False, size).verdict is not Agreement.fail:
                note = f"dropout matches a plain run with micro-batches of {size}"
                notes = [*arithmetic.notes, note]
                return replace(arithmetic, verdict=Agreement.explained, notes=notes)
        return self._judge_draws(config, micro_batch, arithmetic, True)

    def _judge_draws(
        self, config: RunConfig, micro_batch: int | None, result: Parity, dropout_off: bool
    ) -> Parity:
        """Judge all random numbers together, by statistics of their effect on one step."""
        base_gradients = self.plain.record(dropout_off, micro_batch).truth.steps[0].gradients
        with self.plain.open_run(without_side_effects(config), choices=self.choices) as run:
            candidate_draws = repeat_draws(run, self.plain.window, base_gradients)
        with self.plain.open_run(with_micro_batch(self.baseline, micro_batch)) as run:
            baseline_draws = repeat_draws(run, self.plain.window, base_gradients)
        rows = list(compare_draws(baseline_draws, candidate_draws, result.rows))
        failures = [row for row in rows if not row.within]
        omission = "changes of loss and gradients below the noise of dropout draws"
        return replace(
            result,
            verdict=Agreement.fail if failures else Agreement.explained,
            first=max(failures, key=lambda row: row.excess, default=None),  # draws have no order
            rows=[*result.rows, *rows],
            notes=[*result.notes, f"it draws other random numbers: compared over {DRAWS} draws"],
            not_judged=[*result.not_judged, omission],
        )

    def _run_candidate(self, config: RunConfig, dropout_off: bool = False) -> _CandidateRun:
        """Run the candidate; it is closed before any other run, to reset global switches."""
        names = [name for name, technique in config.optimization.techniques() if technique.enabled]
        self.report_progress(f"verify: a run with {', '.join(names) or 'no technique'}")
        _ = self.plain.trajectory  # measured first
        with (
            eager_random_numbers(),
            self.plain.open_run(without_side_effects(config), dropout_off, self.choices) as run,
        ):
            batch_norm = nn.modules.batchnorm._BatchNorm
            return _CandidateRun(
                trajectory=self.plain.record_run(run),
                numerics=read_numerics(run),
                techniques=[name for name, _ in run.techniques if name not in run.fallback_reasons],
                refused={e.name: e.reason for e in run.unapplied_techniques if e.requested}
                | run.fallback_reasons,
                micro_batch=run.micro_batch,
                batch_norm=any(isinstance(module, batch_norm) for module in run.model.modules()),
            )

    def _changes_micro_batch(self, candidate: _CandidateRun) -> bool:
        """Whether the candidate's micro-batch size differs from the baseline's."""
        training = self.baseline.training
        limit = training.micro_batch or training.batch_size
        return candidate.micro_batch != largest_slice(training.batch_size, limit)

    # -- comparing -----------------------------------------------------------------------------

    def _compare(
        self, candidate: _CandidateRun, dropout_off: bool, micro_batch: int | None
    ) -> Parity:
        plain = self.plain.record(dropout_off, micro_batch)
        tolerance = self.plain.tolerance(dropout_off, micro_batch, candidate.numerics)
        distances = self.plain.distances(candidate.trajectory, plain.truth)
        self._compare_start(candidate, distances)
        rows = list(judge_tensors(distances, tolerance))
        exact = _steps_equal(candidate.trajectory, plain.baseline) and candidate.updates_known
        update_rows, updates_equal = self._compare_updates(candidate)
        rows += update_rows
        failures = sorted((row for row in rows if not row.within), key=_computation_order)
        verdict = Agreement.exact if exact and updates_equal else Agreement.explained
        return Parity(
            verdict=Agreement.fail if failures else verdict,
            techniques=candidate.techniques,
            refused=candidate.refused,
            precision=candidate.numerics.name,
            reference="fp64" if plain.is_fp64 else "the baseline itself",
            steps=self.plain.window.steps,
            first=next(iter(failures), None),
            rows=rows,
            notes=list(self._notes(rows)),
            not_judged=[*self.plain.omissions, *_find_omissions(candidate, rows)],
        )

    def _notes(self, rows: list[ParityRow]) -> Iterator[str]:
        limit, clip_norm = self.baseline.stability.clip_norm, self.plain.clip_norm
        if clip_norm is not None:
            unclipped = f"no gradient of these steps is above stability.clip_norm={limit:g}"
            yield f"clipped at {clip_norm:.2g}, the median norm: {unclipped}"
        if kinks := max((row.kinks for row in rows), default=0):
            off = f"gradients are off by up to {KINK_ERROR:.0%} at {kinks} steps"
            yield f"{off}, as by an activation's kink"

    def _compare_start(self, candidate: _CandidateRun, distances: Distances) -> None:
        """Compare the initial weights and buffers, which must be bit-equal to the baseline's."""
        start, expected_start = candidate.trajectory.start, self.plain.trajectory.start
        actual = start.parameters | start.buffers
        for name, value in (expected_start.parameters | expected_start.buffers).items():
            if name in actual:
                distances.add(TensorKey(ErrorKind.parameter, name), actual[name], value, floor=0.0)

    def _compare_updates(self, candidate: _CandidateRun) -> tuple[list[ParityRow], bool]:
        """Compare changes of weights and averages with plain updates from the same gradients.

        Also returns whether they are bit-equal.
        """
        if not candidate.updates_known:
            return [], False
        config = without_techniques(self.baseline)
        with self.plain.open_run(config) as run, self.plain.open_run(config) as fp64_run:
            if run.device.kind != "mps":
                convert_run_to_fp64(fp64_run)
            return self._judge_updates(candidate.trajectory, run, fp64_run)

    def _judge_updates(
        self, trajectory: Trajectory, run: Run, fp64_run: Run
    ) -> tuple[list[ParityRow], bool]:
        distances, plain_distances, equal = Distances(), Distances(), True
        reference, updated = self.plain.trajectory, update_names(run)
        arguments = self.plain.window, reference, trajectory
        replays = replay_updates(run, *arguments), replay_updates(fp64_run, *arguments)
        steps = zip(trajectory.steps, *replays, strict=True)
        for number, (step, plain, truth) in enumerate(steps):
            after, start = step.after, reference.state_before(number).parameters | step.moved
            average = reference.start.average
            for kind, actual, replayed, expected, before in (
                (ErrorKind.update, after.parameters, plain.parameters, truth.parameters, start),
                (ErrorKind.average, after.average, plain.average, truth.average, average),
            ):
                for name, value in expected.items():
                    if name not in updated:  # the forward moves it, which is compared as a buffer
                        continue
                    key = TensorKey(kind, name)
                    distances.add_change(key, actual[name], value, before[name])
                    plain_distances.add_change(key, replayed[name], value, before[name])
                    equal = equal and is_equal(actual[name], replayed[name])
        tolerance = Tolerance(plain_distances, SAME_ROUNDING_FACTOR)
        return list(judge_tensors(distances, tolerance)), equal


def _steps_equal(trajectory: Trajectory, baseline: Trajectory) -> bool:
    """Whether losses, norms, buffers and outputs are bit-equal."""
    for actual, expected in zip(trajectory.steps, baseline.steps, strict=True):
        scalars = (actual.loss, expected.loss), (actual.grad_norm, expected.grad_norm)
        if not all(is_equal(a, b) for a, b in scalars):
            return False
        buffers = expected.after.buffers.items()
        if not all(is_equal(actual.after.buffers.get(name), value) for name, value in buffers):
            return False
    outputs = Distances()
    compare_outputs(outputs, trajectory.outputs, baseline.outputs)
    return not any(step.error for steps in outputs.steps.values() for step in steps)


def _computation_order(row: ParityRow) -> tuple[bool, int, int]:
    """Sort key: the order in which the values are computed."""
    kind = ErrorKind[row.kind]
    return kind >= ErrorKind.output, 0 if kind is ErrorKind.parameter else row.step, kind


def _find_omissions(candidate: _CandidateRun, rows: list[ParityRow]) -> Iterator[str]:
    """Yield where a fault could go unnoticed for this candidate."""
    coarse = max((row.bound for row in rows if row.kind == ErrorKind.gradient.name), default=0.0)
    if coarse > COARSE_BOUND:
        yield f"gradients off by less than {coarse:.0%}, the size of rounding errors"
    if not candidate.updates_known:
        yield "gradients and updates inside the one graph: no optimizer moments show them"
    elif candidate.trajectory.gradients_hidden:
        yield "gradients inside the one graph, except through the optimizer's moments"
    if candidate.techniques and set(candidate.techniques) <= set(PRECISION_TECHNIQUES):
        names = " and ".join(candidate.techniques)
        rounds = f"gradient errors smaller than {candidate.numerics.name} rounding"
        yield f"{rounds}: the tolerance comes from {names} itself"


def check_parity(
    config: RunConfig, baseline: RunConfig, steps: int | None = None, attribute: bool = False
) -> Parity:
    """Compare the run of `config` with that of `baseline`, each step from equal weights.

    `STEPS` steps, or fewer for a large model. `attribute` traces a failure to the techniques that
    cause it.
    """
    reference = ParityReference(baseline, steps)
    reference.report_progress = log.info
    result = reference.judge(config)
    if attribute and result.verdict is Agreement.fail:
        return _find_culprits(reference, config, result)
    return result


def _find_culprits(reference: ParityReference, config: RunConfig, result: Parity) -> Parity:
    """Find the techniques that fail alone; if none does, shrink the failing set."""
    names = result.techniques
    if len(names) == 1:
        return replace(result, culprits=names)
    verdicts = {n: reference.judge(keep_techniques(config, [n])).verdict for n in names}
    culprits = [name for name, verdict in verdicts.items() if verdict is Agreement.fail]
    if not culprits:
        culprits = list(names)
        for name in names:
            rest = [n for n in culprits if n != name]
            if rest and reference.judge(keep_techniques(config, rest)).verdict is Agreement.fail:
                culprits = rest
    alone = {name: verdict.value for name, verdict in verdicts.items()}
    return replace(result, culprits=culprits, alone=alone)
