"""The optimizer's update in one kernel."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from runner.run import Draft, Evidence, Run, Technique


@dataclass
class FusedOptimizer(Technique):
    """Fused where the optimizer has it, else foreach; the guard and clipping ride in the kernel."""

    def apply(self, draft: Draft) -> str | None:
        """Ask the optimizer's class for its fastest implementation."""
        import torch

        embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        if any(isinstance(m, embeddings) and m.sparse for m in draft.model.modules()):
            return "fused kernels do not take the sparse gradients of its embeddings"
        accepted = inspect.signature(draft.optimizer_class).parameters
        name = draft.optimizer_class.__name__
        if "fused" in accepted and all(p.is_floating_point() for p in draft.model.parameters()):
            draft.optimizer_options["fused"] = True
        elif "foreach" in accepted:
            draft.optimizer_options["foreach"] = True
        else:
            return f"{name} has neither a fused nor a foreach implementation"
        return None

    def engaged(self, run: Run) -> Evidence:
        """The implementation that ran, and where clipping and the guard are done."""
        group = run.update.optimizer.param_groups[0]
        ran = "fused" if group.get("fused") else "foreach" if group.get("foreach") else "loop"
        facts = {
            "implementation": ran,
            "guard": "in the kernel" if run.update.in_kernel else "host reads a flag",
        }
        reason = (
            ""
            if ran == "fused"
            else f"{type(run.update.optimizer).__name__} has no fused kernel: {ran}"
        )
        return Evidence(ran == "fused", reason, facts)
