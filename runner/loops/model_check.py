"""Check a model of the user's own: weights, hooks, classes, and its outputs for samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runner.core.build.arguments import check_model_arguments, count_samples
from runner.core.checks.model import ModelReport, is_dense
from runner.core.checks.model import check_model as check_weights
from runner.core.errors import UsageError
from runner.core.findings import Reason, Severity
from runner.core.format import count_noun
from runner.core.interfaces.batch import Inputs
from runner.core.interfaces.nested import describe, find_logits, named_leaves
from runner.loops.inference import count_non_finite, has_constant_output, safe_inference
from runner.loops.input_checks import check_limits, sample_numbers
from runner.loops.optimize import Optimized

CALLER = "check_model"
HUGE = 1e6  # size of a weight
OWN_PACKAGES = ("torch", "runner")
HOOK_DICTIONARIES = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks"),
    *("_load_state_dict_post_hooks", "_post_accumulate_grad_hooks"),
)
"""Attributes of modules and parameters in which torch keeps hooks."""


def check_model(
    model: nn.Module | Optimized,
    probes: Inputs | None = None,
    *,
    low: float | None = None,
    high: float | None = None,
    trusted: Sequence[str] | None = None,
) -> ModelReport:
    """Check a model; `print` shows the report, `.ok` is False from a warning on.

    Faults are NaN and Inf in weights and buffers. Warnings are empty parameters, weights above 1e6
    (`weights.huge`), weights of two or more dimensions that are all zero (`weights.dead`), and
    hooks that neither torch nor the runner registered (`hooks.unexpected`). Mixed float types are a
    note. With `trusted`, names of packages or modules, modules of classes outside of these, torch
    and the runner are warnings (`class.foreign`).

    `probes` are model inputs. NaN and Inf in the outputs are faults (`outputs.not_finite`).
    Warnings are outputs that do not depend on the sample (`outputs.constant`: they differ by at
    most 1e-6 of their size), scores [samples, classes] of which one class is always the largest
    (`outputs.one_class`), and outputs outside `low` to `high` (`outputs.range`; they are then
    numbers, and not scores of classes). One probe tells neither constant nor one_class.

    The model is not changed. Raises UsageError. The host waits for the device.
    """
    module = model.model if isinstance(model, Optimized) else model
    check_model_arguments(CALLER, module)
    check_limits(CALLER, low, high)
    has_limits = (low, high) != (None, None)
    if has_limits and probes is None:
        raise UsageError(f"{CALLER}: low and high are limits of outputs; give probes, too")
    if isinstance(trusted, str) or not all(isinstance(name, str) for name in trusted or ()):
        problem = f"trusted must be a list of names of packages, got {describe(trusted)}"
        raise UsageError(f"{CALLER}: {problem}")
    report = check_weights(module)
    reasons = [*report.reasons, *_weight_reasons(module), *_hook_reasons(module)]
    if trusted is not None:
        reasons += _class_reasons(module, (*OWN_PACKAGES, *trusted))
    if probes is not None:
        samples = count_samples(probes, f"{CALLER}: probes")
        output = safe_inference(model, probes, sanitise=False).output
        if has_limits:
            reasons += _range_reasons(output, low, high)
        reasons += _behaviour_reasons(output, samples, are_scores=not has_limits)
    return ModelReport(reasons, report.facts)


@torch.no_grad()
def _weight_reasons(module: nn.Module) -> Iterator[Reason]:
    for name, parameter in module.named_parameters():
        if not is_dense(parameter) or not parameter.numel():
            continue
        if not (parameter.is_floating_point() or parameter.is_complex()):
            continue
        size = parameter.abs().float() if parameter.element_size() > 1 else parameter.float().abs()
        largest = float(size.nan_to_num(0, 0).max())  # NaN and Inf have their own finding
        if largest > HUGE:
            evidence = f"its largest value is {largest:.3g}"
            yield Reason("weights.huge", Severity.WARNING, name, evidence, "initialise it again")
        if parameter.ndim >= 2 and not parameter.count_nonzero():
            yield Reason("weights.dead", Severity.WARNING, name, "all its values are 0")


def _hook_reasons(module: nn.Module) -> Iterator[Reason]:
    named: list[tuple[str, Any]] = [*module.named_modules(), *module.named_parameters()]
    for name, owner in named:
        for attribute in HOOK_DICTIONARIES:
            hooks = getattr(owner, attribute, None) or {}
            for hook in hooks.values():
                package, label = _origin(hook)
                if not _is_in(package, OWN_PACKAGES):
                    kind = attribute.strip("_").removesuffix("s").replace("_", " ")
                    evidence = f"{kind} {package}.{label}"
                    yield Reason("hooks.unexpected", Severity.WARNING, name, evidence)


def _origin(hook: Any) -> tuple[str, str]:
    """Return module and name of the function or class that a hook is made of."""
    while True:
        if isinstance(hook, partial):
            hook = hook.func
        elif hasattr(hook, "__wrapped__"):
            hook = hook.__wrapped__
        elif type(hook).__name__ == "_WrappedHook":  # of torch, around each pre-hook of load
            hook = hook.hook
        else:
            break
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return str(named.__module__), str(named.__qualname__)


def _class_reasons(module: nn.Module, trusted: Sequence[str]) -> Iterator[Reason]:
    counts, first = Counter[type](), dict[type, str]()
    for name, part in module.named_modules():
        if not _is_in(type(part).__module__, trusted):
            counts[type(part)] += 1
            first.setdefault(type(part), name)
    for kind, count in counts.items():
        evidence = f"{count_noun(count, 'module')} of {kind.__module__}.{kind.__qualname__}"
        fix = "check its code, and name its package in trusted"
        yield Reason("class.foreign", Severity.WARNING, first[kind], evidence, fix)


def _is_in(name: str, packages: Sequence[str]) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def _behaviour_reasons(output: Any, samples: int, are_scores: bool) -> Iterator[Reason]:
    """Yield findings on the outputs of all samples together; a note if there is but one."""
    lines = count_non_finite(output, "output")[1]
    for text in lines:
        yield Reason("outputs.not_finite", Severity.REFUSAL, "", text)
    if lines:
        return
    if samples < 2:
        text = "outputs of one probe: whether they are constant, or one class, is not checked"
        yield Reason("outputs.one_probe", Severity.NOTE, "", text, "give two or more")
        return
    if has_constant_output(output, samples):
        text = f"output: the same for all {samples:,} samples"
        yield Reason("outputs.constant", Severity.WARNING, "", text)
    scores = find_logits(output)
    if not are_scores or not isinstance(scores, Tensor):
        return
    is_table = scores.ndim == 2 and scores.shape[0] == samples and scores.shape[1] > 1
    if is_table and scores.is_floating_point():
        classes = scores.argmax(1)
        if (classes == classes[0]).all():
            text = f"output: class {int(classes[0])} for all {samples:,} samples"
            yield Reason("outputs.one_class", Severity.WARNING, "", text)


def _range_reasons(output: Any, low: float | None, high: float | None) -> Iterator[Reason]:
    logits = find_logits(output)
    for name, tensor in named_leaves(logits if isinstance(logits, Tensor) else output, "output"):
        if tensor.is_complex() or tensor.dtype is torch.bool or not is_dense(tensor):
            continue
        values = tensor.double()
        bad = torch.zeros_like(values, dtype=torch.bool)
        bad |= False if low is None else values < low
        bad |= False if high is None else values > high
        bad &= values.isfinite()
        if bad.any():
            limits = f"{'-Inf' if low is None else low} to {'Inf' if high is None else high}"
            text = f"{name}: {count_noun(int(bad.sum()), 'value')} outside {limits}"
            if bad.ndim:
                text += f", {sample_numbers(bad.reshape(len(bad), -1).any(1))}"
            yield Reason("outputs.range", Severity.WARNING, "", text)
