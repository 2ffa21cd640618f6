"""Record a run's steps: losses, gradients, updates, buffers, evaluation outputs.

Before each step every run gets the plain run's weights and buffers, so that differences do not
accumulate and tolerances apply to single steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from runner.core.execution.evaluation import evaluate
from runner.core.interfaces.batch import Batch, batch_size_of, call_model, slice_rows
from runner.core.interfaces.hook import Hook, Step
from runner.core.interfaces.run import Run
from runner.core.models import modes
from runner.core.models.modes import enter_training
from runner.core.preserved_state import NotRestorable
from runner.core.techniques.cost import count_flops
from runner.core.train.step import forward_backward, make_step
from runner.measure.parity.numerics import perturb_weights, to_fp64

MAX_OVERFLOWS = 132  # consecutive overflows while a loss scale settles: from the largest to 0.06
MAX_OUTPUT_VALUES = 2**24  # evaluation outputs to keep; no further validation batch beyond this …
MAX_OUTPUT_BATCHES = 8  # … or beyond this many batches

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
    moved: Tensors = field(default_factory=dict)  # weights that the forward changed, before the …
    # … update; of those inside one graph, which are not judged, as in the reference
    hidden: frozenset[str] = frozenset()


@dataclass
class Trajectory:
    """The recorded steps of a run: step k + 1 starts from `state_before(k)`."""

    start: TrajectoryState
    steps: list[StepRecord]
    outputs: list[Any]  # of validation batches, as the model returns them
    gradients_hidden: bool = False  # inside one graph, so inferred from the optimizer's moments

    def state_before(self, step: int) -> TrajectoryState:
        """Return the state before step `step`, 0-based."""
        return self.steps[step - 1].after if step else self.start


def seek_window(run: Run, window: StepWindow) -> None:
    """Move a fresh run to the first step of the window; a resumed run stays where it is."""
    if run.progress.step == 0:
        run.progress.step = window.batch
        run.update.updates.fill_(window.update)


def record_trajectory(
    run: Run,
    window: StepWindow,
    reference: Trajectory | None = None,
    *,
    update: bool = True,
    fp64: bool = False,
    perturbed: bool = False,
    validation_batches: int | None = None,
) -> Trajectory:
    """Make the steps of `window`, each from the state in `reference`, or without it in sequence.

    With `update=False` only forward and backward; `perturbed` first changes each weight by one
    unit in the last place. Then evaluates the last weights on `validation_batches` batches.
    """
    seek_window(run, window)
    enter_training(run.model)
    trajectory = Trajectory(snapshot(run), [], [])
    batches = run.train.batches(run.progress.step)
    try:
        for number in range(window.steps):
            batch = next(batches)
            if reference is not None:
                load_state(run.model, reference.state_before(number))
            if perturbed:
                perturb_weights(run.model, run.seed + number)
            if update:
                step = _record_step(run, batch, trajectory)
            else:
                step = _record_backward(run, to_fp64(batch) if fp64 else batch)
            if reference is not None and step.hidden:
                moved = reference.steps[number].moved.items()
                step.moved |= {name: value for name, value in moved if name in step.hidden}
            trajectory.steps.append(step)
            run.progress.step += 1
    finally:
        run.train.close()
    if reference is not None:
        load_state(run.model, reference.state_before(window.steps), run)
    trajectory.outputs = _record_outputs(run, validation_batches, fp64)
    return trajectory


def make_finite_step(run: Run, batch: Batch, hooks: list[Hook] | None = None) -> Step:
    """Make a step, repeated while the loss scale is too large; overflows change nothing."""
    for _ in range(MAX_OVERFLOWS):
        step = make_step(run, batch, hooks or [])[0]
        if run.update.scale is None or not step.skipped.item():  # waits for the device
            break
    return step


class TrajectoryCapture(Hook):
    """Copies the gradients before clipping modifies them in place, and what the forward moved."""

    def __init__(self, before: Tensors | None = None) -> None:
        """`before` are the weights before the step; without them `moved` stays empty."""
        self.gradients, self.moved, self.before = Tensors(), Tensors(), before

    def on_gradients(self, run: Run, step: Step) -> None:
        """Copy the gradients to the host, divided by the loss scale, and the moved weights."""
        self.gradients = copy_gradients(run)
        if self.before is not None:
            self.moved = _moved_weights(run, self.before)


def copy_gradients(run: Run) -> Tensors:
    """Return host copies of all existing gradients, divided by the loss scale."""
    scale = 1.0 if run.update.scale is None else run.update.scale.value
    parameters = run.model.named_parameters()
    return {name: _to_host(p.grad / scale) for name, p in parameters if p.grad is not None}


def _copy_weights(run: Run) -> Tensors:
    return {name: _to_host(p) for name, p in run.model.named_parameters()}


def _moved_weights(run: Run, before: Tensors) -> Tensors:
    """Return the weights that differ from those before the step, such as a teacher's."""
    weights = _copy_weights(run)
    return {n: value for n, value in weights.items() if not torch.equal(value, before[n])}


