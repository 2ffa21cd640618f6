"""A whole training step as one compiled graph: forward, backward, norm, guard, clip, update.

Launch overhead between kernels is most of a small model's eager step. Here the optimizer's
arithmetic is written out, so that the compiler fuses it with the rest. It uses the state of
`OptimizerStep`, so any step may run either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor

from runner.core.errors import DataError
from runner.core.interfaces.batch import Batch, batch_size_of, call_model
from runner.core.interfaces.nested import out_of_range
from runner.core.interfaces.objective import Objective
from runner.core.optim.fused_kernel import FusedKernel, KernelGroup
from runner.core.optim.gradients import disable_autocast, tensor_norms
from runner.core.optim.optimizer_step import OptimizerStep

Contexts = list[Callable[[], AbstractContextManager[Any]]]


class StepGraph:
    """Makes the step of a full batch as one graph; gradients are never in `.grad`; no host sync."""

    def __init__(
        self,
        forward: Callable[..., Any],
        objective: Objective,
        contexts: Contexts,
        update: OptimizerStep,
        samples: int,
        options: dict[str, Any],
        index_limit: int | None = None,
    ) -> None:
        """`index_limit` bounds integer targets if the objective does not state the classes."""
        self.update, self.samples, self.index_limit = update, samples, index_limit
        self.contexts = contexts
        self.targets = TargetCheck(objective.indices, objective.ignored, update.device)
        self.zero = torch.zeros((), dtype=torch.float32, device=update.device)
        self.one = torch.ones((), dtype=torch.float32, device=update.device)
        update.schedule_on_device()
        self.uses_cuda_graphs = options.get("triton.cudagraphs") is True
        if self.uses_cuda_graphs:
            _mark_static(update, self.targets)
        self.steps = 0  # made so far
        if update.lr is not None:  # an owner may change an adopted optimizer
            options = {**options, "guard_filter_fn": _select_guards}
        step = _build_step(forward, objective, update, self.targets)
        self._step = torch.compile(step, fullgraph=True, options=options)

    @staticmethod
    def unsupported_reason(update: OptimizerStep) -> str | None:
        """Return why this optimizer's update cannot be part of the graph, or None."""
        if update.kernel is None:
            name = type(update.optimizer).__name__
            return f"{name} has no fused kernel for these weights, which the graph needs"
        if not update.has_single_lr:
            return "its optimizer's parameter groups have different learning rates"
        return None

    def takes(self, batch: Batch) -> bool:
        """Whether the graph is for this batch: the last of an epoch may be smaller.

        A batch with out-of-range targets, which a user's loss may ignore, takes the eager step.
        """
        update = self.update
        update.recheck_step()
        size = batch_size_of(batch[1])
        if update.buffers.frozen.undecided:  # the graph restores those that move
            return False
        if size != self.samples or update.kernel is None or not update.has_single_lr:
            return False
        return self.index_limit is None or not out_of_range(batch[1], self.index_limit)

    def check(self) -> None:
        """Raise DataError if a target was out of range since the last check. Host sync."""
        if bool(self.targets.any_wrong):  # host sync: targets are checked with each report
            self.targets.any_wrong.zero_()  # raised once: a checkpoint saved afterwards is sound
            wrong_value = int(self.targets.wrong_value)  # host sync: only if there is a wrong one
            bounds = f"classes are 0 to {(self.targets.classes or 0) - 1}"
            problem = f"target {wrong_value} is out of range: {bounds}"
            raise DataError(f"{problem}; the steps with such targets were skipped")

    def __call__(self, batch: Batch, veto: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Make the step; compute it without an update if `veto` is 1."""
        if self.update.lr is None:
            self.update.write_owner_lr()
        loss, norm, skipped, overflow = self._run(batch, self.zero if veto is None else veto)
        self.steps += 1
        if self.uses_cuda_graphs:  # the next replay overwrites them before they are read
            loss, norm, skipped = loss.clone(), norm.clone(), skipped.clone()
        if self.update.scale:
            self.update.scale.update(overflow)
        return loss, norm, skipped

    def dry_run(self, batch: Batch) -> None:
        """Compute the step as a skipped one: without an update."""
        self._run(batch, self.one)

    def _run(self, batch: Batch, veto: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if not self.contexts:
            return self._step(*batch, veto)
        with ExitStack() as stack:  # outside, as a graph with contexts is not cached on disk
            for context in self.contexts:
                stack.enter_context(context())
            return self._step(*batch, veto)


class TargetCheck:
    """Check of class targets: compiled code reads out of bounds or ends the process at a wrong one.

    It is part of the graph: reading a flag on the host at each step would take longer.
    """

    def __init__(self, classes: int | None, ignored: int | None, device: torch.device) -> None:
        self.classes, self.ignored = classes, ignored
        self.any_wrong = torch.zeros((), dtype=torch.bool, device=device)  # ever
        self.wrong_value = torch.zeros((), dtype=torch.int64, device=device)  # one that was

    def replace_wrong(self, target: Any, veto: Tensor) -> tuple[Any, Tensor]:
        """Return the target with wrong classes set to 0, and 1.0 if there are any (or `veto`)."""
        if not self.classes or not isinstance(target, Tensor):
            return target, veto
        if target.is_floating_point() or target.is_complex() or target.dtype is torch.bool:
            return target, veto
        wrong = (target < 0) | (target >= self.classes)
        if self.ignored is not None:
            wrong = wrong & (target != self.ignored)
        any_wrong = wrong.any()
        lowest = torch.iinfo(target.dtype).min
        highest = torch.where(wrong, target, lowest).max()
        self.wrong_value.copy_(torch.where(any_wrong, highest, self.wrong_value))
        self.any_wrong.logical_or_(any_wrong)
        return torch.where(wrong, 0, target), torch.maximum(veto, any_wrong.to(veto.dtype))


def _mark_static(update: OptimizerStep, targets: TargetCheck) -> None:
    """Mark the tensors that a step changes as static: else CUDA graphs are not recorded."""
    kernel = update.kernel
    groups, counters = (kernel.groups, [kernel.step_count]) if kernel else ([], [])
    state = [t for group in groups for t in (*group.first_moments, *group.second_moments)]
    counters += [update.updates, update.ema_updates, targets.any_wrong, targets.wrong_value]
    flags = [update.loss_limit, update.norm_limit, update.zero, update.one]
    # the model's own are static already
    for tensor in (*state, *counters, *flags, *update.average):
        torch._dynamo.mark_static_address(tensor)


def _select_guards(guards: Sequence[Any]) -> list[bool]:
    """Select the guards to check at each call: all of them take a sixth of a small step.

    Our own objects change only through this module, except the optimizer's options; guards on the
    user's model are kept.
    """
    ours = ("update", "parameters", "targets", "G['__import_runner")
    return [not g.name.startswith(ours) or ".options" in g.name for g in guards]


def _build_step(
    forward: Callable[..., Any], objective: Objective, update: OptimizerStep, targets: TargetCheck
) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return the function that becomes the graph; all of its Python runs during tracing."""
    parameters = update.parameters

    def step(inputs: Any, target: Any, veto: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        kernel = update.kernel
        if kernel is None:
            raise RuntimeError("parameters differ in their number of updates")
        target, veto = targets.replace_wrong(target, veto)
        before = [buffer.detach().clone() for buffer in update.buffers.changing()]
        loss = objective(call_model(forward, inputs), target)
        if [buffer.shape for buffer in update.buffers.changing()] != [old.shape for old in before]:
            raise RuntimeError("its forward adds, removes or resizes a buffer")
        with disable_autocast(update.device.type):
            scaled = loss if update.scale is None else loss * update.scale.value
            gradients = list(torch.autograd.grad(scaled, parameters))
        with torch.no_grad():
            loss = loss.detach()
            norm, skipped, overflow, applied = update_weights(update, kernel, gradients, loss, veto)
            for buffer, old in zip(update.buffers.changing(), before, strict=True):
                buffer.copy_(torch.where(applied, buffer, old))
        return loss, norm, skipped, overflow

    return step


def update_weights(
    update: OptimizerStep, kernel: FusedKernel, gradients: list[Tensor], loss: Tensor, veto: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Update weights and averages unless skipped; return norm, skipped, overflow, applied."""
    norm, skipped = update.norm_and_skip(loss, tensor_norms(gradients))
    overflow = update.overflowed(norm) if update.scale else skipped
    skipped = torch.maximum(skipped, veto)
    applied = skipped == 0
    divisors = update.divisors(norm, gradients)
    index = update.updates.clamp(max=len(update.lr_table) - 1).reshape(1)
    lr = update.lr_table.index_select(0, index).squeeze(0)
    kernel.step_count.add_(applied)
    update.updates.add_(applied)
    iterator = iter(gradients)
    for group, scale, share in zip(kernel.groups, divisors, update.lr_shares, strict=True):
        own = [next(iterator) for _ in group.parameters]
        group_gradients = [_scale_gradient(gradient, scale, group.options) for gradient in own]
        group_lr = lr if share == 1.0 else lr * share
        apply = _adam_update if kernel.adam else _sgd_update
        apply(group, group_gradients, group_lr, kernel.step_count, applied)
    if update.average:
        weight = update.average_weight(skipped)
        for average, parameter in zip(update.average, update.parameters, strict=True):
            average.add_((parameter - average) * weight)
    return norm, skipped, overflow, applied


def _scale_gradient(gradient: Tensor, divisor: Tensor | None, options: dict[str, Any]) -> Tensor:
    if divisor is not None:
        gradient = gradient / divisor
    return -gradient if options["maximize"] else gradient


def _adam_update(
    group: KernelGroup, gradients: list[Tensor], lr: Tensor, count: Tensor, applied: Tensor
) -> None:
    """Adam and AdamW (Kingma and Ba 2015, Loshchilov and Hutter 2019), as in torch's kernel."""
    options = group.options
    beta1, beta2 = options["betas"]
    decay, eps = options["weight_decay"], options["eps"]
    decoupled = options["decoupled_weight_decay"]
    # in float64, as the kernel: in fp32 1 - 0.999 loses three digits
    updates = count.double().clamp(min=1)
    step_size = (lr.double() / (1 - beta1**updates)).to(lr.dtype)
    root = (1 - beta2**updates).sqrt().to(lr.dtype)
    state = zip(group.parameters, gradients, group.first_moments, group.second_moments, strict=True)
    for p, g, first, second in state:
        if decay and not decoupled:
            g = g + decay * p
        m = first + (g - first) * (1 - beta1)
        v = beta2 * second + (1 - beta2) * g * g
        decayed = p * (1 - lr * decay) if decay and decoupled else p
        new = decayed - step_size * m / (v.sqrt() / root + eps)
        for tensor, value in ((p, new), (first, m), (second, v)):
            tensor.copy_(torch.where(applied, value, tensor))


def _sgd_update(
    group: KernelGroup, gradients: list[Tensor], lr: Tensor, count: Tensor, applied: Tensor
) -> None:
    """SGD with momentum, as in torch's kernel."""
    options = group.options
    momentum = options["momentum"]
    for i, (p, g) in enumerate(zip(group.parameters, gradients, strict=True)):
        if options["weight_decay"]:
            g = g + options["weight_decay"] * p
        if momentum:
            velocity = momentum * group.first_moments[i] + (1 - options["dampening"]) * g
            g = g + momentum * velocity if options["nesterov"] else velocity
            group.first_moments[i].copy_(torch.where(applied, velocity, group.first_moments[i]))
        p.copy_(torch.where(applied, p - lr * g, p))
