"""Convolutions over memory in NHWC order."""

from __future__ import annotations

from typing import Any

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
    draft.model.to(memory_format=NHWC)  # type: ignore[call-overload]
    draft.placements.append(_place)
    return None


def _place(batch: Batch) -> Batch:
    inputs = batch[0]
    if isinstance(inputs, Tensor) and inputs.ndim == 4:
        inputs = inputs.contiguous(memory_format=NHWC)
    return inputs, batch[1]


def engaged(knobs: ChannelsLast, run: Run) -> Evidence:
    """Convolutions that read and write NHWC order, of those where it differs from NCHW.

    With its weights in NHWC a convolution writes that order whatever it reads, and copies
    an input in NCHW first.
    """
    from runner.techniques.probe import dry_run_step, forward_hooks

    orders: dict[nn.Module, list[bool]] = {}  # of the tensors whose order can be told

    def note(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        for tensor in (*inputs[:1], output):
            nhwc = tensor.is_contiguous(memory_format=NHWC)
            if not (nhwc and tensor.is_contiguous()):
                orders.setdefault(layer, []).append(nhwc)

    layers = [m for m in run.model.modules() if isinstance(m, nn.Conv2d)]
    with forward_hooks(layers, after=note):
        dry_run_step(run)
    good = sum(map(all, orders.values()))
    return Evidence.of_share(good, len(orders), "convolutions read and write NHWC")
