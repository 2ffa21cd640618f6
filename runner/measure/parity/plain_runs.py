"""The plain runs of a parity check: the correct numbers, and how much rounding changes them.

The effect of rounding is measured on the model itself: the distance from fp64 of the plain run at
the same precision and steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

import torch

from runner.core.build.build import build
from runner.core.build.setup import Components
from runner.core.config.run_config import RunConfig
from runner.core.config.variants import with_micro_batch, without_side_effects, without_techniques
from runner.core.errors import RunnerError
from runner.core.interfaces.run import Run
from runner.measure.parity.distance import (
    KINK_ERROR,
    Distances,
    ErrorKind,
    TensorKey,
    Tolerance,
    compare_outputs,
    compare_steps,
)
from runner.measure.parity.dropout import is_random, zero_dropout
from runner.measure.parity.numerics import (
    ROUNDOFF,
    Numerics,
    apply_numerics,
    convert_run_to_fp64,
    read_numerics,
)
from runner.measure.parity.trajectory import (
    Trajectory,
    choose_window,
    record_trajectory,
)

SAME_ROUNDING_FACTOR = 8.0  # on the plain run's error at the same precision, correlated otherwise
SUMMATION_ORDER_FACTOR = 64.0
"""Factor on the error in fp32, where only the order of summation differs: adding n terms in
sequence has sqrt(n / log2 n) times the error of a tree (Higham 1993), 64 for n = 65,536."""
# of one inferred from a moment, at beta1=0.9, relative to the largest gradient
INFERRED_GRADIENT_ERROR = 32 * ROUNDOFF[torch.float32]


def copy_components(
    given: Components | None, choices: Mapping[str, Any] | None = None
) -> Components:
    """Return copies of the caller's components, since training modifies them."""
    given = given or Components()
    parts = deepcopy((given.model, given.objective, given.optimizer))  # at once: shared tensors
    model, objective, optimizer = parts
    choices = {**given.choices, **(choices or {})}
    return replace(given, model=model, objective=objective, optimizer=optimizer, choices=choices)


@contextmanager
def open_run(
    config: RunConfig, dropout_off: bool = False, given: Components | None = None
) -> Iterator[Run]:
    """Build a run; `dropout_off` disables dropout."""
    with build(config, components=given) as run, run.own_random_state():
        if dropout_off:
            zero_dropout(run.model)
        yield run


@contextmanager
def eager_random_numbers() -> Iterator[None]:
    """Let code compiled within draw the same random numbers as eager code."""
    import torch._inductor.config as inductor

    with inductor.patch(fallback_random=True):
        yield


@dataclass
class PlainRecord:
    """Plain runs over the trajectory, in one configuration."""

    truth: Trajectory
    is_fp64: bool  # computed in fp64
    baseline: Trajectory  # at the baseline's precision
    tolerances: dict[Numerics, Tolerance]


