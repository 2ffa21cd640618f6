"""TF32 matrix products on tensor cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.run import Draft, Evidence, Run, Technique

if TYPE_CHECKING:
    from runner.device.device import Device


@dataclass
class Tf32(Technique):
    """fp32 matrix products with a 10-bit mantissa: several times faster on Ampere and later."""

    def unavailable(self, device: Device) -> str | None:
        """Only NVIDIA's Ampere and later have it."""
        return None if device.capabilities.tf32 else f"{device.name} has no TF32"

    def apply(self, draft: Draft) -> str | None:
        """Allow TF32 in matmul and cuDNN, until the run closes."""
        import torch

        if draft.tf32_asked is not None:
            return f"device.tf32={str(draft.tf32_asked).lower()} decides"
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        draft.scope.callback(setattr, matmul, "allow_tf32", matmul.allow_tf32)
        draft.scope.callback(setattr, cudnn, "allow_tf32", cudnn.allow_tf32)
        matmul.allow_tf32 = cudnn.allow_tf32 = True
        return None

    def engaged(self, run: Run) -> Evidence:
        """The flags, read back."""
        import torch

        flags = {
            "matmul": torch.backends.cuda.matmul.allow_tf32,
            "cudnn": torch.backends.cudnn.allow_tf32,
        }
        return Evidence(all(flags.values()), "", flags)
