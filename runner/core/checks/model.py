"""Checks of a model's weights and buffers: `check_model`, and the hook that calls it in a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from runner.core.findings import Reason, Severity
from runner.core.format import count_noun
from runner.core.interfaces.hook import Hook
from runner.core.interfaces.run import Run
from runner.core.record.text import escape_control_chars

SEVERITIES = {Severity.WARNING: "warning", Severity.REFUSAL: "error"}
MAX_SUMMARY_REASONS = 5  # reasons in a summary; all are in the report and the history


@dataclass
class ModelReport:
    """The findings about a model, worst first, printable; they never end a run."""

    reasons: list[Reason] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reasons = sorted(self.reasons, key=lambda r: -r.severity)

    @property
    def ok(self) -> bool:
        """Whether no finding is worse than a note."""
        return not self.findings

    @property
    def findings(self) -> list[Reason]:
        """Findings worse than a note."""
        return [reason for reason in self.reasons if reason.severity > Severity.NOTE]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        reasons = [asdict(r) | {"severity": r.severity.word} for r in self.reasons]
        return {"ok": self.ok, "reasons": reasons, "facts": self.facts}

    def compact(self) -> dict[str, Any]:
        """Return counts and the worst reasons, for a run's summary."""
        severities = [reason.severity for reason in self.reasons]
        counts = {f"{s.word}s": severities.count(s) for s in reversed(Severity)}
        return {"ok": self.ok, **counts, "worst": self.as_dict()["reasons"][:MAX_SUMMARY_REASONS]}

    def __str__(self) -> str:
        lines = [f"{r.severity.word} {r.code}: {r}" for r in self.reasons]
        lines += [f"{name.replace('_', ' ')}: {value}" for name, value in self.facts.items()]
        return "\n".join(map(escape_control_chars, lines))


@torch.no_grad()
def check_model(model: nn.Module) -> ModelReport:
    """Check for NaN and Inf (faults), empty parameters (warnings) and mixed float dtypes (notes).

    Tensors that are meta, lazy, quantized, sharded or sparse are listed, not checked. -Inf in a
    buffer other than `running_*` is ignored, as it may be a mask. One host sync per device, and
    more for each non-finite tensor.
    """
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    tensors = parameters | buffers
    dense = {name: t for name, t in tensors.items() if is_dense(t)}
    reasons = [*_value_reasons(dense, parameters), *_form_reasons(parameters)]
    counted = sum(t.numel() for name, t in dense.items() if name in parameters)
    skipped = {"not_checked": names} if (names := [n for n in tensors if n not in dense]) else {}
    return ModelReport(reasons, {"parameters": counted} | skipped)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the tensor is dense with values in memory, and no wrapper subclass."""
    if is_lazy(tensor) or tensor.is_meta or tensor.is_quantized:
        return False
    wrapper: object = tensor
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(wrapper)


def _value_reasons(dense: dict[str, Tensor], parameters: dict[str, Any]) -> Iterator[Reason]:
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in dense.items():
        if tensor.is_floating_point() and tensor.numel():
            wide = tensor.float() if tensor.element_size() == 1 else tensor
            by_device.setdefault(tensor.device, {})[name] = wide
    for group in by_device.values():
        limits = torch.stack([torch.stack(torch.aminmax(t)).float() for t in group.values()])
        for (name, tensor), (low, high) in zip(group.items(), limits.tolist(), strict=True):
            # an attention mask, or the minimum of an observer that has not seen a batch
            is_initial = low == -math.inf and high < math.inf or low == high == math.inf
            is_statistic = name.rpartition(".")[2].startswith("running_")
            allowed = is_initial and name not in parameters and not is_statistic
            if not (math.isfinite(low) and math.isfinite(high)) and not allowed:
                yield from _not_finite(name, tensor)


def _not_finite(name: str, tensor: Tensor) -> Iterator[Reason]:
    """Yield a reason with counts and the first index; none if Inf arose only in float32."""
    bad = ~torch.isfinite(tensor)
    nans = int(torch.isnan(tensor).sum())
    counts = ((nans, "NaN"), (int(bad.sum()) - nans, "Inf"))
    if kinds := " and ".join(f"{n:,} {kind}" for n, kind in counts if n):
        first = torch.nonzero(bad)[0].tolist()
        evidence = f"{kinds} of {count_noun(tensor.numel(), 'value')}, the first at {first}"
        fix = "load an earlier checkpoint, or initialise it again"
        yield Reason("weights.not_finite", Severity.REFUSAL, name, evidence, fix)


def _form_reasons(parameters: dict[str, nn.Parameter]) -> Iterator[Reason]:
    initialized = {name: p for name, p in parameters.items() if not is_lazy(p)}
    for name, parameter in initialized.items():
        if not parameter.numel():
            evidence = f"its shape {list(parameter.shape)} has no values"
            yield Reason("weights.empty", Severity.WARNING, name, evidence, "check its sizes for 0")
    types = sorted({str(p.dtype) for p in initialized.values() if p.is_floating_point()})
    if len(types) > 1:
        yield Reason("weights.dtypes", Severity.NOTE, "", f"parameters are {' and '.join(types)}")


class ModelCheck(Hook):
    """Checks the weights before the first step and after the last, for history and summary."""

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Check before and after training; after an exception the first findings remain."""
        self.check(run, after_training=False)
        yield
        self.check(run, after_training=True)

    def check(self, run: Run, after_training: bool) -> None:
        """Check the evaluated (averaged) weights, and record the findings."""
        with run.update.averaged():
            report = check_model(run.model)
        for reason in report.findings:
            run.history.add(
                reason.code, f"model: {reason}", step=run.progress.step, category="model",
                severity=SEVERITIES[reason.severity],
            )  # fmt: skip
        run.model_check = report.compact() | {"after_training": after_training}
