"""Explain a spike: what grew compared with a healthy batch, and for which samples.

Both batches are computed with the same weights. Modules are compared by the root mean square of
their outputs, parameters by their gradient norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from runner.core.data.order import mix
from runner.core.interfaces.batch import Batch, batch_size_of, call_model, slice_rows
from runner.core.interfaces.nested import tensors
from runner.core.interfaces.run import Run
from runner.core.models import modes
from runner.core.models.modes import enter_training
from runner.core.train.step import forward_backward
from runner.diagnose.replay.results import Cause, Ratio, StepPhase, rms, tensor_stats
from runner.diagnose.replay.trace import batch_tensors, discard_step, hook_gradients, module_label

GROWTH_LIMIT = 3.0  # ratio above which growth beyond the input's is reported
MAX_LISTED = 10
MAX_SAMPLES = 4096  # above this number, losses per sample are not computed


class _StepMagnitudes:
    """RMS of inputs and outputs in order of execution, gradient norms in backward order."""

    def __init__(self, run: Run, batch: Batch) -> None:
        self.inputs: dict[str, float] = {}
        self.outputs: dict[str, float] = {}
        self.gradients: dict[str, float] = {}
        scale = 1.0 if run.update.scale is None else float(run.update.scale.value)
        enter_training(run.model)

        def record_gradient(name: str, gradient: Tensor) -> None:
            self.gradients[name] = rms(gradient) * math.sqrt(gradient.numel()) / scale

        with ExitStack() as stack:
            for name, module in modes.hookable(run.model):
                hook = module.register_forward_hook(self._measure(name), with_kwargs=True)
                stack.callback(hook.remove)
            hook_gradients(run.model, stack, record_gradient)
            stack.callback(discard_step, run)
            forward_backward(run, batch)
        self.losses = _sample_losses(run, batch)

    def _measure(self, name: str) -> Any:
        def measure(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.inputs[name] = max(map(rms, tensors((args, kwargs))), default=0.0)
            self.outputs[name] = max(map(rms, tensors(output)), default=0.0)

        return measure


def explain_spike(run: Run, batch: Batch, healthy: Batch | None) -> Cause:
    """Find what is larger in `batch` than in `healthy`, and where the growth starts.

    Without a healthy batch, parameters and samples are only ranked.
    """
    bad = _StepMagnitudes(run, batch)
    good = None if healthy is None else _StepMagnitudes(run, healthy)
    cause = Cause(StepPhase.spike, "loss and gradients are finite but large")
    median_loss = median(good.losses.values()) if good and good.losses else None
    healthy_gradients = good.gradients if good else {}
    cause.gradients = [Ratio(n, x, healthy_gradients.get(n)) for n, x in _largest(bad.gradients)]
    cause.losses = [Ratio(f"sample {i}", x, median_loss) for i, x in _largest(bad.losses)]
    cause.samples = _outliers(bad.losses)
    if good is None or healthy is None:
        cause.notes.append("no healthy batch to compare it with")
    elif not _blame_batch(batch, healthy, cause) and not _blame_model(run.model, bad, good, cause):
        cause.cause = "neither outputs nor gradients differ much from another batch's"
    return cause


def _blame_batch(batch: Batch, healthy: Batch, cause: Cause) -> bool:
    """Whether an input or target tensor is too large, which is then the cause."""
    healthy_tensors = batch_tensors(healthy)
    for name, tensor in batch_tensors(batch).items():
        healthy_tensor = healthy_tensors.get(name)
        growth = 1.0 if healthy_tensor is None else _growth(rms(tensor), rms(healthy_tensor))
        if growth > GROWTH_LIMIT:
            number = _two_digits(growth)
            cause.cause = f"the batch itself: {name} is {number} times as large as in another"
            cause.inputs = [tensor_stats(name, tensor)]
            if tensor.ndim and len(tensor) == batch_size_of(batch[1]) <= MAX_SAMPLES:
                cause.samples = _outliers(dict(enumerate(map(rms, tensor)))) or cause.samples
            return True
    return False


def _blame_model(
    model: nn.Module, bad: _StepMagnitudes, good: _StepMagnitudes, cause: Cause
) -> bool:
    """Whether a module's output or a gradient is too large, which is then set as the cause."""
    for name, output in bad.outputs.items():
        output_growth = _growth(output, good.outputs.get(name, 0.0))
        input_growth = _growth(bad.inputs[name], good.inputs.get(name, 0.0))
        if output_growth > GROWTH_LIMIT * max(input_growth, 1.0):
            cause.module = name
            description = f"returns {_two_digits(output_growth)} times its output for another batch"
            description += f", for an input {_two_digits(input_growth)} times as large"
            break
    else:
        for name, gradient in bad.gradients.items():  # in backward order
            gradient_growth = _growth(gradient, good.gradients.get(name, 0.0))
            if gradient_growth > GROWTH_LIMIT:
                cause.module, cause.parameters = name.rpartition(".")[0], [name]
                description = f"has a gradient of {name} {_two_digits(gradient_growth)} times that "
                description += "of another batch, and no module's output has grown"
                break
        else:
            return False
    module = model.get_submodule(cause.module)
    cause.kind = type(module).__name__
    cause.cause = f"{module_label(cause.module, module)} {description}"
    return True


def _sample_losses(run: Run, batch: Batch) -> dict[int, float]:
    """Return the loss per sample, from one forward; {} if it cannot be computed."""
    samples, losses = batch_size_of(batch[1]), dict[int, float]()
    if samples > MAX_SAMPLES:
        return {}
    run.device.reseed(mix(run.seed, run.progress.step + 1))
    run.update.begin()  # saves the buffers
    try:
        with torch.no_grad(), ExitStack() as stack, suppress(Exception):  # needs all samples
            for context in run.contexts:
                stack.enter_context(context())
            output = call_model(run.forward, batch[0])
            for i in range(samples):
                row = slice(i, i + 1)
                losses[i] = float(run.objective(slice_rows(output, row), slice_rows(batch[1], row)))
    finally:
        run.update.abandon()
    complete = len(losses) == samples
    return {i: x for i, x in losses.items() if math.isfinite(x)} if complete else {}


def _largest(values: Mapping[Any, float]) -> list[tuple[Any, float]]:
    return sorted(values.items(), key=lambda pair: -pair[1])[:MAX_LISTED]


def _outliers(values: dict[int, float]) -> list[int]:
    """Return samples with values far above the median, largest first."""
    if not values:
        return []
    center = median(values.values())
    spread = median(abs(x - center) for x in values.values())
    limit = center + 20 * max(spread, 0.05 * abs(center))
    return [i for i, x in _largest(values) if x > limit]


def _two_digits(times: float) -> str:
    return f"{times:.1f}" if times < 10 else f"{float(f'{times:.2g}'):,.0f}"


def _growth(bad: float, good: float) -> float:
    return bad / good if good > 0 else 1.0
