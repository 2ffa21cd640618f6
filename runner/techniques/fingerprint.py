"""What a technique of the user's own changed, measured apart from what it says of itself."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from runner.data.batch import call
from runner.data.nested import tensors
from runner.device import denormals
from runner.techniques import trial
from runner.techniques.base import Evidence, RunBuilder, Technique
from runner.techniques.operators import OperatorObserver
from runner.training.run import Run

if TYPE_CHECKING:
    from runner.device.device import Device

CLAIM = "claimed by the technique itself"
SAMPLES = 8  # of the step whose operators are compared
PLAIN = bool | int | float | str | None
Contexts = Sequence[Callable[[], AbstractContextManager[Any]]]


def fingerprint(draft: RunBuilder) -> dict[str, Any]:
    """What can be observed of a draft, by the name that a change of it is reported under."""
    return {
        **state(draft.model, draft.contexts, draft.device.kind),
        **_step(draft),
        "optimizer": (draft.optimizer_class, dict(draft.optimizer_options), draft.make_optimizer),
        "loss scale": draft.loss_scale,
        "objective": _attributes(draft.objective),
        "data loading": (draft.data, draft.loader),
        "batch sizes and steps": (draft.batch_size, draft.micro_batch, draft.total_steps),
        "average of the weights": draft.ema,
        "recoveries": list(draft.recoveries),
        "compiler": (
            draft.whole_step,
            draft.compilation is None,
            draft.cuda_graphs,
            hasattr(draft.forward, "_orig_mod"),
            hasattr(draft.forward, "_torchdynamo_orig_callable"),
            draft.index_limit,
        ),
        "compiled modules": {
            path: module._compiled_call_impl is None for path, module in draft.model.named_modules()
        },
    }


def state(model: nn.Module, contexts: Contexts, kind: str) -> dict[str, Any]:
    """The part of it that can be observed in a run, too."""
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        switches = _switches(kind)
    return {
        "types and layout of weights": {
            name: (weight.dtype, weight.device, weight.stride(), weight.requires_grad)
            for name, weight in weights.items()
        },
        "modules": {
            (path, name): value
            for path, module in model.named_modules()
            for name, value in _attributes(module).items()
        },
        "hooks on gradients": {
            name: tuple(getattr(p, "_post_accumulate_grad_hooks", None) or ())
            for name, p in model.named_parameters()
        },
        "switches of the process": switches,
    }


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
            if first[name] == value and _differ(value, after[name])
        }
        return reason

    def engaged(self, run: Run) -> Evidence:
        """Its own evidence, held against what was seen to change and still differs."""
        evidence = self.technique.engaged(run)
        if not evidence.engaged:
            return evidence
        now = state(run.model, run.contexts, run.device.kind)
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


def _step(draft: RunBuilder) -> dict[str, Any]:
    """Operators, numbers and memory of a forward and backward over a few samples, uncompiled."""
    for samples in dict.fromkeys((min(SAMPLES, draft.micro_batch), draft.micro_batch)):
        try:
            return _measured_step(draft, samples)
        except Exception as error:  # such as of a model that knows its batch size
            problem = {"operators of a step": type(error)}
    return problem


def _measured_step(draft: RunBuilder, samples: int) -> dict[str, Any]:
    operators: Counter[tuple[str, Any]] = Counter()
    held: Counter[int] = Counter()

    def note(operator: Any, output: Any) -> None:
        operators[str(operator), getattr(output, "dtype", None)] += 1

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.nbytes] += 1
        return tensor

    inputs, target = trial.batch(draft, samples)
    with ExitStack() as stack:
        stack.enter_context(trial.untouched(draft))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved))
        stack.enter_context(OperatorObserver(note))
        with trial.entered(draft):
            loss = draft.objective(call(draft.forward, inputs), target)
        weights = [p for p in draft.model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    return {
        "operators of a step": set(operators.items()),
        "numbers of a step": [
            draft.objective.weight(target),
            float(loss.detach()),
            *(float(g.double().sum()) for g in gradients if g is not None),
        ],
        "memory for the backward": set(held.items()),
        "layout of batches": [(t.dtype, t.shape, t.stride()) for t in tensors((inputs, target))],
    }


def _attributes(owner: Any) -> dict[str, Any]:
    """Its class and plain attributes."""
    own = {name: value for name, value in vars(owner).items() if isinstance(value, PLAIN)}
    return {**own, "class": type(owner)}


def _differ(before: Any, after: Any) -> bool:
    """Whether a value is another; of a table only entries of before count: more have no effect."""
    if isinstance(before, dict):
        return any(
            name not in after or _differ(value, after[name]) for name, value in before.items()
        )
    try:
        return bool(before != after)
    except (RuntimeError, TypeError, ValueError):  # tensors and arrays have no one answer
        return before is not after


def _switches(kind: str) -> dict[str, Any]:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "autocast": torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "default dtype": torch.get_default_dtype(),
        "precision": (
            torch.get_float32_matmul_precision(),
            cuda.matmul.allow_tf32,
            cuda.matmul.allow_fp16_reduced_precision_reduction,
            cudnn.allow_tf32,
        ),
        "cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        "attention": (
            torch._C._get_flash_sdp_enabled(),
            torch._C._get_math_sdp_enabled(),
            torch._C._get_mem_efficient_sdp_enabled(),
            torch._C._get_cudnn_sdp_enabled(),
        ),
        "mkldnn": torch.backends.mkldnn.enabled,
        "denormals": denormals.flushed(),
        "garbage collection": (gc.isenabled(), gc.get_threshold()),
    }
