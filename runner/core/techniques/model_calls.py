"""Calls of the model and the loss while a run is built, which change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from runner.core.interfaces.batch import Batch, Inputs, call_model
from runner.core.interfaces.technique import RunBuilder
from runner.core.models.modes import enter_training
from runner.core.preserved_state import large_parameters, preserve_state


@contextmanager
def enter_contexts(contexts: Iterable[Callable[[], Any]]) -> Iterator[None]:
    """Enter the contexts of forward and loss."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


def sample_batch(builder: RunBuilder, samples: int) -> Batch:
    """Return training samples as a batch, with the run's placements applied."""
    batch = builder.sample(samples)
    for transform in builder.placements:
        batch = transform(batch)
    return batch


def preserve_builder_state(builder: RunBuilder) -> AbstractContextManager[None]:
    """Restore model, objective and random state on exit, else raise NotRestorable on entry."""
    device, safe = builder.device.torch, large_parameters(builder.model)
    roots = builder.model, builder.forward, builder.objective
    return preserve_state(*roots, device=device, safe=safe, complete=True)


def forward(builder: RunBuilder, inputs: Inputs) -> Any:
    """Return the model's output, under the run's contexts."""
    with enter_contexts(builder.contexts):
        return call_model(builder.forward, inputs)


def probe_step(builder: RunBuilder, samples: int) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Return loss and gradients over training samples, uncompiled; the model is restored."""
    inputs, target = sample_batch(builder, samples)
    weights = [p for p in builder.model.parameters() if p.requires_grad]
    with (
        preserve_builder_state(builder),
        torch.enable_grad(),
        torch.compiler.set_stance("force_eager"),
    ):
        enter_training(builder.model)
        with enter_contexts(builder.contexts):
            loss = builder.objective(call_model(builder.forward, inputs), target)
        return loss.detach(), torch.autograd.grad(loss, weights, allow_unused=True)
