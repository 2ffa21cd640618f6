"""The look at the model of a run, before training and after it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from runner.batch import rows
from runner.checks.config import ModelCheckConfig
from runner.checks.model.answers import Expected
from runner.checks.model.look import look
from runner.checks.model.report import ModelReport
from runner.hook import Hook
from runner.nest import tensors
from runner.run import Run
from runner.security.config import SecurityConfig, SecurityLevel
from runner.security.trust import Severity

log = logging.getLogger("runner")

SEVERITIES = {Severity.WARNING: "warning", Severity.REFUSAL: "error"}
TAG = "checks/model"
TEXTS = 8  # samples that language models are looked at with
STEPS = 200  # after which a model should tell samples apart, where that is less than an epoch


class ModelCheck(Hook):
    """Looks at weights and structure before the first step; after the last at behaviour too.

    What is worse than a note goes to the history; all of it to TensorBoard and, in short, to the
    summary. It never ends a run.
    """

    def __init__(self, config: ModelCheckConfig, security: SecurityConfig) -> None:
        self.config = config
        self.trusted: Sequence[str] = security.trusted
        strict = security.level is SecurityLevel.strict
        self.foreign = Severity.WARNING if strict else Severity.NOTE

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Before and after; a run that ends early keeps what was found before."""
        self.look(run, probe=False)
        yield
        self.look(run, probe=True)

    def look(self, run: Run, probe: bool) -> ModelReport | None:
        """At the weights that are evaluated; with `probe` at what they make of validation samples.

        A look that fails is a line of the history, and none of the run's business.
        """
        try:
            report = self._look(run, probe)
        except Exception as error:
            run.history.add(
                "model_check_failed", f"checks.model: {type(error).__name__}: {error}",
                step=run.progress.step, category="code", action="the run goes on", error=error,
            )  # fmt: skip
            return None
        step = run.progress.step
        for reason in report.findings:
            run.history.add(
                reason.code, f"model: {reason}", step=step, category="model",
                severity=SEVERITIES[reason.severity],
            )  # fmt: skip
        run.model_check = report.compact() | {"after_training": probe}
        run.recorder.text(TAG, report.markdown(), step)
        return report

    def _look(self, run: Run, probe: bool) -> ModelReport:
        inputs, targets = None, None
        if probe:
            most = min(self.config.probes, run.evaluation_batch or self.config.probes)
            if _language(run):  # each token is an answer
                most = min(most, TEXTS)
            inputs, targets = rows(run.validation.peek(), slice(most))
            if not tensors(inputs):
                inputs = None
        trained = run.epoch >= 1 or run.progress.step >= STEPS
        expected = Expected(
            outputs=_outputs(run),
            classes=run.sizes.vocab if run.sizes.vocab and _language(run) else run.sizes.classes,
            targets=targets if isinstance(targets, Tensor) else None,
            trained=trained,
        )
        with run.update.averaged(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # training has said what the model warns of
            return look(
                run.model, inputs, trusted=self.trusted, foreign=self.foreign, expected=expected,
                contexts=run.contexts,
            )  # fmt: skip


def _language(run: Run) -> bool:
    return run.sizes.task == "language_modelling"


def _outputs(run: Run) -> str | None:
    """What the objective takes; None where it is the user's own."""
    if run.objective.indices is None:
        return None
    return "logits" if run.objective.indices else "values"