class PlainRuns:
    """The baseline's steps and their errors by precision; measured once for many candidates."""

    def __init__(self, baseline: RunConfig, steps: int | None, given: Components | None) -> None:
        self.baseline = without_side_effects(baseline)
        self.requested_steps, self.given = steps, given
        self.clip_norm: float | None = None  # replaces a limit that no gradient reaches
        self._records: dict[tuple[bool, int | None], PlainRecord] = {}
        self._randomness: dict[bool, bool] = {}

    @contextmanager
    def open_run(
        self, config: RunConfig, dropout_off: bool = False, choices: Mapping[str, Any] | None = None
    ) -> Iterator[Run]:
        """Build a run with the baseline's clipping; `dropout_off` disables dropout."""
        if self.clip_norm is not None:
            config = copy(config)  # not validated again, as a plain run needs no technique
            config.stability = replace(config.stability, clip_norm=self.clip_norm)
        with open_run(config, dropout_off, copy_components(self.given, choices)) as run:
            yield run

    def is_random(self, dropout_off: bool) -> bool:
        """Whether the baseline's loss depends on random numbers; cached."""
        if dropout_off not in self._randomness:
            with self.open_run(self.baseline, dropout_off) as run:
                self._randomness[dropout_off] = is_random(run)
        return self._randomness[dropout_off]

    @cached_property
    def trajectory(self) -> Trajectory:
        """The baseline's trajectory; if it has a clip norm, some of its steps are clipped.

        Also sets `window`, the steps to compare, and `omissions`, what they leave out.
        """
        with self.open_run(self.baseline) as run:
            self.window, self.omissions = choose_window(run, self.requested_steps)
            total_batches = run.validation.steps_per_epoch
        record = self._record_baseline()
        norms, limit = [float(s.grad_norm) for s in record.steps], self.baseline.stability.clip_norm
        if limit is not None and 0 < max(norms) <= limit:
            self.clip_norm = median(norms)
            record = self._record_baseline()
        self.validation_batches = len(record.outputs)
        if self.validation_batches != total_batches:
            self.omissions.append(f"validation batches after the first {self.validation_batches}")
        return record

    def _record_baseline(self) -> Trajectory:
        with self.open_run(self.baseline) as run:
            self.numerics = read_numerics(run)
            return record_trajectory(run, self.window)

    def record_run(self, run: Run, **options: Any) -> Trajectory:
        """Make the baseline's steps with another run, each from the baseline's weights."""
        reference = self.trajectory  # recorded first
        options["validation_batches"] = self.validation_batches
        return record_trajectory(run, self.window, reference, **options)

    def _record_plain(
        self,
        config: RunConfig,
        dropout_off: bool,
        numerics: Numerics | None = None,
        perturbed: bool = False,
    ) -> Trajectory:
        with self.open_run(config, dropout_off) as run:
            with nullcontext() if numerics is None else apply_numerics(numerics, run):
                return self.record_run(run, update=False, perturbed=perturbed)

    def distances(self, record: Trajectory, truth: Trajectory) -> Distances:
        """Compare losses, norms, gradients, buffers and outputs of two records."""
        starts = [self.trajectory.state_before(step) for step in range(self.window.steps)]
        distances = compare_steps(record.steps, truth.steps, starts)
        compare_outputs(distances, record.outputs, truth.outputs)
        for key, differences in distances.steps.items():
            if record.gradients_hidden and key.kind is ErrorKind.gradient:
                floor = INFERRED_GRADIENT_ERROR * max(each.size for each in differences)
                differences[:] = [x._replace(floor=max(floor, x.floor)) for x in differences]
        return distances

    def record(self, dropout_off: bool, micro_batch: int | None) -> PlainRecord:
        """Return the plain runs for a micro-batch size, with or without dropout; cached."""
        key = dropout_off, micro_batch
        if key not in self._records:
            self._records[key] = self._make_record(dropout_off, micro_batch)
        return self._records[key]

    def _make_record(self, dropout_off: bool, micro_batch: int | None) -> PlainRecord:
        config = with_micro_batch(self.baseline, micro_batch)
        plain_config, baseline = without_techniques(config), self.trajectory
        if dropout_off or micro_batch is not None:
            baseline = self._record_plain(config, dropout_off)
        truth = self._record_fp64(plain_config, dropout_off)
        if truth is not None:
            errors = self.distances(baseline, truth)
            losses = errors.steps[TensorKey(ErrorKind.loss, "loss")]
            relative_errors = [step.error / step.size for step in losses if step.size]
            if relative_errors and median(relative_errors) > KINK_ERROR:
                truth = None  # in fp64 dropout draws different numbers
        if truth is None:
            perturbed = self._record_plain(plain_config, dropout_off, self.numerics, perturbed=True)
            errors = self.distances(perturbed, baseline)
        else:
            for own_step, true_step in zip(baseline.steps, truth.steps, strict=True):
                own_step.gradients = {}  # large, and no longer needed
                for name, gradient in true_step.gradients.items():
                    dtype = torch.complex64 if gradient.is_complex() else torch.float32
                    true_step.gradients[name] = gradient.to(dtype)
        tolerances = {self.numerics: Tolerance(errors, SUMMATION_ORDER_FACTOR)}
        return PlainRecord(truth or baseline, truth is not None, baseline, tolerances)

    def _record_fp64(self, config: RunConfig, dropout_off: bool) -> Trajectory | None:
        """Return the plain run in fp64; None if device or model do not support it."""
        with self.open_run(config, dropout_off) as run:
            if run.device.kind == "mps":
                return None
            convert_run_to_fp64(run)
            try:
                return self.record_run(run, update=False, fp64=True)
            except (RunnerError, RuntimeError, TypeError, ValueError):  # the model fixes a dtype
                return None

    def tolerance(
        self, dropout_off: bool, micro_batch: int | None, numerics: Numerics
    ) -> Tolerance:
        """Return how far rounding may move a run that computes in `numerics`."""
        plain = self.record(dropout_off, micro_batch)
        for measured, tolerance in plain.tolerances.items():
            if measured.rounds_like(numerics):
                return tolerance
        config = without_techniques(with_micro_batch(self.baseline, micro_batch))
        record = self._record_plain(config, dropout_off, numerics)
        tolerance = Tolerance(self.distances(record, plain.truth), SAME_ROUNDING_FACTOR)
        tolerance.widen(next(iter(plain.tolerances.values())))
        plain.tolerances[numerics] = tolerance
        return tolerance
