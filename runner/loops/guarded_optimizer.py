"""One step of a hand-written loop: forward, backward, clip, guard, update."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
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
from runner.core.interfaces.nested import describe
from runner.core.optim.buffers import BufferSnapshot
from runner.core.optim.equivalence import UpdateComparison
from runner.core.optim.gradients import disable_autocast
from runner.core.optim.optimizer import Optimizer
from runner.core.optim.optimizer_step import LossScaler, OptimizerStep
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
    scaler: torch.amp.GradScaler | None = None,
) -> Step:
    """Make one training step on `batch`, without a host-device synchronisation.

    `batch` is (inputs, target), (input, …, target), or a dict with the target under `label`,
    `labels`, `target`, `targets` or `y`, whose other keys become the arguments of the model's
    forward. `loss_fn(output, target)` returns the batch's mean. Gradients are clipped to total norm
    `clip_norm` over all of the optimizer's parameters (None: not clipped). With `guard` a
    non-finite step changes no weight, buffer or optimizer state, nor buffers of modules that
    `loss_fn` calls, such as a discriminator. Gradients that are already in `.grad` are discarded.
    With `scaler` the step scales the loss, which `loss_fn` returns unscaled, unscales the gradients
    before norm and clipping, and updates the scaler; an overflow is skipped, with `guard` or not.

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
            step: Step = guarded.apply(loss, scaler)
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
        self.caller, self.scope = caller, ExitStack()
        self.model, self.optimizer, self.steps = model, optimizer, 0
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
        self.warned_of_scale = False

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
                pinned = self.update.device.type == "cuda"
                self.host_flag = torch.zeros((), dtype=torch.float32, pin_memory=pinned)
            poisoned = bool(self.host_flag)
            self.host_flag.copy_(buffers.are_finite().logical_not(), non_blocking=True)
            if not poisoned:
                return
        named = buffers.model.named_buffers()
        name = next((n for n, b in named if is_statistic(n) and not b.isfinite().all()), "a buffer")
        problem = f"{name} is not finite, by a call outside of train_step: each step is skipped"
        fix = "reset it (reset_running_stats), and make the step that calls it with train_step, too"
        raise UsageError(f"train_step: {problem}; {fix}")

    def matches(self, model: nn.Module, optimizer: Optimizer) -> bool:
        """Whether it matches this model and optimizer, including the number of parameters."""
        parameters = sum(len(group["params"]) for group in self.optimizer.param_groups)
        same = model is self.model and optimizer is self.optimizer
        return same and parameters == len(self.update.parameters)

    def close(self) -> None:
        """Restore the optimizer as it was, with its complete state."""
        self.scope.close()

    def apply(self, loss: Tensor, scaler: torch.amp.GradScaler | None = None) -> Step:
        """Run backward, then apply or skip the update; outside of the caller's autocast."""
        scaler = enabled_scaler(self.caller, scaler)
        self.refuse_scaled_loss(loss, scaler)
        update = self.update
        if scaler is None:
            update.scale = None
        elif not isinstance(update.scale, UserLossScaler) or update.scale.scaler is not scaler:
            update.scale = UserLossScaler(scaler, update.device)
        with disable_autocast(update.device.type):
            scaled = loss if scaler is None else scaler.scale(loss)
            scaled.backward()  # type: ignore[no-untyped-call]
            if scaler is not None and any(p.grad is not None for p in update.parameters):
                self.unscale_gradients(scaler)
            loss = loss.detach()
            norm, skipped = update.measure(loss)
            update.apply(norm, skipped)
        self.steps += 1
        self.last_skipped = skipped
        return Step(self.steps, loss, norm, skipped)

    def unscale_gradients(self, scaler: torch.amp.GradScaler) -> None:
        """Divide the gradients by the loss scale, without a host sync."""
        try:
            scaler.unscale_(self.optimizer)
        except (RuntimeError, ValueError) as error:
            fix = "Leave unscale_(), step() and update() to this step, and keep weights in float32"
            raise UsageError(f"{self.caller}: scaler: {error} {fix}") from error

    def refuse_scaled_loss(self, loss: Tensor, scaler: torch.amp.GradScaler | None) -> None:
        """Raise UsageError for a loss that the scaler has scaled; without one, warn once."""
        factor = last_factor(loss)
        if factor is None or (scaler is None and self.warned_of_scale):
            return
        scaled_by_scaler = scaler is not None and factor is scaler._scale
        # on an accelerator reading the factor waits, so only before the first step
        if not scaled_by_scaler and (self.steps == 0 or factor.device.type == "cpu"):
            value = float(factor)
            if scaler is not None:  # later the scale may come to equal a constant of the loss
                scaled_by_scaler = self.steps == 0 and value == scaler.get_scale() > 1
            elif value >= 2 and math.frexp(value)[0] == 0.5:
                self.warned_of_scale = True
                problem = f"the loss's last operation multiplies it by {value:g}"
                log.warning("%s: %s; give the unscaled loss and scaler=", self.caller, problem)
        if scaled_by_scaler:
            problem = "loss was multiplied by the scaler's scale"
            raise UsageError(f"{self.caller}: {problem}; give the unscaled loss")


@final
class UserLossScaler(LossScaler):
    """A loop's `GradScaler`: gradients are unscaled before the norm, so `value` is 1 for them."""

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device) -> None:
        super().__init__(1.0, device)
        self.scaler = scaler

    def update(self, overflowed: Tensor) -> None:
        """Adapt to one step, by what `unscale_` found."""
        self.scaler.update()

    def values_before(self, overflowed: Sequence[bool]) -> list[float]:
        """Return the scale in each of the last steps, but for its growth. Host sync."""
        scales = [self.scaler.get_scale()]
        for overflow in reversed(overflowed):
            scales.append(scales[-1] / (self.scaler.get_backoff_factor() if overflow else 1.0))
        return scales[:0:-1]


def enabled_scaler(caller: str, scaler: Any) -> torch.amp.GradScaler | None:
    """Return the scaler; None for one that is disabled. Raises UsageError."""
    if scaler is None or (isinstance(scaler, torch.amp.GradScaler) and not scaler.is_enabled()):
        return None
    if not isinstance(scaler, torch.amp.GradScaler):
        got = describe(scaler)
        raise UsageError(f"{caller}: scaler must be a torch.amp.GradScaler or None, got {got}")
    return scaler


def last_factor(loss: Tensor) -> Tensor | None:
    """Return the 0-d constant by which the loss's last operation multiplies, or None."""
    node: Any = loss.grad_fn
    if type(node).__name__ != "MulBackward0":
        return None
    factors = (node._saved_self, node._saved_other)  # of each factor whose other has a gradient
    return next((f for f in factors if f is not None and not f.ndim and not f.requires_grad), None)