def snapshot(run: Run) -> TrajectoryState:
    """Return host copies of parameters, buffers and average; synchronises."""
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    averages = zip(run.update.parameters, run.update.average, strict=False)
    return TrajectoryState(
        _copy_weights(run),
        {name: _to_host(b) for name, b in run.model.named_buffers()},
        {names[p]: _to_host(average) for p, average in averages if isinstance(p, nn.Parameter)},
    )


@torch.no_grad()
def load_state(model: nn.Module, state: TrajectoryState, averaged_run: Run | None = None) -> None:
    """Copy parameters and buffers into the model, and the average into `averaged_run`."""
    for name, parameter in model.named_parameters():
        parameter.copy_(state.parameters[name])
    for name, buffer in model.named_buffers():
        value = state.buffers.get(name)
        # an expanded view cannot be copied into, and need not be
        if value is not None and value.shape == buffer.shape:
            if not torch.equal(buffer, value.to(buffer)):
                buffer.copy_(value)
    if averaged_run is not None and averaged_run.update.average:
        names, update = {id(p): name for name, p in model.named_parameters()}, averaged_run.update
        for p, average in zip(update.parameters, update.average, strict=True):
            average.copy_(state.average[names[id(p)]])


def _record_step(run: Run, batch: Batch, trajectory: Trajectory) -> StepRecord:
    """Make a full step; gradients inside one graph are inferred from the optimizer's moments."""
    before = _copy_weights(run)
    capture = TrajectoryCapture(before)
    if run.step_graph is None or not run.step_graph.takes(batch):
        step = make_finite_step(run, batch, [capture])
        gradients, moved, hidden = capture.gradients, capture.moved, frozenset[str]()
    else:
        trajectory.gradients_hidden, moments = True, _copy_moments(run)
        step = make_finite_step(run, batch, [])
        gradients, hidden = _infer_gradients(run, step, moments), frozenset(update_names(run))
        moved = {n: x for n, x in _moved_weights(run, before).items() if n not in hidden}
    loss, norm = _to_host(step.loss), _to_host(step.grad_norm)
    return StepRecord(loss, norm, gradients, snapshot(run), moved, hidden)


def _record_backward(run: Run, batch: Batch) -> StepRecord:
    """Run forward and backward, lowering the loss scale until the gradients are finite."""
    before = _copy_weights(run)
    for _ in range(MAX_OVERFLOWS):
        step = forward_backward(run, batch)
        if run.update.scale is None or step.grad_norm.isfinite():  # waits for the device
            break
        run.update.scale.lower(0.5)
        run.update.abandon()
    gradients, buffers = copy_gradients(run), snapshot(run).buffers
    moved = _moved_weights(run, before)
    run.update.abandon()  # restores buffers and weights that the forward moved
    loss, norm, after = step.loss, step.grad_norm, TrajectoryState({}, buffers, {})
    return StepRecord(_to_host(loss), _to_host(norm), gradients, after, moved)


