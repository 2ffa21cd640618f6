"""A step that is finite and far too large: what grew, against a healthy batch, and which samples.

Both batches are computed with the same weights. Modules are compared by the root mean square of
their outputs, parameters by the norm of their gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from runner.data.batch import Batch, call, count, rows
from runner.data.seeds import mix
from runner.models import modes
from runner.replay.findings import Cause, Ratio, StepPhase
from runner.replay.statistics import size, state_of, stats, tensors
from runner.replay.trace import batch_tensors, label, leave
from runner.replay.tracer import named
from runner.training.run import Run
from runner.training.step import forward_backward

JUMP = 3.0  # times more than its input grew
LISTED = 10
SAMPLES = 4096  # the most whose losses are computed one by one


def explain_spike(run: Run, batch: Batch, healthy: Batch | None) -> Cause:
    """What is larger in `batch` than in `healthy`, and where that begins.

    Without a healthy batch parameters and samples are ranked, and no beginning is named.
    """
    run.model.train()
    bad = _Sizes(run, batch)
    good = _Sizes(run, healthy) if healthy is not None else None
    found = Cause(StepPhase.spike, "loss and gradients are finite and large")
    slopes = good.gradients if good else {}
    ranked = [Ratio(n, x, slopes.get(n)) for n, x in bad.gradients.items()]
    found.gradients = sorted(ranked, key=lambda ratio: -ratio.bad)[:LISTED]
    losses = _sample_losses(run, batch)
    usual = _median(_sample_losses(run, healthy).values()) if healthy is not None else None
    largest = sorted(losses.items(), key=lambda pair: -pair[1])[:LISTED]
    found.losses = [Ratio(f"sample {i}", x, usual) for i, x in largest]
    found.samples = _outliers(losses)
    if good is None or healthy is None:
        found.notes.append("no healthy batch to compare it with")
        return found
    growth = [Ratio(n, x, good.outputs.get(n)) for n, x in bad.outputs.items()]
    found.growth = [ratio for ratio in growth if ratio.times is not None][:200]
    if not _in_batch(batch, healthy, found) and not _in_model(run, bad, good, found):
        found.cause = "neither outputs nor gradients are far from those of another batch"
    return found


def _in_batch(batch: Batch, healthy: Batch, found: Cause) -> bool:
    """Whether the batch itself is too large; the cause is then in `found`."""
    theirs = dict(batch_tensors(healthy))
    for name, tensor in batch_tensors(batch):
        times = _times(size(tensor), size(theirs[name])) if name in theirs else 1.0
        if times > JUMP:
            number = _two_digits(times)
            found.cause = f"the batch itself: {name} is {number} times as large as in another"
            found.inputs = [stats(name, tensor)]
            if tensor.ndim and len(tensor) == count(batch[1]) <= SAMPLES:
                sizes = {i: size(row) for i, row in enumerate(tensor)}
                found.samples = _outliers(sizes) or found.samples
            return True
    return False


def _in_model(run: Run, bad: _Sizes, good: _Sizes, found: Cause) -> bool:
    """Whether a module's output, or else a parameter's gradient, is too large."""
    for name, output in bad.outputs.items():
        grown = _times(output, good.outputs.get(name, 0.0))
        before = _times(bad.inputs[name], good.inputs.get(name, 0.0))
        if grown > JUMP * max(before, 1.0):
            module = _blame(run, name, found)
            found.cause = (
                f"{label(name, module)} returns {_two_digits(grown)} times what it does for "
                f"another batch, of an input {_two_digits(before)} times as large"
            )
            return True
    for name, gradient in bad.gradients.items():  # in the order of the backward
        times = _times(gradient, good.gradients.get(name, 0.0))
        if times > JUMP:
            _blame(run, name.rpartition(".")[0], found)
            found.parameters = [name]
            found.cause = (
                f"the gradient of {name} is {_two_digits(times)} times that of another batch, and "
                "no module's output is"
            )
            return True
    return False


def _blame(run: Run, name: str, found: Cause) -> nn.Module:
    module = run.model.get_submodule(name)
    found.module, found.kind, found.state = name, type(module).__name__, state_of(module)
    return module


class _Sizes:
    """Of outputs and inputs in order of execution, and of gradients in order of the backward."""

    def __init__(self, run: Run, batch: Batch) -> None:
        self.inputs: dict[str, float] = {}
        self.outputs: dict[str, float] = {}
        self.gradients: dict[str, float] = {}
        self.scale = 1.0 if run.update.scale is None else float(run.update.scale.value)
        with ExitStack() as stack:
            for name, module in modes.hookable(run.model):
                hook = module.register_forward_hook(self._measure(name), with_kwargs=True)
                stack.callback(hook.remove)
            for name, parameter in run.model.named_parameters():
                if parameter.requires_grad:
                    measure = self._measure_gradient(name)
                    handle = parameter.register_post_accumulate_grad_hook(measure)  # type: ignore[no-untyped-call]
                    stack.callback(handle.remove)
            stack.callback(leave, run)
            forward_backward(run, batch)

    def _measure(self, name: str) -> Callable[..., None]:
        def measure(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            inputs = [size(t) for _, t in tensors(named(args, kwargs))]
            self.inputs[name] = max(inputs, default=0.0)
            self.outputs[name] = max((size(t) for _, t in tensors(output)), default=0.0)

        return measure

    def _measure_gradient(self, name: str) -> Callable[[Tensor], None]:
        def measure(parameter: Tensor) -> None:
            if (gradient := parameter.grad) is not None:
                self.gradients[name] = size(gradient) * math.sqrt(gradient.numel()) / self.scale

        return measure


def _sample_losses(run: Run, batch: Batch) -> dict[int, float]:
    """The loss of each sample alone, from one forward over all of them; empty where it has none."""
    samples = count(batch[1])
    if samples > SAMPLES:
        return {}
    run.device.reseed(mix(run.seed, run.progress.step + 1))
    losses = {}
    run.update.begin()  # remembers the buffers
    try:
        with torch.no_grad(), ExitStack() as stack:
            for context in run.contexts:
                stack.enter_context(context())
            output = call(run.forward, batch[0])
            for i in range(samples):
                one = slice(i, i + 1)
                losses[i] = float(run.objective(rows(output, one), rows(batch[1], one)))
    except Exception:  # a loss, or an output, without single samples
        return {}
    finally:
        run.update.abandon()
    return {i: loss for i, loss in losses.items() if math.isfinite(loss)}


def _outliers(values: dict[int, float]) -> list[int]:
    """Samples whose value is far above the others' median, the largest first."""
    middle = _median(values.values())
    if middle is None:
        return []
    spread = median(abs(x - middle) for x in values.values())
    limit = middle + 20 * max(spread, 0.05 * abs(middle))
    return [i for i, x in sorted(values.items(), key=lambda row: -row[1]) if x > limit][:LISTED]


def _median(values: Any) -> float | None:
    return median(values) if values else None


def _two_digits(times: float) -> str:
    return f"{times:.1f}" if times < 10 else f"{float(f'{times:.2g}'):,.0f}"


def _times(bad: float, good: float) -> float:
    return bad / good if good > 0 else 1.0
