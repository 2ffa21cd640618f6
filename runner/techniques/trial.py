"""Calls of the model that is being built, for techniques that try something before they act."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

from runner.data.batch import Batch, Inputs, call
from runner.models import preserved_state as state
from runner.models.preserved_state import NotRestorable
from runner.techniques.base import RunBuilder
from runner.training.recovery import is_out_of_memory, release_references

__all__ = ["NotRestorable", "batch", "entered", "forward", "model_copy", "untouched"]


def batch(draft: RunBuilder, samples: int) -> Batch:
    """So many training samples, laid out as the run's batches will be."""
    found = draft.sample(samples)
    for place in draft.placements:
        found = place(found)
    return found


@contextmanager
def entered(draft: RunBuilder) -> Iterator[None]:
    """The contexts that will be around forward and loss."""
    with ExitStack() as stack:
        for context in draft.contexts:
            stack.enter_context(context())
        yield


@contextmanager
def untouched(draft: RunBuilder) -> Iterator[None]:
    """Restore model, objective and random state at the end; for a fixed number of calls.

    Raises NotRestorable before any call where that is not possible.
    """
    with state.preserve_state(
        draft.model,
        draft.forward,
        draft.objective,
        device=draft.device.torch,
        safe=state.large_parameters(draft.model),
        complete=True,
    ):
        yield


@contextmanager
def model_copy(draft: RunBuilder) -> Iterator[RunBuilder]:
    """The draft with a deep copy of model and objective, to be timed; raises NotRestorable.

    Takes the memory of the weights once more, and of their gradients after a backward: less than
    the optimizer's state will. The original is restored too: closures may refer to it.
    """
    with untouched(draft):
        try:
            model, forward, objective = deepcopy((draft.model, draft.forward, draft.objective))
        except Exception as error:  # a lock, a tensor that is no leaf, too little memory
            gist = " ".join(str(error).split())[:100]
            raise NotRestorable(f"it cannot be copied ({type(error).__name__}: {gist})") from None
        try:
            yield replace(draft, model=model, forward=forward, objective=objective)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            release_references(error)
            raise NotRestorable("a copy of it and a step do not fit in memory") from None


def forward(draft: RunBuilder, inputs: Inputs) -> Any:
    """What the model puts out, under the run's contexts."""
    with entered(draft):
        return call(draft.forward, inputs)
