"""Measured effects of a user's technique, independent of its own evidence."""

from __future__ import annotations

import inspect
from collections import Counter
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from runner.core.device import numerics
from runner.core.errors import UsageError
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import Evidence, RunBuilder, Technique
from runner.core.techniques.model_calls import enter_contexts, probe_step
from runner.core.techniques.probe import OperatorObserver, saved_bytes

if TYPE_CHECKING:
    from runner.core.device.device import Device

CLAIM = "claimed by the technique itself"
SAMPLES = 8  # in the compared step
FIELDS_READ = (
    *("device", "loss_scale", "micro_batch", "optimizer_class"),
    *("switches", "total_steps", "whole_step_options"),
)
"""Fields of a builder that the rest of the build, or the run, reads and that are compared as such.

The effects of model, forward, objective, contexts and placements are seen in the compared step.
"""
LOADER_FIELDS = "workers drop_last bad_samples", "prefetch persistent_workers"
CUDA_LOADER_FIELDS = "pin_memory device_prefetch"
"""Fields of `data` that every loader reads, those for workers, and those for a GPU."""


def fingerprint(builder: RunBuilder) -> dict[str, Any]:
    """Return the observable state of a builder, by the name under which a change is reported."""
    settings = {name: getattr(builder, name) for name in FIELDS_READ}
    settings = {k: copy(v) if isinstance(v, dict | list) else v for k, v in settings.items()}
    model, kind = builder.model, builder.device.kind
    precisions = numerics.read_fp32_precision()
    if kind != "cuda":
        precisions = {n: value for n, value in precisions.items() if n.startswith("mkldnn")}
    with enter_contexts(builder.contexts):
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    return {
        **settings,
        "optimizer_options": _effective_options(builder),
        "data": _loader_settings(builder),
        "types and layout of weights": {
            name: (weight.dtype, weight.stride(), weight.requires_grad)
            for name, weight in [*model.named_parameters(), *model.named_buffers()]
        },
        "compiled modules": [module._compiled_call_impl is None for module in model.modules()],
        "compiled forward": hasattr(builder.forward, "_torchdynamo_orig_callable"),
        "switches of the process": [
            autocast,
            torch.get_num_threads(),
            torch.get_default_dtype(),
            precisions,
            kind == "cuda" and torch.backends.cudnn.benchmark,
        ],
        **_step_effects(builder),
    }


def _effective_options(builder: RunBuilder) -> dict[str, Any]:
    """Return the optimizer's options, with its defaults where none are set."""
    parameters = inspect.signature(builder.optimizer_class).parameters.values()
    options = {p.name: p.default for p in parameters if p.default is not p.empty}
    options |= builder.optimizer_options
    if builder.device.kind == "cpu":  # where False is torch's default
        options |= {name: options.get(name) or None for name in ("foreach", "fused")}
    return options


def _loader_settings(builder: RunBuilder) -> list[Any]:
    always, for_workers = LOADER_FIELDS
    names = [always, for_workers * bool(builder.data.workers)]
    names.append(CUDA_LOADER_FIELDS * (builder.device.kind == "cuda"))
    return [getattr(builder.data, name) for name in " ".join(names).split()]


def _step_effects(builder: RunBuilder) -> dict[str, Any]:
    """Return operators, sums of results and saved bytes of an uncompiled forward and backward."""
    numbers: list[float] = []
    operators: Counter[tuple[str, Any]] = Counter()

    def count_operator(operator: Any, output: Any) -> None:
        operators[str(operator), getattr(output, "dtype", None)] += 1

    def step() -> None:
        loss, gradients = probe_step(builder, min(SAMPLES, builder.micro_batch))
        numbers.extend(float(t.double().sum()) for t in (loss, *gradients) if t is not None)

    try:
        with OperatorObserver(count_operator):
            memory = saved_bytes(builder.model, step)
    except Exception as error:  # such as a model with a fixed batch size
        return {"a step": type(error)}
    return {"memory for the backward": memory, "numbers": numbers, "operators": operators}


def _is_changed(before: Any, after: Any) -> bool:
    try:
        return bool(before != after)
    except (RuntimeError, TypeError, ValueError):  # tensors and arrays give no single bool
        return before is not after


@dataclass
class MeasuredTechnique(Technique):
    """Wrapper that measures what a user's technique changes."""

    technique: Technique = field(kw_only=True)
    changes: list[str] = field(default_factory=list)  # names of what it changed

    def unavailable(self, device: Device) -> str | None:
        """Return the technique's own reason, or None."""
        return self.technique.unavailable(device)

    def apply(self, builder: RunBuilder) -> str | None:
        """Apply it between two fingerprints; ignore what also differs between repeated ones."""
        first, before = fingerprint(builder), fingerprint(builder)
        reason = self.technique.apply(builder)
        after = fingerprint(builder)
        for name, value in before.items():
            if not _is_changed(first.get(name), value) and _is_changed(value, after.get(name)):
                self.changes.append(name)
        return reason

    def engaged(self, run: Run) -> Evidence:
        """Return its evidence and the measured changes; not engaged without any."""
        evidence: Any = self.technique.engaged(run)
        if not isinstance(evidence, Evidence):
            call, got = f"engaged() of {type(self.technique).__name__}", type(evidence).__name__
            raise UsageError(f"{call} must return runner.Evidence, got {got}")
        if not evidence.engaged:
            return evidence
        facts = {"measured": ", ".join(self.changes) or "nothing", **evidence.facts}
        if not self.changes:
            return Evidence(False, "claims to be engaged; nothing measurable changed", facts)
        reason = "; ".join(filter(None, (CLAIM, evidence.reason)))
        return replace(evidence, reason=reason, facts=facts)
