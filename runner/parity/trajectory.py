"""Record a run's steps: losses, gradients, updates, buffers, evaluation outputs.

Before each step every run gets the plain run's weights and buffers, so that differences do not
accumulate and tolerances apply to single steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from runner.data.batch import Batch, call, count, rows
from runner.models import modes
from runner.parity.flops import call_flops
from runner.parity.numerics import double, nudge
from runner.training.evaluation import evaluate
from runner.training.hook import Hook, Step
from runner.training.run import Run
from runner.training.step import forward_backward, make_step

OVERFLOWS = 20  # consecutive overflows while a loss scale settles; 65536 / 2**20 = 0.06
OUTPUTS = 2**24  # evaluation outputs to keep; no further validation batch beyond this …
BATCHES = 8  # … or beyond this many batches

Tensors = dict[str, Tensor]
"""By parameter or buffer name; on the host, in the dtype of computation."""


@dataclass
class TrajectoryState:
    """The state before a step, without the optimizer's."""

    parameters: Tensors
    buffers: Tensors
    average: Tensors  # of the parameters; empty without `optimizer.ema`


@dataclass
class StepRecord:
    """The results of one step."""

    loss: Tensor
    grad_norm: Tensor
    gradients: Tensors  # before clipping, divided by the loss scale
    after: TrajectoryState


@dataclass
class Record:
    """A trajectory: step k + 1 starts from `before(k)`."""

    start: TrajectoryState
    steps: list[StepRecord]
    outputs: list[Any]  # of validation batches, as the model returns them
    gradients_hidden: bool = False  # inside one graph, so inferred from the optimizer's moments

    def before(self, step: int) -> TrajectoryState:
        """Return the state before step `step`, 0-based."""
        return self.steps[step - 1].after if step else self.start


def place(run: Run, stretch: Stretch) -> None:
    """Move a fresh run to the first step of the stretch; a resumed run stays where it is."""
    if run.progress.step == 0:
        run.progress.step = stretch.batch
        run.update.updates.fill_(stretch.update)


def follow(
    run: Run,
    stretch: Stretch,
    path: Record | None = None,
    *,
    update: bool = True,
    in_double: bool = False,
    nudged: bool = False,
    validation: int | None = None,
) -> Record:
    """Make the steps of `stretch`, each from the state in `path`, or without it in sequence.

    With `update=False` only forward and backward; `nudged` first moves weights by one unit in the
    last place. Then evaluates the last weights on `validation` batches.
    """
    place(run, stretch)
    run.model.train()
    record = Record(snapshot(run), [], [])
    batches = run.train.batches(run.progress.step)
    try:
        for number in range(stretch.steps):
            batch = next(batches)
            if path is not None:
                load(run.model, path.before(number))
            if nudged:
                nudge(run.model, run.seed + number)
            if update:
                record.steps.append(_step(run, batch, record))
            else:
                record.steps.append(_backward(run, double(batch) if in_double else batch))
            run.progress.step += 1
    finally:
        run.train.close()
    if path is not None:
        load(run.model, path.before(stretch.steps), run)
    record.outputs = _evaluated(run, validation, in_double)
    return record


def one_step(run: Run, batch: Batch, hooks: list[Hook] | None = None) -> Step:
    """Make a step, repeated while the loss scale is too large; overflows change nothing."""
    for _ in range(OVERFLOWS):
        step = make_step(run, batch, hooks or [])[0]
        if run.update.scale is None or not step.skipped.item():  # waits for the device
            break
    return step


class TrajectoryCapture(Hook):
    """Copies the gradients before clipping modifies them in place."""

    def __init__(self) -> None:
        self.gradients: Tensors = {}

    def on_gradients(self, run: Run, step: Step) -> None:
        """Copy the gradients to the host, divided by the loss scale."""
        self.gradients = gradients_of(run)


def gradients_of(run: Run) -> Tensors:
    """Return host copies of all existing gradients, divided by the loss scale."""
    scale = 1.0 if run.update.scale is None else run.update.scale.value
    parameters = run.model.named_parameters()
    return {name: _copy(p.grad / scale) for name, p in parameters if p.grad is not None}


def snapshot(run: Run) -> TrajectoryState:
    """Return host copies of parameters, buffers and average; synchronises."""
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    averages = zip(run.update.parameters, run.update.average, strict=False)
    return TrajectoryState(
        {name: _copy(p) for name, p in run.model.named_parameters()},
        {name: _copy(b) for name, b in run.model.named_buffers()},
        {names[p]: _copy(average) for p, average in averages if isinstance(p, nn.Parameter)},
    )


