"""Convolutions over memory in NHWC order."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from runner.data.batch import Batch
from runner.techniques.base import Evidence, RunBuilder
from runner.techniques.config import ChannelsLast
from runner.training.run import Run

NHWC = torch.channels_last


def apply(knobs: ChannelsLast, draft: RunBuilder) -> str | None:
    """Lay weights and batches out in NHWC order."""
    if not any(isinstance(m, nn.Conv2d) for m in draft.model.modules()):
        return "the model has no 2-d convolution"
    order = MemoryOrder()
    draft.model.to(memory_format=NHWC)  # type: ignore[call-overload]
    draft.placements.append(order.place)
    draft.measure("channels_last", order.turn)
    return None


class MemoryOrder:
    """The order of batches and weights, which can be turned back to NCHW."""

    format = NHWC

    def place(self, batch: Batch) -> Batch:
        """The batch in that order."""
        inputs = batch[0]
        if isinstance(inputs, Tensor) and inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=self.format)
        return inputs, batch[1]

    def turn(self, run: Run, on: bool) -> None:
        """Lay out weights and optimizer state, which fused kernels read in one order."""
        self.format = NHWC if on else torch.contiguous_format
        run.model.to(memory_format=self.format)  # type: ignore[call-overload]
        run.update.align_state()


def engaged(knobs: ChannelsLast, run: Run) -> Evidence:
    """Convolutions that read and write NHWC order, of those where it differs from NCHW.

    With its weights in NHWC a convolution writes that order in any case, and copies
    an input in NCHW first.
    """
    from runner.techniques.layer_evidence import convolution_layouts

    orders = convolution_layouts(run)
    good = sum(map(all, orders.values()))
    return Evidence.of_share(good, len(orders), "convolutions read and write NHWC")
