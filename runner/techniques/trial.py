"""A forward of the model that is being built, for techniques that look before they act."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from runner import modes
from runner.batch import Batch, Inputs, call
from runner.technique import Draft


def batch(draft: Draft, samples: int) -> Batch:
    """So many training samples, laid out as the run's batches will be."""
    found = draft.sample(samples)
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
    buffers = {name: buffer.clone() for name, buffer in draft.model.named_buffers()}
    noise = torch.get_rng_state()
    try:
        with modes.kept(draft.model):
            yield
    finally:
        torch.set_rng_state(noise)
        with torch.no_grad():
            for name, buffer in draft.model.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])


def forward(draft: Draft, inputs: Inputs) -> Any:
    """What the model puts out, under the run's contexts."""
    with entered(draft):
        return call(draft.forward, inputs)
