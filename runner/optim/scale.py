"""The loss scale of fp16, which nobody reads."""

from __future__ import annotations

import torch
from torch import Tensor


class LossScale:
    """A dynamic loss scale for fp16, on the device: halves on overflow, doubles after 2,000 steps.

    The rule is that of torch.amp.GradScaler; its own object reads the flag on the host.
    """

    def __init__(self, first: float, device: torch.device) -> None:
        self.value = torch.full((), first, device=device)
        self.grown = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, overflowed: Tensor) -> None:
        """Learn from one step; the flag is 1.0 or 0.0."""
        torch._amp_update_scale_(self.value, self.grown, overflowed, 2.0, 0.5, 2000)

    def lower(self, factor: float) -> None:
        """Multiply it, beyond what it does by itself."""
        self.value.mul_(factor)
        self.grown.zero_()