@torch.no_grad()
def load(model: nn.Module, state: TrajectoryState, averaged: Run | None = None) -> None:
    """Copy parameters and buffers into the model, and the average into `averaged`."""
    for name, parameter in model.named_parameters():
        parameter.copy_(state.parameters[name])
    for name, buffer in model.named_buffers():
        value = state.buffers.get(name)
        # an expanded view cannot be copied into, and need not be
        if value is not None and value.shape == buffer.shape:
            if not torch.equal(buffer, value.to(buffer)):
                buffer.copy_(value)
    if averaged is not None and averaged.update.average:
        names = {parameter: name for name, parameter in model.named_parameters()}
        for p, average in zip(averaged.update.parameters, averaged.update.average, strict=True):
            average.copy_(state.average[names[p]])  # type: ignore[index]


def _step(run: Run, batch: Batch, record: Record) -> StepRecord:
    """Make a full step; gradients inside one graph are inferred from the optimizer's moments."""
    capture = TrajectoryCapture()
    hidden = run.whole is not None and run.whole.takes(batch)
    before = _moments(run) if hidden else {}
    step = one_step(run, batch, [] if hidden else [capture])
    gradients = _inferred(run, step, before) if hidden else capture.gradients
    record.gradients_hidden |= hidden
    return StepRecord(_copy(step.loss), _copy(step.grad_norm), gradients, snapshot(run))


def _backward(run: Run, batch: Batch) -> StepRecord:
    """Run forward and backward, lowering the loss scale until the gradients are finite."""
    for _ in range(OVERFLOWS):
        step = forward_backward(run, batch)
        if run.update.scale is None or step.grad_norm.isfinite():  # waits for the device
            break
        run.update.scale.lower(0.5)
        run.update.abandon()
    gradients, buffers = gradients_of(run), snapshot(run).buffers
    run.update.abandon()
    return StepRecord(
        _copy(step.loss), _copy(step.grad_norm), gradients, TrajectoryState({}, buffers, {})
    )


def _moments(run: Run) -> dict[Tensor, tuple[Tensor, Tensor]]:
    """Return copies of each parameter and its first moment (zeros if there is none)."""
    return {p: (p.detach().clone(), _moment(run, p).clone()) for p in run.update.parameters}


def _moment(run: Run, parameter: Tensor) -> Tensor:
    state = run.update.optimizer.state.get(parameter, {})
    moment = state.get("exp_avg", state.get("momentum_buffer"))
    return moment if isinstance(moment, Tensor) else torch.zeros_like(parameter)


def _inferred(run: Run, step: Step, before: dict[Tensor, tuple[Tensor, Tensor]]) -> Tensors:
    """Infer a step's gradients from the change of the optimizer's first moment.

    Adam's is beta1 * m + (1 - beta1) * g, SGD's is momentum * m + (1 - dampening) * g, with clipped
    g; the norm undoes the clipping, and coupled weight decay is subtracted. {} without a moment, or
    if clipping is not by a single norm.
    """
    update, groups = run.update, run.update.optimizer.param_groups
    if update.clip is not None or not all(g.get("betas") or g.get("momentum") for g in groups):
        return {}
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    excess = 1.0
    if update.clip_norm is not None:
        excess = max(float(step.grad_norm) / update.clip_norm, 1.0)
    gradients: Tensors = {}
    for group in groups:
        adam = "betas" in group
        kept = float(group["betas"][0]) if adam else float(group["momentum"])
        share = 1 - kept if adam else 1 - float(group["dampening"])
        decay = 0.0 if group.get("decoupled_weight_decay") else float(group["weight_decay"])
        sign = -1.0 if group.get("maximize") else 1.0
        for p in group["params"]:
            weight, moment = (t.double() for t in before[p])
            value = (_moment(run, p).double() - kept * moment) / share
            gradients[names[p]] = _copy(sign * excess * (value - decay * weight))
    return gradients


# -- evaluation ------------------------------------------------------------------------------------


