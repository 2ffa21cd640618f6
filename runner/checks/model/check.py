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
from runner.checks.model.weights import check_weights, is_plain, named_tensors
from runner.data.batch import Inputs, rows
from runner.data.nested import tensors, tree_map
from runner.models import modes
from runner.models.preserved_state import large_parameters, preserve_state
from runner.record.text import shorten
from runner.security.trust import Severity
from runner.training.hook import Hook
from runner.training.run import Run

MAX_SAMPLES = 256  # of the probes that are given
SEVERITIES = {Severity.WARNING: "warning", Severity.REFUSAL: "error"}
MAX_TEXTS = 8  # samples that language models are probed with
TRAINED_STEPS = 200  # after which a model should tell samples apart, where an epoch is longer


def check_model(
    model: nn.Module,
    probes: Inputs | None = None,
    *,
    expected: Expected | None = None,
    contexts: Sequence[Callable[[], AbstractContextManager[Any]]] = (),
) -> ModelReport:
    """The findings about a model, which stays as it is.

    With probes (the first MAX_SAMPLES of them) it is called up to twice, in eval mode, without
    gradients and uncompiled. Buffers, modes, attributes and random states are put back; so are
    parameters, but for very large ones, of which a forward that writes to them is only reported.
    The host waits for the device a few times.
    """
    start = time.perf_counter()
    expected = expected or Expected()
    named = named_tensors(model)
    reasons = list(check_weights(named, expected.trained))
    plain = [one.tensor.numel() for one in named if one.is_parameter and is_plain(one.tensor)]
    facts: dict[str, Any] = {
        "parameters": sum(plain),
        "trained": expected.trained,
        "not_checked": [one.name for one in named if not is_plain(one.tensor)],
    }
    if probes is not None:
        samples = max((len(t) for t in tensors(probes) if t.ndim), default=0)
        facts["probes"] = min(samples, MAX_SAMPLES)
        if samples > MAX_SAMPLES:
            cut = slice(MAX_SAMPLES)
            probes = tree_map(probes, lambda t: t[cut] if t.ndim and len(t) == samples else t)
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
                evidence = f"{type(error).__name__}: {shorten(str(error), 200)}"
                reasons.append(make_reason("behaviour.raises", Severity.WARNING, "", evidence))
    facts["seconds"] = time.perf_counter() - start
    return ModelReport(reasons, facts)


class ModelCheck(Hook):
    """Checks the weights before the first step; after the last one behaviour as well.

    Findings worse than a note go to the history, the worst to the summary. It never ends a run.
    """

    def __init__(self, config: ModelCheckConfig) -> None:
        self.config = config

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Before and after; a run that ends early keeps the findings of before."""
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
                kind, message, step=step, category="code", action="the run continues", error=error
            )
            return None
        for reason in report.findings:
            severity = SEVERITIES[reason.severity]
            message = f"model: {reason}"
            run.history.add(reason.code, message, step=step, category="model", severity=severity)
        run.model_check = report.compact() | {"after_training": probe}
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
            warnings.simplefilter("ignore")  # training has given the model's own warnings
            return check_model(run.model, inputs, expected=expected, contexts=run.contexts)
