"""TF32 matrix products on tensor cores."""

from __future__ import annotations

from typing import Any

import torch

from runner.core.device.device import Device
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import Evidence, RunBuilder
from runner.core.schemas.optimization import Tf32


def unavailable(config: Tf32, device: Device) -> str | None:
    """Return a reason on devices without TF32 (NVIDIA before Ampere, and others)."""
    return None if device.capabilities.tf32 else f"{device.name} has no TF32"


def apply(config: Tf32, builder: RunBuilder) -> str | None:
    """Allow TF32 in matmul and cuDNN, until the run closes."""
    if builder.requested_tf32 is not None:
        return f"device.tf32={str(builder.requested_tf32).lower()} decides"
    from runner.core.device import numerics  # imported only where a device has TF32

    numerics.set_tf32(True, builder.scope)
    return None


def engaged(config: Tf32, run: Run) -> Evidence:
    """Return the flags, and whether a product of fp32 matrices is rounded to TF32."""
    from runner.core.device import numerics

    precision = numerics.read_fp32_precision()
    facts: dict[str, Any] = {
        "matmul": precision["cuda.matmul"] == "tf32",
        "cudnn": precision["cudnn.conv"] == precision["cudnn.rnn"] == "tf32",
        "products_are_rounded": rounds_to_tf32(run.device.torch),
    }
    rounded = all(facts.values())
    return Evidence(rounded, "" if rounded else "fp32 products keep their whole mantissa", facts)


def rounds_to_tf32(device: torch.device) -> bool:
    """Whether a product of fp32 matrices drops mantissa bit 12: TF32 keeps 10. Host sync."""
    value = torch.full((256, 256), 1 + 2**-12, dtype=torch.float32, device=device)
    product = value @ torch.eye(256, dtype=torch.float32, device=device)
    return bool((product != value).any())  # host sync
