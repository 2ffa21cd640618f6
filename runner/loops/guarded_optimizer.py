"""One step of a hand-written loop: forward, backward, clip, guard, update."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from numbers import Real
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from runner.core.build.arguments import Loss, as_batch, check_loss, check_model_arguments
from runner.core.checkpoint.finite_checks import is_statistic
from runner.core.errors import UsageError
from runner.core.interfaces.batch import call_model
from runner.core.interfaces.hook import Step
from runner.core.optim.buffers import BufferSnapshot
from runner.core.optim.equivalence import UpdateComparison
from runner.core.optim.gradients import disable_autocast
from runner.core.optim.optimizer import Optimizer
from runner.core.optim.optimizer_step import OptimizerStep
from runner.core.optim.user_optimizer import adopt_optimizer, applicable, sync_state
from runner.core.schemas.stability import StabilityConfig
from runner.core.techniques.fused_optimizer import fastest_implementation

POISON_STEPS = 100  # between checks of the statistics on an accelerator
log = logging.getLogger("runner")

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
    non-finite step changes no weight, buffer or optimizer state, nor buffers of modules that
    `loss_fn` calls, such as a discriminator. Gradients that are already in `.grad` are discarded.

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
        with nullcontext() if guarded.knows_modules(loss_fn) else guarded.find_modules():
            loss = loss_fn(call_model(model, inputs), target)
            check_loss("train_step", loss)
            step: Step = guarded.apply(loss)
    except Exception:
        update.abandon()
        raise
    if guard:
        guarded.refuse_poisoned_statistics(step.skipped)
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
        options = applicable(optimizer, options)
        comparison = UpdateComparison(optimizer, options, model)
        name, self.reason = comparison.select()
        if self.reason:
            log.info("%s: update by %s: %s", caller, name, self.reason)
        options, shortcuts = comparison.candidates[name]
        adopt_optimizer(optimizer, options, self.scope)
        settings = config or StabilityConfig()
        self.update = OptimizerStep(model, optimizer, settings, None, [1.0], shortcuts=shortcuts)
        sync_state(self.update, options, self.scope)
        self.known_losses: set[Any] = set()
        self.others: list[nn.Module] = []  # called by the loss, such as a discriminator
        self.host_flag: Tensor | None = None  # 1.0 if statistics were not finite, on accelerators

    def knows_modules(self, loss_fn: Loss) -> bool:
        """Whether a step with this loss was made before; lambdas are compared by their code."""
        function: Any = loss_fn
        while isinstance(function, partial):
            function = function.func
        code = getattr(function, "__code__", type(function))
        known = code in self.known_losses
        self.known_losses.add(code)
        return known

    @contextmanager
    def find_modules(self) -> Iterator[None]:
        """Find other modules that the step calls; a skipped step restores their buffers, too."""
        known = {id(m) for root in (self.model, *self.others) for m in root.modules()}
        snapshots: list[BufferSnapshot] = []

        def before_forward(module: nn.Module, _: Any) -> None:
            if id(module) not in known:
                known.update(id(m) for m in module.modules())
                if next(module.buffers(), None) is not None:
                    self.others.append(module)
                    snapshots.append(BufferSnapshot(module, self.update.device, frozen=False))

        # for one step only, as hooks make each call slower
        handle = register_module_forward_pre_hook(before_forward)
        skipped = None
        try:
            yield
            skipped = self.last_skipped
        finally:
            handle.remove()
            for snapshot in snapshots:
                snapshot.restore(skipped)
            if skipped is None:  # the step failed: find them again at the next
                del self.others[len(self.others) - len(snapshots) :]
                self.known_losses.clear()
            elif snapshots:
                modules = nn.ModuleList([self.model, *self.others])
                self.update.buffers = BufferSnapshot(modules, self.update.device)

    def refuse_poisoned_statistics(self, skipped: Tensor) -> None:
        """Raise UsageError if statistics were not finite before the step: all would be skipped.

        On an accelerator without a host sync, at most POISON_STEPS later.
        """
        buffers = self.update.buffers
        if not buffers.statistic_slots:
            return
        if self.update.device.type == "cpu":
            if not skipped.item() or buffers.are_finite():
                return
        else:
            if self.steps % POISON_STEPS:
                return
            if self.host_flag is None:
                self.host_flag = torch.zeros(
                    (), dtype=torch.float32, pin_memory=self.update.device.type == "cuda"
                )
            poisoned = bool(self.host_flag)
            self.host_flag.copy_(buffers.are_finite().logical_not(), non_blocking=True)
            if not poisoned:
                return
        named = buffers.model.named_buffers()
        name = next((n for n, b in named if is_statistic(n) and not b.isfinite().all()), "a buffer")
        raise UsageError(
            f"train_step: {name} is not finite, so every step would be skipped: another module's "
            "step called this model with non-finite inputs; reset it (reset_running_stats) and "
            "make that step with train_step, too"
        )

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
        self.last_skipped = skipped
        return Step(self.steps, loss, norm, skipped)
