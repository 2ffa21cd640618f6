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
    """Convolutions that read and write NHWC order; those where both orders are one count out.

    With its weights in NHWC a convolution writes that order whatever it reads, and copies
    an input in NCHW first.
    """
    from runner.techniques.probe import dry_run_step, forward_hooks

    tensors: dict[nn.Module, list[Tensor]] = {}

    def enter(layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        tensors.setdefault(layer, [inputs[0] if inputs else named["input"]])

    def leave(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        tensors[layer].append(output)

    layers = [m for m in run.model.modules() if isinstance(m, nn.Conv2d)]
    with forward_hooks(layers, enter, leave):
        dry_run_step(run)
    orders = [[_is_nhwc(t) for t in pair[:2] if not _is_both(t)] for pair in tensors.values()]
    known = [order for order in orders if order]
    of = "convolutions read and write NHWC"
    return Evidence.of_share(sum(map(all, known)), len(known), of)


def _is_nhwc(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=NHWC)


def _is_both(tensor: Tensor) -> bool:
    """Whether NHWC is the same as NCHW, for its sizes."""
    return _is_nhwc(tensor) and tensor.is_contiguous()
