"""What a technique of the user's own changed, measured apart from what it says of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from runner.data.batch import call
from runner.data.nested import tensors
from runner.device import denormals
from runner.techniques.base import Evidence, RunBuilder, Technique
from runner.techniques.probe import OperatorObserver, entered, sample_batch, untouched
from runner.training.run import Run

if TYPE_CHECKING:
    from runner.device.device import Device

CLAIM = "claimed by the technique itself"
SAMPLES = 8  # of the step whose operators are compared
COMPILED = ("_orig_mod", "_torchdynamo_orig_callable")  # attributes of what torch.compile returns
MEASURED_OTHERWISE = {"model", "forward", "contexts", "placements", "remarks", "choices", "scope"}
"""Fields of a draft whose change says nothing by itself: it shows in a step, or nowhere."""


def fingerprint(draft: RunBuilder) -> dict[str, Any]:
    """What can be observed of a draft, by the name that a change of it is reported under."""
    names = {one.name for one in fields(draft)} - MEASURED_OTHERWISE
    return {
        **_state(draft.model, draft.contexts, draft.device.kind),
        **_step(draft),
        **{name: _copied(getattr(draft, name)) for name in names},
        "compiled forward": [hasattr(draft.forward, name) for name in COMPILED],
    }


def _state(model: nn.Module, contexts: Sequence[Callable[[], Any]], kind: str) -> dict[str, Any]:
    """The part of it that can be observed in a run, too."""
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with entered(contexts):
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "types and layout of weights": {
            name: (weight.dtype, weight.device, weight.stride(), weight.requires_grad)
            for name, weight in weights.items()
        },
        "compiled modules": [module._compiled_call_impl is None for module in model.modules()],
        "switches of the process": [
            autocast,
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            *(cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.enabled, cudnn.benchmark),
            (torch._C._get_flash_sdp_enabled(), torch._C._get_math_sdp_enabled()),
            torch.backends.mkldnn.enabled,
            denormals.flushed(),
        ],
    }


def _step(draft: RunBuilder) -> dict[str, Any]:
    """Operators, numbers and memory of a forward and backward over a few samples, uncompiled."""
    operators: Counter[tuple[str, Any]] = Counter()
    held: Counter[int] = Counter()

    def note(operator: Any, output: Any) -> None:
        operators[str(operator), getattr(output, "dtype", None)] += 1

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.nbytes] += 1
        return tensor

    inputs, target = sample_batch(draft, min(SAMPLES, draft.micro_batch))
    weights = [p for p in draft.model.parameters() if p.requires_grad]
    try:
        with (
            untouched(draft),
            torch.compiler.set_stance("force_eager"),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved),
            OperatorObserver(note),
        ):
            with entered(draft.contexts):
                loss = draft.objective(call(draft.forward, inputs), target)
            gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    except Exception as error:  # such as of a model that knows its batch size
        return {"operators of a step": type(error)}
    return {
        "operators of a step": operators,
        "numbers of a step": [
            float(loss.detach()),
            *(float(g.double().sum()) for g in gradients if g is not None),
        ],
        "memory for the backward": held,
        "layout of batches": [(t.dtype, t.shape, t.stride()) for t in tensors((inputs, target))],
    }


def _copied(value: Any) -> Any:
    return copy(value) if isinstance(value, dict | list) else value


def _differ(before: Any, after: Any) -> bool:
    try:
        return bool(before != after)
    except (RuntimeError, TypeError, ValueError):  # tensors and arrays have no one answer
        return before is not after


@dataclass
class MeasuredTechnique(Technique):
    """A technique of the user's own, whose evidence is its claim: what it changes is measured."""

    technique: Technique = field(kw_only=True)
    changes: dict[str, Any] = field(default_factory=dict)  # what differs after it, as it was before

    def unavailable(self, device: Device) -> str | None:
        """As the technique says."""
        return self.technique.unavailable(device)

    def apply(self, draft: RunBuilder) -> str | None:
        """Apply it between two looks; what differs between two looks before it tells nothing."""
        first, before = fingerprint(draft), fingerprint(draft)
        reason = self.technique.apply(draft)
        after = fingerprint(draft)
        self.changes = {
            name: value
            for name, value in before.items()
            if not _differ(first[name], value) and _differ(value, after[name])
        }
        return reason

    def engaged(self, run: Run) -> Evidence:
        """Its own evidence, held against what was seen to change and still differs."""
        evidence = self.technique.engaged(run)
        if not evidence.engaged:
            return evidence
        now = _state(run.model, run.contexts, run.device.kind)
        measured = [
            name
            for name, before in self.changes.items()
            if name not in now or _differ(before, now[name])
        ]
        facts = {"measured": ", ".join(measured) or "nothing", **evidence.facts}
        if measured:
            reason = "; ".join(filter(None, (CLAIM, evidence.reason)))
            return replace(evidence, reason=reason, facts=facts)
        what = "its changes were undone" if self.changes else "nothing measurable changed"
        return Evidence(False, f"claims to be engaged; {what}", facts)