def update_names(run: Run) -> set[str]:
    """Return the names of the weights that the optimizer updates."""
    updated = {id(parameter) for parameter in run.update.parameters}
    return {name for name, p in run.model.named_parameters() if id(p) in updated}


def _copy_moments(run: Run) -> dict[Tensor, tuple[Tensor, Tensor]]:
    """Return copies of each parameter and its first moment (zeros if there is none)."""
    return {p: (p.detach().clone(), _first_moment(run, p).clone()) for p in run.update.parameters}


def _first_moment(run: Run, parameter: Tensor) -> Tensor:
    state = run.update.optimizer.state.get(parameter, {})
    moment = state.get("exp_avg", state.get("momentum_buffer"))
    return moment if isinstance(moment, Tensor) else torch.zeros_like(parameter)


def _infer_gradients(run: Run, step: Step, moments: dict[Tensor, tuple[Tensor, Tensor]]) -> Tensors:
    """Infer a step's gradients from the change of the optimizer's first moment.

    Adam's is beta1 * m + (1 - beta1) * g, SGD's is momentum * m + (1 - dampening) * g, with clipped
    g; the norm undoes the clipping, and coupled weight decay is subtracted. {} without a moment, or
    if clipping is not by a single norm.
    """
    update, groups = run.update, run.update.optimizer.param_groups
    if update.clip is not None or not all(g.get("betas") or g.get("momentum") for g in groups):
        return {}
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    limit = update.clip_norm
    clip_ratio = 1.0 if limit is None else max(float(step.grad_norm) / limit, 1.0)
    gradients: Tensors = {}
    for group in groups:
        adam = "betas" in group
        momentum = float(group["betas"][0]) if adam else float(group["momentum"])
        gradient_share = 1 - momentum if adam else 1 - float(group["dampening"])
        weight_decay = 0.0 if group.get("decoupled_weight_decay") else float(group["weight_decay"])
        sign = -1.0 if group.get("maximize") else 1.0
        for p in group["params"]:
            weight, moment = (to_fp64(t) for t in moments[p])
            value = (to_fp64(_first_moment(run, p)) - momentum * moment) / gradient_share
            gradients[names[p]] = _to_host(sign * clip_ratio * (value - weight_decay * weight))
    return gradients


# -- evaluation ------------------------------------------------------------------------------------


def _record_outputs(run: Run, max_batches: int | None, fp64: bool) -> list[Any]:
    """Return outputs of `max_batches` validation batches; None: up to the size limits."""
    outputs: list[Any] = []
    all_batches, forward = run.validation.batches, run.forward

    def limited_batches(start: int) -> Iterator[Batch]:
        for number, batch in enumerate(all_batches(start)):
            size = sum(t.numel() for t in tree_leaves(outputs) if isinstance(t, Tensor))
            is_full = max_batches is None and size > MAX_OUTPUT_VALUES
            if is_full or number == (max_batches or MAX_OUTPUT_BATCHES):
                return
            yield to_fp64(batch) if fp64 else batch

    def recording_forward(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        outputs.append(tree_map(lambda x: _to_host(x) if isinstance(x, Tensor) else x, output))
        return output

    patches = mock.patch.object(run.validation, "batches", limited_batches)
    with patches, mock.patch.object(run, "forward", recording_forward):
        evaluate(run)
    run.validation.close()
    return outputs


# -- updates ---------------------------------------------------------------------------------------


def replay_updates(
    run: Run, window: StepWindow, reference: Trajectory, gradient_source: Trajectory
) -> Iterator[TrajectoryState]:
    """Yield the state after each update by `run`, with the gradients of `gradient_source`.

    Without forward and backward, only the update can differ. It starts from the weights as the
    forward of `gradient_source` has moved them.
    """
    seek_window(run, window)
    enter_training(run.model)
    for number, step in enumerate(gradient_source.steps):
        start = reference.state_before(number)
        load_state(run.model, replace(start, parameters=start.parameters | step.moved))
        run.update.begin()
        for name, parameter in run.model.named_parameters():
            gradient = step.gradients.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter, copy=True)
        weight = run.update.parameters[0]
        dtype = weight.dtype.to_real() if weight.is_complex() else weight.dtype
        run.update.apply(*run.update.measure(step.loss.to(weight.device, dtype)))
        run.progress.step += 1
        yield snapshot(run)


