"""Check a batch of a user's own loop as `checks.inputs` checks those of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.core.build.arguments import as_batch, check_whole_number, count_samples
from runner.core.checks.batch import FORM, BatchChecks, BatchFinding, DataSpec, find_problems
from runner.core.checks.batch_validator import FIXES, MAX_NAMED_SAMPLES
from runner.core.checks.model import ModelReport
from runner.core.errors import UsageError
from runner.core.findings import Reason, Severity
from runner.core.interfaces.batch import LABEL_KEYS, Batch
from runner.core.interfaces.nested import named_leaves, tensors
from runner.core.schemas.checks import InputsConfig

CALLER = "validate_inputs"
WARNINGS = ("range", "constant")  # other kinds are faults


def validate_inputs(
    batch: Any,
    *,
    like: Any = None,
    low: float | None = None,
    high: float | None = None,
    classes: int | None = None,
) -> ModelReport:
    """Check a batch before it is used; `print` shows the report, `.ok` is False on findings.

    `batch` is (inputs, target) as in `train_step`, or inputs alone as a tensor or a dict; arrays
    are taken, too. Kinds of findings: `form` (dtype, dimensions or features unlike those of `like`,
    an earlier batch, or another number of targets), `not_finite`, `range` (inputs outside `low` to
    `high`), `labels` (outside 0 to `classes` - 1) and `constant` (all inputs are one value). Their
    evidence has the numbers of the samples. Labels of -100 carry no loss and are not checked.

    Raises UsageError, for an empty batch, too. The host waits for the device.
    """
    check_limits(CALLER, low, high)
    if classes is not None:
        check_whole_number(CALLER, "classes", classes, 1)
    parts = _split(batch, "batch")
    reference = parts if like is None else _split(like, "like")
    checks = input_checks(reference, classes)
    checkable = checks.checkable_tensors(parts)
    findings = [*find_problems(checks, checkable), *_count_findings(parts, reference)]
    if (bound := high if low is None else low) is not None:
        # of the finite values: others have their own kind
        checks.config.schema.low, checks.config.schema.high = low, high
        finite = {
            name: t.nan_to_num(bound, bound, bound) if t.is_floating_point() else t
            for name, t in checkable.items()
        }
        findings += [row for row in find_problems(checks, finite) if row.check == "range"]
    reasons = [_reason(finding) for finding in findings]
    facts = {"not_checked": sorted(checks.unchecked)} if checks.unchecked else {}
    return ModelReport(reasons, {"samples": count_samples(parts[0], CALLER)} | facts)


def input_checks(reference: Batch, classes: int | None = None) -> BatchChecks:
    """Return the checks of batches that must have the form of `reference`."""
    checks = BatchChecks(InputsConfig(), DataSpec(classes=classes, ignored=-100))
    checks.form_finding(checks.checkable_tensors(reference))
    return checks


def check_limits(caller: str, low: Any, high: Any) -> None:
    """Raise UsageError unless both are numbers or None, and in order."""
    for name, value in (("low", low), ("high", high)):
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if value is not None and (not is_number or math.isnan(value)):
            raise UsageError(f"{caller}: {name} must be a number or None, got {value!r}")
    if low is not None and high is not None and low > high:
        raise UsageError(f"{caller}: low must be at most high, got {low} > {high}")


def sample_numbers(bad: Tensor) -> str:
    """Describe which samples are bad; `bad` is bool [samples]."""
    numbers = bad.nonzero().flatten().tolist()
    more = ", …" * (len(numbers) > MAX_NAMED_SAMPLES)
    shown = ", ".join(map(str, numbers[:MAX_NAMED_SAMPLES]))
    return f"in {len(numbers)} of {len(bad)} samples: {shown}{more}"


def _split(batch: Any, name: str) -> Batch:
    """Return (inputs, target) with arrays as tensors; the target is None for inputs alone."""
    batch = _to_tensors(batch)
    has_label = isinstance(batch, dict) and any(key in batch for key in LABEL_KEYS)
    is_pair = isinstance(batch, tuple | list) and len(batch) >= 2
    inputs, target = as_batch(batch, CALLER) if has_label or is_pair else (batch, None)
    count_samples(inputs, f"{CALLER}: {name}")
    return inputs, target


def _to_tensors(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiubc":
        return torch.as_tensor(value)
    if isinstance(value, dict):
        return {key: _to_tensors(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        parts = [_to_tensors(item) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _count_findings(batch: Batch, reference: Batch) -> Iterator[BatchFinding]:
    """Yield a finding for each tensor with another number of rows than the batch has samples.

    Vectors, square matrices and what `reference` has as often may be shared by all samples; a
    sample may have several targets.
    """
    samples, target = len(tensors(batch[0])[0]), batch[1]
    earlier = {(name, len(t)) for name, t in named_leaves(reference[0], "inputs") if t.ndim}
    is_list = isinstance(batch[0], list)
    for name, tensor in named_leaves(batch[0], "inputs"):
        rows = tensor.shape[0] if tensor.ndim else samples
        may_be_shared = not is_list and (tensor.ndim < 2 or rows == tensor.shape[1])
        known = reference is not batch and (name, rows) in earlier
        if rows != samples and not (may_be_shared or known):
            yield BatchFinding(FORM, f"{name} has {rows} rows for {samples} samples")
    if isinstance(target, Tensor) and target.ndim and (not len(target) or len(target) % samples):
        yield BatchFinding(FORM, f"target has {len(target)} rows for {samples} samples")


def _reason(finding: BatchFinding) -> Reason:
    severity = Severity.WARNING if finding.check in WARNINGS else Severity.REFUSAL
    where, _, evidence = finding.message.partition(": ")
    if not evidence:  # a message on the form begins with the name of the tensor
        where, _, evidence = finding.message.partition(" ")
    if finding.bad is not None:
        evidence += f", {sample_numbers(finding.bad)}"
    fix = FIXES[finding.check].partition(", or ")[0]
    return Reason(finding.check, severity, where, evidence, fix)
