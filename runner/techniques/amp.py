"""Automatic mixed precision."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from runner.run import Choice, Draft, Evidence, Run, Technique
from runner.techniques.probe import outputs

if TYPE_CHECKING:
    from runner.device.device import Device


class Precision(Enum):
    """What matrix products run in; auto takes bf16 where it is fast, else fp16 on a GPU."""

    auto = "auto"
    bf16 = "bf16"
    fp16 = "fp16"


@dataclass
class Amp(Technique):
    """Matrix products in 16 bits; weights, reductions and the loss stay in fp32."""

    dtype: Precision = Precision.auto
    initial_scale: float = 65536.0  # of the loss in fp16, torch's default; it adapts

    def unavailable(self, device: Device) -> str | None:
        """`auto` needs a fast 16-bit type; one that is asked for by name only has to work."""
        able = device.capabilities
        if self.dtype is Precision.auto and not (able.bf16_fast or able.fp16_fast):
            return f"{device.name} has no fast 16-bit matrix product"
        if self.dtype is Precision.bf16 and not able.bf16:
            return f"{device.name} has no bf16"
        if self.dtype is Precision.fp16 and not able.fp16:
            return f"{device.name} has no fp16"
        return None

    def apply(self, draft: Draft) -> str | None:
        """Enter autocast around forward and loss; fp16 also gets a loss scale."""
        import torch

        able = draft.device.capabilities
        fp16 = self.dtype is Precision.fp16 or (self.dtype is Precision.auto and not able.bf16_fast)
        dtype = torch.float16 if fp16 else torch.bfloat16
        if self.dtype is Precision.auto:
            reason = "no fast bf16 here" if fp16 else "bf16 is fast here and needs no loss scale"
            draft.choices.append(
                Choice("optimization.amp.dtype", "fp16" if fp16 else "bf16", reason)
            )
        elif fp16 and draft.device.kind == "cpu":
            draft.choices.append(
                Choice(
                    "optimization.amp.dtype", "fp16", "asked for; 20 to 30 times slower on a CPU"
                )
            )
        if fp16:
            draft.loss_scale = self.initial_scale
        draft.contexts.append(partial(torch.autocast, draft.device.kind, dtype=dtype))
        return None

    def engaged(self, run: Run) -> Evidence:
        """The types that come out of linear and convolution layers."""
        import torch

        kinds = (torch.nn.Linear, torch.nn.modules.conv._ConvNd)
        layers = [m for m in run.model.modules() if isinstance(m, kinds)]
        seen = Counter(str(o.dtype).removeprefix("torch.") for o in outputs(run, layers))
        low = seen["bfloat16"] + seen["float16"]
        facts: dict[str, Any] = {"layer_outputs": dict(seen)}
        if run.update.scale is not None:
            facts["loss_scale"] = float(run.update.scale.value)
        return Evidence(low > 0, "" if low else "no layer's product came out in 16 bits", facts)
