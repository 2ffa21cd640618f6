"""A forward of the model that is being built, for techniques that look before they act."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from runner.run import Batch, Draft, Inputs, call


def batch(draft: Draft, samples: int) -> Batch:
    """So many training samples on the device, laid out as the run's batches will be."""

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(draft.device.torch)
        if isinstance(value, dict):
            return {key: move(item) for key, item in value.items()}
        return tuple(move(item) for item in value)

    inputs, target = draft.sample(samples)
    found: Batch = (move(inputs), move(target))
    for place in draft.placements:
        found = place(found)
    return found


@contextmanager
def entered(draft: Draft) -> Iterator[None]:
    """The contexts that will be around forward and loss."""
    with ExitStack() as stack:
        for context in draft.contexts:
            stack.enter_context(context())
        yield


@contextmanager
def untouched(draft: Draft) -> Iterator[None]:
    """Forwards in here leave no trace: modes, buffers and the random state are as before.

    The random state of an accelerator is set anew at each step anyway.
    """
    modes = {module: module.training for module in draft.model.modules()}
    buffers = {name: buffer.clone() for name, buffer in draft.model.named_buffers()}
    noise = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(noise)
        with torch.no_grad():
            for name, buffer in draft.model.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])
        for module, training in modes.items():
            module.training = training


def forward(draft: Draft, inputs: Inputs) -> Any:
    """What the model puts out, under the run's contexts."""
    with entered(draft):
        return call(draft.forward, inputs)
