"""Copies of batches to an accelerator, through pinned memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runner.core.interfaces.batch import Batch
from runner.core.interfaces.nested import tensors, tree_map


def pin_batch(fetched: Any) -> Any:
    """Return a fetched batch in pinned memory."""
    if isinstance(fetched, tuple):
        return tree_map(fetched, Tensor.pin_memory)
    return replace(fetched, batch=tree_map(fetched.batch, Tensor.pin_memory))


def batch_mover(device: torch.device, pin: bool, aside: bool) -> Callable[[Batch], Batch]:
    """Return a function that copies a batch to the device.

    With `aside` it copies on its own stream while the device computes the previous step.
    """

    def copy(tensor: Tensor) -> Tensor:
        # unpinned memory may be freed during the copy, so that copy blocks the host; what workers
        # fetched is pinned already
        return (tensor.pin_memory() if pin else tensor).to(device, non_blocking=pin)

    def move(batch: Batch) -> Batch:
        moved: Batch = tree_map(batch, copy)
        return moved

    if not aside:
        return move
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def move_on_stream(batch: Batch) -> Batch:
        with torch.cuda.stream(stream):
            moved = move(batch)
        compute_stream = torch.cuda.current_stream(device)
        compute_stream.wait_stream(stream)  # the device waits, the host does not
        for tensor in tensors(moved):  # keeps the allocator from reusing its memory early
            tensor.record_stream(compute_stream)
        return moved

    return move_on_stream
