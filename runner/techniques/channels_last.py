"""Convolutions over memory in NHWC order."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runner.data.batch import Batch
from runner.techniques.base import Evidence, RunBuilder, Technique
from runner.techniques.probe import outputs
from runner.training.run import Run

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class ChannelsLast(Technique):
    """Helps models with convolutions, where the kernels are written for NHWC."""

    def apply(self, draft: RunBuilder) -> str | None:
        """Lay weights and batches out in NHWC order."""
        import torch

        def place(batch: Batch) -> Batch:
            inputs = batch[0]
            if isinstance(inputs, torch.Tensor) and inputs.ndim == 4:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            return inputs, batch[1]

        if not any(isinstance(m, torch.nn.Conv2d) for m in draft.model.modules()):
            return "the model has no 2-d convolution"
        draft.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        draft.placements.append(place)
        return None

    def engaged(self, run: Run) -> Evidence:
        """Convolutions that read and write NHWC order; those where both orders are one count out.

        With its weights in NHWC a convolution writes that order whatever it reads, and copies
        an input in NCHW first.
        """
        import torch

        layers = [m for m in run.model.modules() if isinstance(m, torch.nn.Conv2d)]
        read: dict[torch.nn.Module, torch.Tensor] = {}

        def note(layer: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            read.setdefault(layer, inputs[0] if inputs else named["input"])

        with ExitStack() as stack:
            for layer in layers:
                stack.callback(layer.register_forward_pre_hook(note, with_kwargs=True).remove)
            written = outputs(run, layers)
        orders = [
            [o for o in map(_is_nhwc, pair) if o is not None]
            for pair in zip(read.values(), written, strict=False)
        ]
        known = [order for order in orders if order]
        seen = [o.is_contiguous(memory_format=torch.channels_last) for o in written]
        return Evidence.of_share(
            sum(map(all, known)),
            len(known),
            "convolutions read and write NHWC",
            nhwc_after_first=seen[:1] == [True],
            nhwc_after_last=seen[-1:] == [True],
        )


def _is_nhwc(tensor: Tensor) -> bool | None:
    """Whether it lies in NHWC order; None where that is the same as NCHW."""
    import torch

    nhwc = tensor.is_contiguous(memory_format=torch.channels_last)
    return None if nhwc and tensor.is_contiguous() else nhwc
