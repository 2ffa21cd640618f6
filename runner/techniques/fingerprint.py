"""What a technique of the user's own changed, measured apart from what it says of itself."""

from __future__ import annotations

from collections import Counter
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from runner.techniques.base import Evidence, RunBuilder, Technique
from runner.techniques.probe import OperatorObserver, entered, saved_bytes, trial_step
from runner.training.run import Run

if TYPE_CHECKING:
    from runner.device.device import Device

CLAIM = "claimed by the technique itself"
SAMPLES = 8  # of the step that is compared
SHOWN_IN_A_STEP = {"model", "forward", "contexts", "placements", "remarks", "choices", "scope"}
"""Fields of a draft whose change says nothing by itself."""


def fingerprint(draft: RunBuilder) -> dict[str, Any]:
    """What can be observed of a draft, by the name that a change of it is reported under."""
    names = {one.name for one in fields(draft)} - SHOWN_IN_A_STEP
    settings = {name: getattr(draft, name) for name in names}
    settings = {k: copy(v) if isinstance(v, dict | list) else v for k, v in settings.items()}
    model, kind = draft.model, draft.device.kind
    with entered(draft.contexts):
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    return {
        **settings,
        "types and layout of weights": {
            name: (weight.dtype, weight.stride(), weight.requires_grad)
            for name, weight in [*model.named_parameters(), *model.named_buffers()]
        },
        "compiled modules": [module._compiled_call_impl is None for module in model.modules()],
        "compiled forward": hasattr(draft.forward, "_torchdynamo_orig_callable"),
        "switches of the process": [
            autocast,
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.benchmark,
        ],
        **_step(draft),
    }


def _step(draft: RunBuilder) -> dict[str, Any]:
    """Operators, numbers and memory of a forward and backward over a few samples, uncompiled."""
    numbers: list[float] = []
    operators: Counter[tuple[str, Any]] = Counter()

    def note(operator: Any, output: Any) -> None:
        operators[str(operator), getattr(output, "dtype", None)] += 1

    def step() -> None:
        loss, gradients = trial_step(draft, min(SAMPLES, draft.micro_batch))
        numbers.extend(float(t.double().sum()) for t in (loss, *gradients) if t is not None)

    try:
        with OperatorObserver(note):
            memory = saved_bytes(draft.model, step)
    except Exception as error:  # such as of a model that knows its batch size
        return {"a step": type(error)}
    return {"memory for the backward": memory, "numbers": numbers, "operators": operators}


def _differ(before: Any, after: Any) -> bool:
    try:
        return bool(before != after)
    except (RuntimeError, TypeError, ValueError):  # tensors and arrays have no one answer
        return before is not after


@dataclass
class MeasuredTechnique(Technique):
    """A technique of the user's own, whose evidence is its claim: what it changes is measured."""

    technique: Technique = field(kw_only=True)
    measured: list[str] = field(default_factory=list)  # names of changes

    def unavailable(self, device: Device) -> str | None:
        """As the technique says."""
        return self.technique.unavailable(device)

    def apply(self, draft: RunBuilder) -> str | None:
        """Apply it between two fingerprints; what differs without it, too, tells nothing."""
        first, before = fingerprint(draft), fingerprint(draft)
        reason = self.technique.apply(draft)
        after = fingerprint(draft)
        for name, value in before.items():
            if not _differ(first.get(name), value) and _differ(value, after.get(name)):
                self.measured.append(name)
        return reason

    def engaged(self, run: Run) -> Evidence:
        """Its own evidence, beside the changes that were measured."""
        evidence = self.technique.engaged(run)
        if not evidence.engaged:
            return evidence
        facts = {"measured": ", ".join(self.measured) or "nothing", **evidence.facts}
        if not self.measured:
            return Evidence(False, "claims to be engaged; nothing measurable changed", facts)
        return replace(
            evidence, reason="; ".join(filter(None, (CLAIM, evidence.reason))), facts=facts
        )
