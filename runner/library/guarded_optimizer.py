"""One step of a hand-written loop: forward, backward, clip, guard, update."""

from __future__ import annotations

import math
from contextlib import ExitStack
from numbers import Real
from typing import Any, final

from torch import Tensor, nn

from runner.data.batch import call_model
from runner.errors import UsageError
from runner.library.arguments import Loss, as_batch, check_loss, check_model_arguments
from runner.optim.gradients import disable_autocast
from runner.optim.optimizer import Optimizer
from runner.optim.optimizer_step import OptimizerStep
from runner.optim.user_optimizer import adopt_optimizer, sync_state
from runner.stability.config import StabilityConfig
from runner.techniques.fused_optimizer import fastest_implementation
from runner.training.hook import Step

GUARD_ATTRIBUTE = "_runner_guarded"
"""Attribute of an optimizer that holds its `GuardedOptimizer`, tying their lifetimes."""


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    loss_fn: Loss,
    *,
    clip_norm: float | None = 1.0,
    guard: bool = True,
) -> Step:
    """Make one training step on `batch`, without a host-device synchronisation.

    `batch` is (inputs, target), (input, …, target), or a dict with the target under `label`,
    `labels`, `target`, `targets` or `y`, whose other keys become the arguments of the model's
    forward. `loss_fn(output, target)` returns the batch's mean. Gradients are clipped to total norm
    `clip_norm` over all of the optimizer's parameters (None: not clipped). With `guard` a
    non-finite step changes no weight, buffer or optimizer state. Gradients that are already in
    `.grad` are discarded.

    The optimizer stays the caller's, with its groups, scheduler and state_dict. If `fused` and
    `foreach` are unset, its fused kernel is used; an optimizer without one needs the host to read a
    flag at each step, which synchronises an accelerator. For techniques use
    `optimize_training_loop`. Raises UsageError.
    """
    limit: Any = clip_norm
    if limit is not None and not (isinstance(limit, Real) and 0 < float(limit) < math.inf):
        raise UsageError(f"train_step: clip_norm must be a number > 0 or None, got {clip_norm!r}")
    inputs, target = as_batch(batch, "train_step")
    check_model_arguments("train_step", model, loss_fn=loss_fn)
    guarded = vars(optimizer).get(GUARD_ATTRIBUTE) if isinstance(optimizer, Optimizer) else None
    if guarded is None or not guarded.matches(model, optimizer):
        guarded = GuardedOptimizer("train_step", model, optimizer)
        vars(optimizer)[GUARD_ATTRIBUTE] = guarded
    update = guarded.update
    update.clip_norm, update.guard = clip_norm, guard
    update.begin()
    try:
        loss = loss_fn(call_model(model, inputs), target)
        check_loss("train_step", loss)
        step: Step = guarded.apply(loss)
    except Exception:
        update.abandon()
        raise
    return step


@final
class GuardedOptimizer:
    """A user's model and optimizer, with an `OptimizerStep` that applies or skips updates."""

    def __init__(
        self,
        caller: str,
        model: nn.Module,
        optimizer: Optimizer,
        config: StabilityConfig | None = None,
    ) -> None:
        check_model_arguments(caller, model, optimizer=optimizer)
        if (earlier := vars(optimizer).pop(GUARD_ATTRIBUTE, None)) is not None:
            earlier.close()
        self.model, self.optimizer, self.steps, self.scope = model, optimizer, 0, ExitStack()
        options = fastest_implementation(type(optimizer), model)[0]
        adopt_optimizer(optimizer, options, self.scope)
        self.update = OptimizerStep(model, optimizer, config or StabilityConfig(), None, [1.0])
        sync_state(self.update, options, self.scope)

    def matches(self, model: nn.Module, optimizer: Optimizer) -> bool:
        """Whether it matches this model and optimizer, including the number of parameters."""
        parameters = sum(len(group["params"]) for group in self.optimizer.param_groups)
        same = model is self.model and optimizer is self.optimizer
        return same and parameters == len(self.update.parameters)

    def close(self) -> None:
        """Restore the optimizer as it was, with its complete state."""
        self.scope.close()

    def apply(self, loss: Tensor) -> Step:
        """Run backward, then apply or skip the update; outside of the caller's autocast."""
        with disable_autocast(self.update.device.type):
            loss.backward()  # type: ignore[no-untyped-call]
            loss = loss.detach()
            norm, skipped = self.update.measure(loss)
            self.update.apply(norm, skipped)
        self.steps += 1
        return Step(self.steps, loss, norm, skipped)
