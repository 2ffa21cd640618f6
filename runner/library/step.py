"""One step of a hand-written loop: forward, backward, clip, guard, update."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, final

from torch import Tensor, nn

from runner.batch import Batch, call
from runner.errors import UsageError
from runner.hook import Step
from runner.library import batches
from runner.library.assembly import check_loss_fn, check_module, check_optimizer, entered
from runner.library.optimize import Optimized, placed
from runner.optim.adopted import adopt, share_state
from runner.optim.optimizer import Optimizer
from runner.optim.update import Update
from runner.run import Run
from runner.stability.config import StabilityConfig
from runner.techniques.fused_optimizer import fastest

Loss = Callable[[Any, Any], Tensor]
KEPT = "_runner_stepper"
"""Where an optimizer keeps its `Stepper`, which thus goes when the optimizer goes."""


def train_step(
    model: nn.Module | Optimized,
    optimizer: Optimizer,
    batch: Any,
    loss_fn: Loss,
    *,
    clip_norm: float | None = 1.0,
    guard: bool = True,
) -> Step:
    """One step over `batch`, and what became of it; nothing in it is read back from the device.

    `batch` is (inputs, target) and `loss_fn(output, target)` the mean over it. Gradients are cut
    to `clip_norm` over all of the optimizer's parameters (None: not). With `guard` a step whose
    loss or gradients are not finite changes nothing: no weight, no buffer, no optimizer state.

    The optimizer stays the caller's: its groups, its scheduler and its state_dict work as ever.
    Where its maker left `fused` and `foreach` open, its fused kernel is used; one that has none
    needs the host to read a flag at each step, which on an accelerator is a wait.
    Raises UsageError.
    """
    if clip_norm is not None and not 0 < clip_norm < math.inf:
        raise UsageError(f"train_step: clip_norm={clip_norm} is no norm; use more than 0, or None")
    check_loss_fn("train_step", loss_fn)
    inputs, target = batches.as_batch(batch, "train_step")
    stepper = vars(optimizer).get(KEPT) if isinstance(optimizer, Optimizer) else None
    if stepper is None or not stepper.fits(model):
        if stepper is not None:
            stepper.close()
        stepper = Stepper(model, optimizer, inputs)
        vars(optimizer)[KEPT] = stepper
    stepper.update.clip_norm, stepper.update.guard = clip_norm, guard
    step: Step = stepper.step((inputs, target), loss_fn)
    return step


@final
class Stepper:
    """A model and an optimizer, with what is made once for the two of them."""

    def __init__(self, model: nn.Module | Optimized, optimizer: Optimizer, inputs: Any) -> None:
        self.model = model
        module = model.model if isinstance(model, Optimized) else model
        check_module("train_step", module)
        check_optimizer("train_step", module, optimizer)
        self.steps = 0
        self.scope = ExitStack()
        self.run: Run | None = None
        self.forward: Callable[..., Any] = module
        if isinstance(model, Optimized):
            self.run = model.ready(inputs)
            self.forward = model.within
        if self.run is not None and self.run.update.optimizer is optimizer:
            self.update = self.run.update
        else:
            options = fastest(type(optimizer), module)[0]
            adopt(optimizer, options, self.scope)
            scale = None if self.run is None else self.run.update.scale
            self.update = Update(
                module, optimizer, StabilityConfig(), None, [1.0],
                loss_scale=None if scale is None else float(scale.value),
            )  # fmt: skip
            share_state(self.update, options, self.scope)

    def fits(self, model: nn.Module | Optimized) -> bool:
        """Whether it is for this model, and for the optimizer as it is: groups may be added."""
        groups = self.update.optimizer.param_groups
        if sum(len(group["params"]) for group in groups) != len(self.update.parameters):
            return False
        return model is self.model and (self.run is None or not self.run_is_closed)

    @property
    def run_is_closed(self) -> bool:
        """Whether the `Optimized` that this is for was closed."""
        return isinstance(self.model, Optimized) and self.model.assembly.run is not self.run

    def close(self) -> None:
        """Leave the optimizer as it was found, its state complete."""
        self.scope.close()

    def step(self, batch: Batch, loss_fn: Loss) -> Step:
        """Make the step; where a compiler fails, a simpler way is tried."""
        while True:
            try:
                loss = self._backward(batch, loss_fn)
                break
            except Exception as error:
                self.update.abandon()
                run = self.run
                if run is None or not any(recover(run, error) for recover in run.recoveries):
                    raise
        return self.finish(loss)

    def finish(self, loss: Tensor) -> Step:
        """Measure what backward left, and make the update or skip it."""
        norm, skipped = self.update.measure(loss)
        self.update.apply(norm, skipped)
        self.steps += 1
        return Step(self.steps, loss, norm, skipped)

    def backward(self, loss: Tensor) -> Tensor:
        """Leave the gradients in `.grad`, with the loss scale in them; return the bare loss."""
        scale = self.update.scale
        (loss if scale is None else loss * scale.value).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _backward(self, batch: Batch, loss_fn: Loss) -> Tensor:
        """Leave the gradients in `.grad`, and return the loss."""
        update, run = self.update, self.run
        inputs, target = batch
        update.begin()
        if run is None:
            loss = loss_fn(call(self.forward, inputs), target)
        else:
            inputs, target = placed(run, inputs), batches.moved(target, run.device.torch)
            with entered(run):
                loss = loss_fn(call(self.forward, inputs), target)
        check_loss("train_step: loss_fn returned", loss)
        return self.backward(loss)


def check_loss(what: str, loss: Any) -> None:
    """Raise UsageError where nothing can be learned from it; `what` says whose it is."""
    who = what.partition(":")[0]
    if not isinstance(loss, Tensor) or loss.ndim:
        raise UsageError(
            f"{what} {batches.describe(loss)}; make it the mean over the batch, a tensor without "
            "dimensions"
        )
    if not loss.requires_grad:
        raise UsageError(
            f"{who}: the loss depends on no weight that needs a gradient; leave "
            "requires_grad on, and torch.no_grad() and .detach() out"
        )