def _evaluated(run: Run, batches: int | None, in_double: bool) -> list[Any]:
    """Return evaluation outputs of `batches` validation batches; None: up to the size limits."""
    outputs: list[Any] = []
    every, forward = run.validation.batches, run.forward

    def some(start: int) -> Iterator[Batch]:
        for number, batch in enumerate(every(start)):
            sizes = (t.numel() for t in tree_leaves(outputs) if isinstance(t, Tensor))
            if number == (batches or BATCHES) or (batches is None and sum(sizes) > OUTPUTS):
                return
            yield double(batch) if in_double else batch

    def recorded(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        outputs.append(tree_map(lambda x: _copy(x) if isinstance(x, Tensor) else x, output))
        return output

    patches = mock.patch.object(run.validation, "batches", some)
    with patches, mock.patch.object(run, "forward", recorded):
        evaluate(run)
    run.validation.close()
    return outputs


# -- updates ---------------------------------------------------------------------------------------


def updates(run: Run, stretch: Stretch, path: Record, fed: Record) -> Iterator[TrajectoryState]:
    """Yield the state after each update by `run`, with the gradients of `fed`.

    Without forward and backward, only the update can differ.
    """
    place(run, stretch)
    run.model.train()
    for number, step in enumerate(fed.steps):
        load(run.model, path.before(number))
        run.update.begin()
        for name, parameter in run.model.named_parameters():
            gradient = step.gradients.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter, copy=True)
        loss = step.loss.to(run.update.parameters[0])
        run.update.apply(*run.update.measure(loss))
        run.progress.step += 1
        yield snapshot(run)


def _copy(value: Tensor) -> Tensor:
    """Return a host copy; synchronises."""
    return value.detach().to("cpu", copy=True)


# -- choice of the steps to compare: number, learning rates, batches -------------------------------

STEPS = 40
LEAST = 6  # minimum steps, however large the model
WEIGHTS = 2**26  # times steps; four numbers per weight and step on the host: 1 GB
FLOPS = {"cpu": 2e11}  # of all steps together; a few seconds per run
FLOPS_ELSEWHERE = 2e13


@dataclass(frozen=True)
class Stretch:
    """The steps to compare: first batch and update, 0-based, and their number."""

    batch: int
    update: int
    steps: int


def choose_stretch(run: Run, asked: int | None) -> tuple[Stretch, list[str]]:
    """Choose steps after warm-up where the rate changes most, around an epoch's last batch.

    Also returns what they omit. A resumed run continues from its step.
    """
    per_epoch, reason = run.train.steps_per_epoch, ""
    steps = asked or affordable(run)
    if asked is None and steps < STEPS:
        weights = sum(parameter.numel() for parameter in run.model.parameters())
        reason = f": {weights:,} weights, {step_flops(run) / 1e9:,.1f} GFLOP a step"
    update = 0 if run.progress.step else first_update(run.update.factors, steps)
    batch = update
    if per_epoch > steps:  # else every stretch contains the end of an epoch
        batch += (per_epoch - 1 - steps // 2 - update) % per_epoch
    left_out = [f"effects that begin after {steps} steps{reason}"]
    if update:
        left_out.append(f"learning rates outside updates {update + 1} to {update + steps}")
    return Stretch(batch, update, steps), left_out


def first_update(factors: Sequence[float], steps: int) -> int:
    """Return the start of the `steps` updates after warm-up between which the rate changes most."""
    peak = factors.index(max(factors))
    starts = range(peak, max(peak, len(factors) - steps) + 1)
    last = len(factors) - 1
    return max(starts, key=lambda u: round(abs(factors[u] - factors[min(last, u + steps - 1)]), 9))


def affordable(run: Run) -> int:
    """Return the number of steps to make: `STEPS`, or fewer for a large model."""
    weights = sum(parameter.numel() for parameter in run.model.parameters())
    most = FLOPS.get(run.device.kind, FLOPS_ELSEWHERE)
    by_work = int(most / max(step_flops(run), 1))
    return max(LEAST, min(STEPS, WEIGHTS // max(weights, 1), by_work))


def step_flops(run: Run) -> float:
    """Return FLOPs of forward and backward of a batch; backward counts twice the forward."""
    inputs, target = run.train.at(run.progress.step)
    part = rows(inputs, slice(0, 1))
    counted = 0
    # fails for a model with a fixed batch size
    with suppress(RuntimeError, NotImplementedError, TypeError, ValueError):
        with modes.evaluation_mode(run.model):  # keeps statistics, allows a single sample
            counted = call_flops(lambda: call(run.forward, part), grad=False)
    weights = sum(parameter.numel() for parameter in run.model.parameters())
    return 3.0 * count(target) * max(counted, 2 * weights)
