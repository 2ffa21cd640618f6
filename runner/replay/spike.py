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

from runner.data.batch import Batch, call, count, rows
from runner.data.nested import tensors
from runner.data.order import mix
from runner.models import modes
from runner.replay.findings import Cause, Ratio, StepPhase, size, stats
from runner.replay.trace import batch_tensors, label, leave, watch_gradients
from runner.training.run import Run
from runner.training.step import forward_backward

JUMP = 3.0  # ratio above which growth beyond the input's is reported
LISTED = 10
SAMPLES = 4096  # above this number, losses per sample are not computed


class _Sizes:
    """Sizes of inputs and outputs in order of execution, and gradients in backward order."""

    def __init__(self, run: Run, batch: Batch) -> None:
        self.inputs: dict[str, float] = {}
        self.outputs: dict[str, float] = {}
        self.gradients: dict[str, float] = {}
        scale = 1.0 if run.update.scale is None else float(run.update.scale.value)
        run.model.train()

        def note(name: str, gradient: Tensor) -> None:
            self.gradients[name] = size(gradient) * math.sqrt(gradient.numel()) / scale

        with ExitStack() as stack:
            for name, module in modes.hookable(run.model):
                hook = module.register_forward_hook(self._measure(name), with_kwargs=True)
                stack.callback(hook.remove)
            watch_gradients(run.model, stack, note)
            stack.callback(leave, run)
            forward_backward(run, batch)
        self.losses = _sample_losses(run, batch)

    def _measure(self, name: str) -> Any:
        def measure(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.inputs[name] = max(map(size, tensors((args, kwargs))), default=0.0)
            self.outputs[name] = max(map(size, tensors(output)), default=0.0)

        return measure


def explain_spike(run: Run, batch: Batch, healthy: Batch | None) -> Cause:
    """Find what is larger in `batch` than in `healthy`, and where the growth starts.

    Without a healthy batch, parameters and samples are only ranked.
    """
    bad = _Sizes(run, batch)
    good = None if healthy is None else _Sizes(run, healthy)
    cause = Cause(StepPhase.spike, "loss and gradients are finite but large")
    usual = median(good.losses.values()) if good and good.losses else None
    slopes = good.gradients if good else {}
    cause.gradients = [Ratio(n, x, slopes.get(n)) for n, x in _largest(bad.gradients)]
    cause.losses = [Ratio(f"sample {i}", x, usual) for i, x in _largest(bad.losses)]
    cause.samples = _outliers(bad.losses)
    if good is None or healthy is None:
        cause.notes.append("no healthy batch to compare it with")
    elif not _in_batch(batch, healthy, cause) and not _in_model(run.model, bad, good, cause):
        cause.cause = "neither outputs nor gradients differ much from another batch's"
    return cause


def _in_batch(batch: Batch, healthy: Batch, cause: Cause) -> bool:
    """Whether an input or target tensor is too large, which is then the cause."""
    usual = batch_tensors(healthy)
    for name, tensor in batch_tensors(batch).items():
        times = _times(size(tensor), size(usual[name])) if name in usual else 1.0
        if times > JUMP:
            number = _two_digits(times)
            cause.cause = f"the batch itself: {name} is {number} times as large as in another"
            cause.inputs = [stats(name, tensor)]
            if tensor.ndim and len(tensor) == count(batch[1]) <= SAMPLES:
                cause.samples = _outliers(dict(enumerate(map(size, tensor)))) or cause.samples
            return True
    return False


def _in_model(model: nn.Module, bad: _Sizes, good: _Sizes, cause: Cause) -> bool:
    """Whether a module's output or a gradient is too large, which is then set as the cause."""
    for name, output in bad.outputs.items():
        grown = _times(output, good.outputs.get(name, 0.0))
        before = _times(bad.inputs[name], good.inputs.get(name, 0.0))
        if grown > JUMP * max(before, 1.0):
            cause.module = name
            growth = f"returns {_two_digits(grown)} times its output for another batch"
            growth += f", for an input {_two_digits(before)} times as large"
            break
    else:
        for name, gradient in bad.gradients.items():  # in backward order
            times = _times(gradient, good.gradients.get(name, 0.0))
            if times > JUMP:
                cause.module, cause.parameters = name.rpartition(".")[0], [name]
                growth = f"has a gradient of {name} {_two_digits(times)} times that of another "
                growth += "batch, and no module's output has grown"
                break
        else:
            return False
    module = model.get_submodule(cause.module)
    cause.kind = type(module).__name__
    cause.cause = f"{label(cause.module, module)} {growth}"
    return True


def _sample_losses(run: Run, batch: Batch) -> dict[int, float]:
    """Return the loss per sample, from one forward; {} if it cannot be computed."""
    samples, losses = count(batch[1]), dict[int, float]()
    if samples > SAMPLES:
        return {}
    run.device.reseed(mix(run.seed, run.progress.step + 1))
    run.update.begin()  # saves the buffers
    try:
        with torch.no_grad(), ExitStack() as stack, suppress(Exception):  # needs all samples
            for context in run.contexts:
                stack.enter_context(context())
            output = call(run.forward, batch[0])
            for i in range(samples):
                one = slice(i, i + 1)
                losses[i] = float(run.objective(rows(output, one), rows(batch[1], one)))
    finally:
        run.update.abandon()
    complete = len(losses) == samples
    return {i: x for i, x in losses.items() if math.isfinite(x)} if complete else {}


def _largest(values: Mapping[Any, float]) -> list[tuple[Any, float]]:
    return sorted(values.items(), key=lambda pair: -pair[1])[:LISTED]


def _outliers(values: dict[int, float]) -> list[int]:
    """Return samples with values far above the median, largest first."""
    if not values:
        return []
    middle = median(values.values())
    spread = median(abs(x - middle) for x in values.values())
    limit = middle + 20 * max(spread, 0.05 * abs(middle))
    return [i for i, x in _largest(values) if x > limit]


def _two_digits(times: float) -> str:
    return f"{times:.1f}" if times < 10 else f"{float(f'{times:.2g}'):,.0f}"


def _times(bad: float, good: float) -> float:
    return bad / good if good > 0 else 1.0
