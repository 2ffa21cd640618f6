"""`check_model` and the hook that runs it before training and after it."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from runner.checks.config import ModelCheckConfig
from runner.checks.model.behaviour import Expected, check_behaviour
from runner.checks.model.report import ModelReport, make_reason
from runner.checks.model.structure import check_structure
from runner.checks.model.weights import check_weights, is_plain, named_tensors, tied_names
from runner.data.batch import Inputs, rows
from runner.data.nested import tensors, tree_map
from runner.models import modes
from runner.models.preserved_state import large_parameters, preserve_state
from runner.record.text import shorten
from runner.security.config import SecurityConfig, SecurityLevel
from runner.security.trust import Reason, Severity
from runner.training.hook import Hook
from runner.training.run import Run

MAX_SAMPLES = 256  # of the probes that are given
SEVERITIES = {Severity.WARNING: "warning", Severity.REFUSAL: "error"}
TAG = "checks/model"
MAX_TEXTS = 8  # samples that language models are probed with
TRAINED_STEPS = 200  # after which a model should tell samples apart, where an epoch is longer


def check_model(
    model: nn.Module,
    probes: Inputs | None = None,
    *,
    trusted: Sequence[str] = (),
    foreign: Severity = Severity.NOTE,
    expected: Expected | None = None,
    contexts: Sequence[Callable[[], AbstractContextManager[Any]]] = (),
) -> ModelReport:
    """The findings about a model, which stays as it is.

    With probes (the first MAX_SAMPLES of them) it is called up to three times, in eval mode,
    without gradients and uncompiled. Buffers, modes, attributes and random states are put back; so
    are parameters, but for very large ones, of which a forward that writes to them is only
    reported. The host waits for the device a few times.
    """
    start = time.perf_counter()
    expected = expected or Expected()
    named = named_tensors(model)
    reasons = [
        *check_weights(model, named, expected.trained),
        *check_structure(model, named, trusted, foreign),
    ]
    plain = [one.tensor.numel() for one in named if one.is_parameter and is_plain(one.tensor)]
    facts: dict[str, Any] = {
        "parameters": sum(plain),
        "trained": expected.trained,
        "tied": tied_names(model),
        "not_checked": [one.name for one in named if not is_plain(one.tensor)],
    }
    if probes is not None:
        probes, facts["probes"] = _first_samples(probes)
        device = next((one.tensor.device for one in named), torch.device("cpu"))
        with ExitStack() as stack:
            stack.enter_context(preserve_state(model, device=device, safe=large_parameters(model)))
            stack.enter_context(modes.evaluation_mode(model))
            if "torch._dynamo" in sys.modules:  # another number of samples would recompile
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for context in contexts:
                stack.enter_context(context())
            try:
                reasons += check_behaviour(model, probes, expected, named, facts)
            except Exception as error:  # a model that raises is a finding
                reasons.append(_raised(error))
    facts["seconds"] = time.perf_counter() - start
    return ModelReport(reasons, facts)


def _raised(error: Exception) -> Reason:
    evidence = f"{type(error).__name__}: {shorten(str(error), 200)}"
    return make_reason("behaviour.raises", Severity.WARNING, "", evidence)


def _first_samples(probes: Inputs) -> tuple[Inputs, int]:
    samples = max((len(t) for t in tensors(probes) if t.ndim), default=0)
    if samples <= MAX_SAMPLES:
        return probes, samples
    cut = tree_map(probes, lambda t: t[:MAX_SAMPLES] if t.ndim and len(t) == samples else t)
    return cut, MAX_SAMPLES


class ModelCheck(Hook):
    """Checks weights and structure before the first step; after the last behaviour as well.

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
        self.check(run, probe=False)
        yield
        self.check(run, probe=True)

    def check(self, run: Run, probe: bool) -> ModelReport | None:
        """Check the weights that are evaluated; with `probe` their answers to validation samples.

        A check that fails is a line of the history and does not end the run.
        """
        step = run.progress.step
        try:
            report = self._check(run, probe)
        except Exception as error:
            kind, message = "model_check_failed", f"checks.model: {type(error).__name__}: {error}"
            run.history.add(
                kind, message, step=step, category="code", action="the run goes on", error=error
            )
            return None
        for reason in report.findings:
            severity = SEVERITIES[reason.severity]
            message = f"model: {reason}"
            run.history.add(reason.code, message, step=step, category="model", severity=severity)
        run.model_check = report.compact() | {"after_training": probe}
        run.recorder.text(TAG, report.markdown(), step)
        return report

    def _check(self, run: Run, probe: bool) -> ModelReport:
        inputs, targets, sizes = None, None, run.sizes
        language = sizes.task == "language_modelling"
        if probe:
            most = min(self.config.probes, run.evaluation_batch or self.config.probes)
            most = min(most, MAX_TEXTS) if language else most  # each token is an answer
            inputs, targets = rows(run.validation.peek(), slice(most))
            inputs = inputs if tensors(inputs) else None
        indices = run.objective.indices  # None: an objective of the user's own
        expected = Expected(
            outputs=None if indices is None else "logits" if indices else "values",
            classes=sizes.vocab if sizes.vocab and language else sizes.classes,
            targets=targets if isinstance(targets, Tensor) else None,
            trained=run.epoch >= 1 or run.progress.step >= TRAINED_STEPS,
        )
        with run.update.averaged(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # training has said what the model warns of
            return check_model(
                run.model,
                inputs,
                trusted=self.trusted,
                foreign=self.foreign,
                expected=expected,
                contexts=run.contexts,
            )
