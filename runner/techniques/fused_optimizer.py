"""The optimizer's update in one kernel."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.run import Run
from runner.technique import Draft, Evidence, Technique

if TYPE_CHECKING:
    import torch
    from torch import nn

    from runner.optim.update import Update

Options = dict[str, bool]


@dataclass
class FusedOptimizer(Technique):
    """Fused where the optimizer has it, else foreach; the guard and clipping ride in the kernel."""

    def apply(self, draft: Draft) -> str | None:
        """Ask the optimizer's class for its fastest implementation."""
        options, reason = fastest(draft.optimizer_class, draft.model)
        draft.optimizer_options.update(options)
        return reason

    def engaged(self, run: Run) -> Evidence:
        """The implementation that ran, and where clipping and the guard are done."""
        group = run.update.optimizer.param_groups[0]
        ran = "fused" if group.get("fused") else "foreach" if group.get("foreach") else "loop"
        facts = {
            "implementation": ran,
            "guard": _guard(run.update),
        }
        reason = ""
        if ran != "fused":
            name = type(run.update.optimizer).__name__
            reason = f"{name} has no fused kernel that fits how it is set and called: {ran}"
        return Evidence(ran == "fused", reason, facts)


def _guard(update: Update) -> str:
    if update.in_kernel:
        return "in the kernel"
    return "taken back on the device" if update.undo is not None else "host reads a flag"


def fastest(optimizer: type[torch.optim.Optimizer], model: nn.Module) -> tuple[Options, str | None]:
    """The options of its fastest implementation, or why it has but the slow one."""
    import torch

    from runner.optimizer_origin import is_torchs

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
