"""Convolutions in NHWC memory format (channels last)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from runner.core.interfaces.batch import Batch
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import Evidence, RunBuilder
from runner.core.schemas.optimization import ChannelsLast

NHWC = torch.channels_last


def apply(config: ChannelsLast, builder: RunBuilder) -> str | None:
    """Convert weights and batches to NHWC memory format."""
    if not any(isinstance(m, nn.Conv2d) for m in builder.model.modules()):
        return "the model has no 2-d convolution"
    if reason := builder.skip_reason("channels_last"):
        return reason
    memory_order = MemoryOrder()
    builder.model.to(memory_format=NHWC)  # type: ignore[call-overload]
    builder.placements.append(memory_order.convert)
    builder.add_switch("channels_last", memory_order.set_enabled)
    return None


class MemoryOrder:
    """The memory format of batches and weights; `set_enabled` switches it between NHWC and NCHW."""

    format = NHWC

    def convert(self, batch: Batch) -> Batch:
        """Return the batch in the current memory format."""
        inputs = batch[0]
        if isinstance(inputs, Tensor) and inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=self.format)
        return inputs, batch[1]

    def set_enabled(self, run: Run, on: bool) -> None:
        """Convert weights, and optimizer state, as fused kernels need both in one format."""
        self.format = NHWC if on else torch.contiguous_format
        run.model.to(memory_format=self.format)  # type: ignore[call-overload]
        run.update.align_state()


def engaged(config: ChannelsLast, run: Run) -> Evidence:
    """Return the share of convolutions that read and write NHWC, where it differs from NCHW."""
    from runner.core.techniques.probe import convolution_layouts

    layouts = convolution_layouts(run)
    matching = sum(map(all, layouts.values()))
    return Evidence.of_share(matching, len(layouts), "convolutions read and write NHWC")
