"""The plain runs of a parity check: the correct numbers, and how much rounding changes them.

The effect of rounding is measured on the model itself: the distance from fp64 of the plain run at
the same precision and steps.
"""

from __future__ import annotations

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
from runner.errors import RunnerError
from runner.parity.candidates import cut, fresh, opened, quiet, without_techniques
from runner.parity.distance import (
    KINK,
    Distances,
    ErrorKind,
    Key,
    Tolerance,
    compare_outputs,
    compare_steps,
)
from runner.parity.dropout import is_random
from runner.parity.numerics import ROUNDOFF, Numerics, computing_in, numerics, to_double
from runner.parity.trajectory import Record, Stretch, choose_stretch, follow
from runner.training.run import Run

SAME_ROUNDING = 8.0
"""Factor on the plain run's error at the same reduced precision: equal roundings, differently
correlated."""
OTHER_ORDER = 64.0
"""Factor on the error in fp32, where only the order of summation differs: adding n terms in
sequence has sqrt(n / log2 n) times the error of a tree (Higham 1993), 64 for n = 65,536."""
INFERRED = 32 * ROUNDOFF[torch.float32]
"""Relative to the largest gradient: error of one inferred from a moment, at beta1=0.9."""


@dataclass
class PlainRecord:
    """Plain runs over the trajectory, in one configuration."""

    truth: Record
    precise: bool  # computed in fp64
    own: Record  # at the baseline's precision
    tolerances: dict[Numerics, Tolerance]


class PlainRuns:
    """The baseline's steps and their errors by precision; measured once for many candidates."""

    def __init__(self, baseline: RunConfig, steps: int | None, given: Components | None) -> None:
        self.baseline, self.asked, self.given = quiet(baseline), steps, given
        self.clip_norm: float | None = None  # replaces a limit that no gradient reaches
        self._measured: dict[tuple[bool, int | None], PlainRecord] = {}
        self._random: dict[bool, bool] = {}

    @contextmanager
    def opened(
        self, config: RunConfig, silent: bool = False, choices: Mapping[str, Any] | None = None
    ) -> Iterator[Run]:
        """Build a run with the baseline's clipping; `silent` disables dropout."""
        if self.clip_norm is not None:
            config = copy(config)  # not validated again, as a plain run needs no technique
            config.stability = replace(config.stability, clip_norm=self.clip_norm)
        with opened(config, silent, fresh(self.given, choices)) as run:
            yield run

    def is_random(self, silent: bool) -> bool:
        """Whether the baseline's loss depends on random numbers; cached."""
        if silent not in self._random:
            with self.opened(self.baseline, silent) as run:
                self._random[silent] = is_random(run)
        return self._random[silent]

    @cached_property
    def chosen(self) -> tuple[Stretch, list[str]]:
        """The steps to compare, and what they omit."""
        with self.opened(self.baseline) as run:
            return choose_stretch(run, self.asked)

    @property
    def stretch(self) -> Stretch:
        """The steps to compare."""
        return self.chosen[0]

    @cached_property
    def path(self) -> Record:
        """The baseline's trajectory; if it has a clip norm, some of its steps are clipped."""
        record = self._follow_baseline()
        norms, limit = [float(s.grad_norm) for s in record.steps], self.baseline.stability.clip_norm
        if limit is not None and 0 < max(norms) <= limit:
            self.clip_norm = median(norms)
            record = self._follow_baseline()
        return record

    def _follow_baseline(self) -> Record:
        with self.opened(self.baseline) as run:
            self.says = numerics(run)
            record = follow(run, self.stretch)
            self.validation, whole = len(record.outputs), run.validation.steps_per_epoch
        rest = f"validation batches after the first {self.validation}"
        self.omissions = [*self.chosen[1], *([] if self.validation == whole else [rest])]
        return record

    def follow(self, run: Run, **how: Any) -> Record:
        """Make the baseline's steps with another run, each from the baseline's weights."""
        return follow(run, self.stretch, self.path, validation=self.validation, **how)

    def _follow_plain(
        self, config: RunConfig, silent: bool, says: Numerics | None = None, nudged: bool = False
    ) -> Record:
        with ExitStack() as stack:
            run = stack.enter_context(self.opened(config, silent))
            if says is not None:
                stack.enter_context(computing_in(says, run))
            return self.follow(run, update=False, nudged=nudged)

    def distances(self, record: Record, truth: Record) -> Distances:
        """Compare losses, norms, gradients, buffers and outputs of two records."""
        buffers = [self.path.before(number).buffers for number in range(self.stretch.steps)]
        distances = compare_steps(record.steps, truth.steps, buffers)
        compare_outputs(distances, record.outputs, truth.outputs)
        if record.gradients_hidden:
            self._raise_floors(distances)
        return distances

    def _raise_floors(self, distances: Distances) -> None:
        for key, steps in distances.steps.items():
            if key.kind is ErrorKind.gradient:
                least = INFERRED * max(step.size for step in steps)
                steps[:] = [step._replace(floor=max(least, step.floor)) for step in steps]

    def measured(self, silent: bool, micro: int | None) -> PlainRecord:
        """Return the plain runs, without dropout if `silent`, for a micro-batch size; cached."""
        key = silent, micro
        if key not in self._measured:
            self._measured[key] = self._measure(silent, micro)
        return self._measured[key]

    def _measure(self, silent: bool, micro: int | None) -> PlainRecord:
        usual = cut(self.baseline, micro)
        plain, own = without_techniques(usual), self.path
        if silent or micro is not None:
            own = self._follow_plain(usual, silent)
        truth = self._truth(plain, silent)
        if truth is not None:
            errors = self.distances(own, truth)
            losses = errors.steps[Key(ErrorKind.loss, "loss")]
            apart = [step.error / step.size for step in losses if step.size]
            if apart and median(apart) > KINK:
                truth = None  # in fp64 dropout draws different numbers
        if truth is None:
            errors = self.distances(self._follow_plain(plain, silent, self.says, nudged=True), own)
        else:
            for ours, right in zip(own.steps, truth.steps, strict=True):
                ours.gradients = {}  # large, and no longer needed
                right.gradients = {n: g.float() for n, g in right.gradients.items()}
        tolerances = {self.says: Tolerance(errors, OTHER_ORDER)}
        return PlainRecord(truth or own, truth is not None, own, tolerances)

    def _truth(self, plain: RunConfig, silent: bool) -> Record | None:
        """Return the plain run in fp64; None if device or model do not support it."""
        with self.opened(plain, silent) as run:
            if run.device.kind == "mps":
                return None
            to_double(run)
            try:
                return self.follow(run, update=False, in_double=True)
            except (RunnerError, RuntimeError, TypeError, ValueError):  # the model fixes a dtype
                return None

    def tolerance(self, silent: bool, micro: int | None, wanted: Numerics) -> Tolerance:
        """Return how far rounding may move a run that computes in `wanted`."""
        plain = self.measured(silent, micro)
        for known, tolerance in plain.tolerances.items():
            if known.is_that_of(wanted):
                return tolerance
        config = without_techniques(cut(self.baseline, micro))
        record = self._follow_plain(config, silent, wanted)
        tolerance = Tolerance(self.distances(record, plain.truth), SAME_ROUNDING)
        tolerance.widen(next(iter(plain.tolerances.values())))
        plain.tolerances[wanted] = tolerance
        return tolerance
