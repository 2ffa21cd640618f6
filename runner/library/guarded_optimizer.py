"""One step of a hand-written loop: forward, backward, clip, guard, update."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, final

from torch import Tensor, nn

from runner.data.batch import Batch, call
from runner.errors import UsageError
from runner.library import batches
from runner.library.lazy_run import (
    Loss,
    check_loss_fn,
    check_module,
    check_optimizer,
    run_contexts,
)
from runner.library.optimize import Optimized, place_inputs
from runner.optim.clip import Clip
from runner.optim.optimizer import Optimizer
from runner.optim.optimizer_step import LossScaler, OptimizerStep
from runner.optim.user_optimizer import adopt_optimizer, preserve_rates, sync_state
from runner.stability.config import StabilityConfig
from runner.techniques.fused_optimizer import fastest
from runner.training.hook import Step
from runner.training.run import Run

ATTRIBUTE = "_runner_guarded"
"""Where an optimizer holds its `GuardedOptimizer`, which thus lives as long as the optimizer."""


def train_step(
    model: nn.Module | Optimized,
    optimizer: Optimizer,
    batch: Any,
    loss_fn: Loss,
    *,
    clip_norm: float | None = 1.0,
    guard: bool = True,
) -> Step:
    """Make one step over `batch`; the host does not wait for what is returned.

    `batch` is (inputs, target) and `loss_fn(output, target)` the mean over it. Gradients are
    clipped to `clip_norm` over all of the optimizer's parameters (None: not). With `guard` a step
    whose loss or gradients are not finite changes no weight, buffer or optimizer state.

    The optimizer stays the caller's: its groups, its scheduler and its state_dict work as ever.
    Where its maker left `fused` and `foreach` open, its fused kernel is used; one that has none
    needs the host to read a flag at each step, which on an accelerator is a wait.
    Raises UsageError.
    """
    if clip_norm is not None and not 0 < clip_norm < math.inf:
        raise UsageError(f"train_step: clip_norm must be > 0 or None, got {clip_norm}")
    inputs, target = batches.as_batch(batch, "train_step")
    guarded = vars(optimizer).get(ATTRIBUTE) if isinstance(optimizer, Optimizer) else None
    if guarded is None or not guarded.fits(model):
        check_loss_fn("train_step", loss_fn)
        guarded = GuardedOptimizer("train_step", model, optimizer, inputs)
        vars(optimizer)[ATTRIBUTE] = guarded
    guarded.update.clip_norm, guarded.update.guard = clip_norm, guard
    step: Step = guarded.step((inputs, target), loss_fn)
    return step


@final
class GuardedOptimizer:
    """A user's model and optimizer, whose updates one `OptimizerStep` makes or skips.

    With a `config` its guard and clipping hold, otherwise those of the `Optimized` model's run.
    """

    def __init__(
        self,
        who: str,
        model: nn.Module | Optimized,
        optimizer: Optimizer,
        inputs: Any = None,
        config: StabilityConfig | None = None,
        loss_scale: float | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.module = model.model if isinstance(model, Optimized) else model
        check_module(who, self.module)
        check_optimizer(who, self.module, optimizer)
        self.config, self.loss_scale = config, loss_scale
        self.steps = 0
        self.scope = ExitStack()
        if (earlier := vars(optimizer).pop(ATTRIBUTE, None)) is not None:
            earlier.close()
        self._attach(inputs)

    def _attach(self, inputs: Any) -> None:
        """Make the `OptimizerStep`, or take that of the model's run where it has this optimizer."""
        model, config = self.model, self.config
        self.run: Run | None = None
        self.forward: Callable[..., Any] = self.module
        if isinstance(model, Optimized):
            self.run, self.forward = model.ready(inputs), model.call_model
        if self.run is not None and self.run.update.optimizer is self.optimizer:
            self.update = self.run.update
        else:
            options = fastest(type(self.optimizer), self.module)[0]
            adopt_optimizer(self.optimizer, options, self.scope)
            scale = None if self.run is None else self.run.update.scale
            self.update = OptimizerStep(
                self.module,
                self.optimizer,
                config or StabilityConfig(),
                None,
                [1.0],
                loss_scale=None if scale is None else float(scale.value),
            )
            sync_state(self.update, options, self.scope)
        if config is not None:
            self.update.guard, self.update.clip_norm = config.guard, config.clip_norm
            limited = Clip.needed(config)
            self.update.clip = Clip(config, self.module, self.update.groups) if limited else None
        if self.loss_scale:
            self.update.scale = LossScaler(self.loss_scale, self.update.device)

    def fits(self, model: nn.Module | Optimized) -> bool:
        """Whether it is for this model, and for the optimizer as it is: groups may be added."""
        groups = self.optimizer.param_groups
        if sum(len(group["params"]) for group in groups) != len(self.update.parameters):
            return False
        closed = isinstance(self.model, Optimized) and self.model.lazy.run is not self.run
        return model is self.model and not closed

    def refresh(self) -> bool:
        """Include parameters added to the optimizer since; True where there were any.

        Gradients, buffers, back-off and loss scale stay what they are.
        """
        if self.fits(self.model):
            return False
        gradients = [(p, p.grad) for group in self.optimizer.param_groups for p in group["params"]]
        before = self.update
        self.close()
        self._attach(None)
        if self.update is not before:
            self.update.buffers, self.update.begun = before.buffers, before.begun
            with preserve_rates(self.optimizer):
                self.update.set_backoff(before.backoff)
            if self.update.scale is not None and before.scale is not None:
                self.update.scale = before.scale
        for parameter, gradient in gradients:
            parameter.grad = gradient
        return True

    def close(self) -> None:
        """Leave the optimizer as it was before, its state complete."""
        self.scope.close()

    def step(self, batch: Batch, loss_fn: Loss) -> Step:
        """Make the step; where a compiler fails, a simpler way is tried."""
        while True:
            try:
                loss = self._compute_gradients(batch, loss_fn)
                break
            except Exception as error:
                self.update.abandon()
                run = self.run
                if run is None or not any(recover(run, error) for recover in run.recoveries):
                    raise
        return self.apply(loss)

    def apply(self, loss: Tensor) -> Step:
        """Measure the gradients in `.grad`, and make the update or skip it."""
        norm, skipped = self.update.measure(loss)
        self.update.apply(norm, skipped)
        self.steps += 1
        return Step(self.steps, loss, norm, skipped)

    def backward(self, loss: Tensor) -> Tensor:
        """Leave the gradients in `.grad`, with the loss scale in them; return the bare loss."""
        scale = self.update.scale
        (loss if scale is None else loss * scale.value).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _compute_gradients(self, batch: Batch, loss_fn: Loss) -> Tensor:
        run, (inputs, target) = self.run, batch
        self.update.begin()
        if run is None:
            loss = loss_fn(call(self.forward, inputs), target)
        else:
            inputs, target = place_inputs(run, inputs), batches.moved(target, run.device.torch)
            with run_contexts(run):
                loss = loss_fn(call(self.forward, inputs), target)
        check_loss("train_step", loss)
        return self.backward(loss)


def check_loss(who: str, loss: Any) -> None:
    """Raise UsageError unless the loss is a scalar tensor with a gradient."""
    if not isinstance(loss, Tensor) or loss.ndim:
        given = batches.describe(loss)
        raise UsageError(f"{who}: loss must be a scalar tensor, the batch's mean, got {given}")
    if not loss.requires_grad:
        raise UsageError(
            f"{who}: the loss depends on no weight that needs a gradient; leave "
            "requires_grad on, and torch.no_grad() and .detach() out"
        )