def _to_host(value: Tensor) -> Tensor:
    """Return a host copy; synchronises."""
    return value.detach().to("cpu", copy=True)


# -- choice of the steps to compare: number, learning rates, batches -------------------------------

STEPS = 40
MIN_STEPS = 6  # however large the model
MAX_WEIGHT_STEPS = 2**26  # weights times steps; four numbers per weight and step on the host: 1 GB
MAX_FLOPS, ACCELERATOR_MAX_FLOPS = 2e11, 2e13  # of all steps together; a few seconds per run


@dataclass(frozen=True)
class StepWindow:
    """The steps to compare: first batch and update, 0-based, and their number."""

    batch: int
    update: int
    steps: int


def choose_window(run: Run, requested: int | None) -> tuple[StepWindow, list[str]]:
    """Choose steps after warm-up where the rate changes most, around an epoch's last batch.

    Also returns what they omit. A resumed run continues from its step.
    """
    per_epoch, reason = run.train.steps_per_epoch, ""
    steps = requested or affordable_steps(run)
    if requested is None and steps < STEPS:
        reason = f": {_weights(run):,} weights, {step_flops(run) / 1e9:,.1f} GFLOP a step"
    update = 0 if run.progress.step else first_update(run.update.factors, steps)
    batch = update
    if per_epoch > steps:  # else every window contains the end of an epoch
        batch += (per_epoch - 1 - steps // 2 - update) % per_epoch
    omissions = [f"effects that begin after {steps} steps{reason}"]
    if update:
        omissions.append(f"learning rates outside updates {update + 1} to {update + steps}")
    return StepWindow(batch, update, steps), omissions


def first_update(factors: Sequence[float], steps: int) -> int:
    """Return the start of the `steps` updates after warm-up between which the rate changes most."""
    peak = factors.index(max(factors))
    starts = range(peak, max(peak, len(factors) - steps) + 1)
    last = len(factors) - 1
    return max(starts, key=lambda u: round(abs(factors[u] - factors[min(last, u + steps - 1)]), 9))


def affordable_steps(run: Run) -> int:
    """Return the number of steps to make: `STEPS`, or fewer for a large model."""
    max_flops = MAX_FLOPS if run.device.kind == "cpu" else ACCELERATOR_MAX_FLOPS
    steps_by_flops = int(max_flops / max(step_flops(run), 1))
    return max(MIN_STEPS, min(STEPS, MAX_WEIGHT_STEPS // max(_weights(run), 1), steps_by_flops))


def _weights(run: Run) -> int:
    return sum(parameter.numel() for parameter in run.model.parameters())


def step_flops(run: Run) -> float:
    """Return FLOPs of forward and backward of a batch; backward counts twice the forward."""
    inputs, target = run.train.at(run.progress.step)
    sample = slice_rows(inputs, slice(0, 1))
    forward_flops = 0
    # fails for a model with a fixed batch size, or functions without a formula
    with suppress(RuntimeError, NotImplementedError, TypeError, ValueError, NotRestorable):
        with modes.evaluation_mode(run.model):  # keeps statistics, allows a single sample
            forward_flops, _ = count_flops(lambda: call_model(run.forward, sample))
    return 3.0 * batch_size_of(target) * max(forward_flops, 2 * _weights(run))
