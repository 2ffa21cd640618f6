"""The optimizer's update in one kernel."""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from runner.techniques.base import Evidence, RunBuilder, Technique
from runner.training.run import Run

if TYPE_CHECKING:
    import torch
    from torch import nn

    from runner.optim.optimizer import Optimizer
    from runner.optim.optimizer_step import OptimizerStep

Options = dict[str, bool]


@dataclass
class FusedOptimizer(Technique):
    """Fused where the optimizer has it, else foreach; the guard and clipping ride in the kernel."""

    def apply(self, draft: RunBuilder) -> str | None:
        """Ask the optimizer's class for its fastest implementation."""
        options, reason = fastest(draft.optimizer_class, draft.model)
        draft.optimizer_options.update(options)
        return reason

    def engaged(self, run: Run) -> Evidence:
        """The operators of an update by each group, and where clipping and guard are done."""
        optimizer = run.update.optimizer
        weights: Counter[str] = Counter()
        for group in optimizer.param_groups:
            own_call = run.update.kernel is not None  # the kernel is called past the class's step
            ran = "fused" if own_call else implementation(optimizer, group)
            weights[ran] += len(group["params"])
        ran = weights.most_common(1)[0][0]
        facts = {"implementation": ran, "guard": _guard(run.update)}
        shown = Evidence.of_share(
            weights["fused"], weights.total(), "weights updated by a fused kernel", **facts
        )
        if weights["fused"]:
            return shown
        name = type(optimizer).__name__
        reason = f"{name} has no fused kernel that fits how it is set and called: {ran}"
        return replace(shown, reason=reason)


def implementation(optimizer: Optimizer, group: dict[str, Any]) -> str:
    """Which one the class's `step` takes with this group's options: fused, foreach or loop.

    Seen in an update of a weight of a few numbers, by an optimizer of its own that shares nothing
    with the run's but plain attributes.
    """
    import torch

    from runner.techniques.operators import OperatorObserver

    names: set[str] = set()

    first = group["params"][0].detach()
    weight = first.new_zeros((2,) * first.ndim).requires_grad_()
    weight.grad = torch.zeros_like(weight)
    trial: Any = object.__new__(type(optimizer))
    vars(trial).update(vars(optimizer))
    trial.state, trial.param_groups = defaultdict(dict), [{**group, "params": [weight]}]
    with torch.no_grad(), OperatorObserver(lambda operator, _: names.add(operator.__name__)):
        inspect.unwrap(type(optimizer).step)(trial)
    for kind in ("fused", "foreach"):
        if any(name.startswith(f"_{kind}") for name in names):
            return kind
    return "loop"


def _guard(update: OptimizerStep) -> str:
    if update.in_kernel:
        return "in the kernel"
    return "taken back on the device" if update.undo is not None else "host reads a flag"


def fastest(optimizer: type[torch.optim.Optimizer], model: nn.Module) -> tuple[Options, str | None]:
    """The options of its fastest implementation, or why it has but the slow one."""
    import torch

    from runner.optim.origin import is_torchs

    if not is_torchs(optimizer):
        return {}, f"the step() of {optimizer.__name__} is not torch's own: it is called unchanged"
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    if any(isinstance(m, embeddings) and m.sparse for m in model.modules()):
        return {}, "fused kernels do not take the sparse gradients of its embeddings"
    accepted = inspect.signature(optimizer).parameters
    if "fused" in accepted and all(p.is_floating_point() for p in model.parameters()):
        return {"fused": True}, None
    if "foreach" in accepted:
        # with its counters on the device, a bad update is taken back without the host
        on_cuda = any(p.device.type == "cuda" for p in model.parameters())
        more = {"capturable": True} if on_cuda and "capturable" in accepted else {}
        return {"foreach": True, **more}, None
    return {}, f"{optimizer.__name__} has neither a fused nor a foreach implementation"
