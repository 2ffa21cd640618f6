"""A technique of a user's own that decides which weights are trained."""

from __future__ import annotations

from torch import nn

from runner.techniques.base import Evidence, RunBuilder, Technique
from runner.training.run import Run


class LastLayer(Technique):
    """Trains the last linear layer alone."""

    def apply(self, draft: RunBuilder) -> None:
        draft.model.requires_grad_(False)
        [m for m in draft.model.modules() if isinstance(m, nn.Linear)][-1].requires_grad_(True)

    def engaged(self, run: Run) -> Evidence:
        return Evidence(True, "")
