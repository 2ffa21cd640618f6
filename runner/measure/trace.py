"""What a run computes in its first steps: losses, gradients, parameters, buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.batch import Batch
from runner.hook import Hook, Step
from runner.measure.numerics import double
from runner.run import Run
from runner.step import make_step

OVERFLOWS = 20  # in a row, while a loss scale settles; 65536 halved as often is 0.06


class Kind(IntEnum):
    """What a tensor is, in the order in which a step computes them."""

    loss = 0
    grad_norm = 1
    gradient = 2
    parameter = 3
    buffer = 4
    draw = 5  # a statistic over several draws of dropout


class Spot(NamedTuple):
    """One tensor at one step; 1 is the first step followed, 0 is before it."""

    step: int
    kind: Kind
    name: str


Trace = dict[Spot, Tensor]
"""In the order computed; on the host, in the type they were computed in."""


def follow(run: Run, steps: int, *, in_double: bool = False) -> Trace:
    """Make `steps` real steps and keep what they computed; loss and norm of each.

    Gradients, parameters and buffers are kept at steps 1, 2 and the last: before chaos amplifies,
    once there is an optimizer state to go wrong, and at the end. Where the whole step is one
    graph nobody sees gradients; those of the first step are told from the optimizer's moments.
    """
    found: Trace = {}
    kept = {1, 2, steps}
    capture = _Capture()
    fresh = run.progress.step == 0
    run.model.train()
    for name, parameter in run.model.named_parameters():
        found[Spot(0, Kind.parameter, name)] = _kept(parameter)
    batches = run.train.batches(run.progress.step)
    try:
        for number in range(1, steps + 1):
            batch = next(batches)
            if in_double:
                batch = double(batch)
            whole = run.whole is not None and run.whole.takes(batch)
            wanted = number in kept
            step = one_step(run, batch, [capture] if wanted and not whole else [])
            run.progress.step += 1
            found[Spot(number, Kind.loss, "loss")] = _kept(step.loss)
            found[Spot(number, Kind.grad_norm, "grad_norm")] = _kept(step.grad_norm)
            if not wanted:
                continue
            if not whole:
                gradients = capture.gradients
            else:
                gradients = _told(run, step) if number == 1 and fresh else {}
            found.update({Spot(number, Kind.gradient, n): g for n, g in gradients.items()})
            for name, parameter in run.model.named_parameters():
                found[Spot(number, Kind.parameter, name)] = _kept(parameter)
            for name, buffer in run.model.named_buffers():
                found[Spot(number, Kind.buffer, name)] = _kept(buffer)
    finally:
        run.train.close()
    return found


def one_step(run: Run, batch: Batch, hooks: list[Hook] | None = None) -> Step:
    """A step, made again for as long as a loss scale is still too large: that changes nothing."""
    for _ in range(OVERFLOWS):
        step = make_step(run, batch, hooks or [])[0]
        if run.update.scale is None or not step.skipped.item():  # waits for the device
            break
    return step


class _Capture(Hook):
    """Copies the gradients before the update may clip them in place."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}

    def on_gradients(self, run: Run, step: Step) -> None:
        """Copy them to the host, without the loss scale."""
        scale = run.update.scale
        self.gradients = {}
        for name, parameter in run.model.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                self.gradients[name] = _kept(gradient if scale is None else gradient / scale.value)


def _told(run: Run, step: Step) -> dict[str, Tensor]:
    """The gradients of the very first step, from what the optimizer's first moment became.

    Adam's is (1 - beta1) * g, SGD's is g; both after clipping, which the norm undoes. Coupled
    weight decay would be in it, and such groups are left out.
    """
    if run.update.clip is not None:
        return {}  # other kinds of clipping cannot be undone
    clip = run.update.clip_norm
    excess = 1.0 if clip is None else max(float(step.grad_norm) / clip, 1.0)
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    found: dict[nn.Parameter, Tensor] = {}
    for group in run.update.optimizer.param_groups:
        if group.get("weight_decay") and not group.get("decoupled_weight_decay"):
            continue
        sign = -1.0 if group.get("maximize") else 1.0
        share = 1 - float(group["betas"][0]) if "betas" in group else 1 - group.get("dampening", 0)
        for parameter in group["params"]:
            state: dict[str, Any] = run.update.optimizer.state.get(parameter, {})
            moment = state.get("exp_avg", state.get("momentum_buffer"))
            if moment is not None and share:
                found[parameter] = _kept(moment) * (sign * excess / share)
    return {names[parameter]: gradient for parameter, gradient in found.items()}


def _kept(value: Tensor) -> Tensor:
    """A copy on the host; waits for the device."""
    return value.detach().to("cpu", copy=True)


@contextmanager
def remembered(run: Run) -> Iterator[Any]:
    """Call what is yielded to bring parameters and buffers back to what they were."""
    tensors = [*run.model.parameters(), *run.model.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]

    @torch.no_grad()
    def restore() -> None:
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)

    yield restore
