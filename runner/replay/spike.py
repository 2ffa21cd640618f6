"""A step that is finite and far too large: what grew, against a healthy batch, and which samples.

The same weights are given both batches. Modules are held against each other by the root mean
square of what they return, parameters by the norm of their gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from runner.data.batch import Batch, call, count, rows
from runner.data.seeds import mix
from runner.models import modes
from runner.replay.findings import Cause, Phase, Ratio
from runner.replay.statistics import size, state_of, stats, tensors
from runner.replay.trace import batch_tensors, label, leave
from runner.replay.tracer import named
from runner.training.run import Run
from runner.training.step import forward_backward

JUMP = 3.0  # times more than what went into it grew
LISTED = 10
SAMPLES = 4096  # the most that are looked at one by one


def explain_spike(run: Run, batch: Batch, healthy: Batch | None) -> Cause:
    """What is larger in `batch` than in `healthy`, and where that begins.

    Without a healthy batch parameters and samples are ranked, and no beginning is named.
    """
    run.model.train()
    bad = _Sizes(run, batch)
    good = _Sizes(run, healthy) if healthy is not None else None
    found = Cause(Phase.spike, "loss and gradients are finite and large")
    before = good.outputs if good else {}
    found.growth = [Ratio(n, x, before.get(n)) for n, x in bad.outputs.items()]
    slopes = good.gradients if good else {}
    ranked = [Ratio(n, x, slopes.get(n)) for n, x in bad.gradients.items()]
    found.gradients = sorted(ranked, key=lambda ratio: -ratio.bad)[:LISTED]
    losses = _per_sample(run, batch)
    usual = _median([x for _, x in _per_sample(run, healthy)]) if healthy is not None else None
    largest = sorted(losses, key=lambda pair: -pair[1])[:LISTED]
    found.losses = [Ratio(f"sample {i}", x, usual) for i, x in largest]
    found.samples = _outstanding(losses)
    if good is None:
        found.notes.append("no healthy batch to hold it against")
        return found
    _name(run, batch, healthy, bad, good, found)
    found.growth = [r for r in found.growth if r.times is not None][:200]
    return found


def _name(run: Run, batch: Batch, healthy: Any, bad: _Sizes, good: _Sizes, found: Cause) -> None:
    """Where it begins: the batch, a module's output, the loss, or a parameter's gradient."""
    theirs = dict(batch_tensors(healthy))
    for name, tensor in batch_tensors(batch):
        times = _times(size(tensor), size(theirs[name])) if name in theirs else 1.0
        if times > JUMP:
            found.cause = (
                f"the batch itself: {name} is {_about(times)} times as large as in another"
            )
            found.inputs = [stats(name, tensor)]
            if tensor.ndim and len(tensor) == count(batch[1]) <= SAMPLES:
                alone = _outstanding([(i, size(row)) for i, row in enumerate(tensor)])
                found.samples = alone or found.samples
            return
    for name in bad.outputs:
        grown = _times(bad.outputs[name], good.outputs.get(name, 0.0))
        came = _times(bad.inputs[name], good.inputs.get(name, 0.0))
        if grown > JUMP * max(came, 1.0):
            module = run.model.get_submodule(name)
            found.module, found.kind, found.state = name, type(module).__name__, state_of(module)
            found.cause = (
                f"{label(name, module)} returns {_about(grown)} times what it does for another "
                f"batch, of an input {_about(came)} times as large"
            )
            return
    for name in bad.gradients:  # in the order in which the backward makes them
        times = _times(bad.gradients[name], good.gradients.get(name, 0.0))
        if times > JUMP:
            owner = name.rpartition(".")[0]
            module = run.model.get_submodule(owner)
            found.module, found.kind, found.state = owner, type(module).__name__, state_of(module)
            found.parameters = [name]
            found.cause = (
                f"the gradient of {name} is {_about(times)} times that of another batch, and no "
                "module's output is"
            )
            return
    found.cause = "neither outputs nor gradients are far from those of another batch"


class _Sizes:
    """Of outputs and inputs in order of execution, and of gradients in order of the backward."""

    def __init__(self, run: Run, batch: Batch) -> None:
        self.inputs: dict[str, float] = {}
        self.outputs: dict[str, float] = {}
        self.gradients: dict[str, float] = {}
        with ExitStack() as stack:
            for name, module in modes.hookable(run.model):
                hook = module.register_forward_hook(self._size(name), with_kwargs=True)
                stack.callback(hook.remove)
            for name, parameter in run.model.named_parameters():
                if parameter.requires_grad:
                    look = self._norm(name, run)
                    noted = parameter.register_post_accumulate_grad_hook(look)  # type: ignore[no-untyped-call]
                    stack.callback(noted.remove)
            stack.callback(leave, run)
            forward_backward(run, batch)

    def _size(self, name: str) -> Callable[..., None]:
        def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            with torch.no_grad():
                inputs = [size(t) for _, t in tensors(named(args, kwargs))]
                outputs = [size(t) for _, t in tensors(output)]
            self.inputs[name] = max(inputs, default=0.0)
            self.outputs[name] = max(outputs, default=0.0)

        return look

    def _norm(self, name: str, run: Run) -> Callable[[Tensor], None]:
        scale = 1.0 if run.update.scale is None else float(run.update.scale.value)

        def look(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is not None:
                self.gradients[name] = size(gradient) * math.sqrt(gradient.numel()) / scale

        return look


def _per_sample(run: Run, batch: Batch) -> list[tuple[int, float]]:
    """The loss of each sample alone, from one forward over all of them; empty where it has none."""
    samples = count(batch[1])
    if samples > SAMPLES:
        return []
    run.device.reseed(mix(run.seed, run.progress.step + 1))
    found = []
    try:
        with torch.no_grad(), _kept(run), ExitStack() as stack:
            for context in run.contexts:
                stack.enter_context(context())
            output = call(run.forward, batch[0])
            for i in range(samples):
                one = slice(i, i + 1)
                found.append((i, float(run.objective(rows(output, one), rows(batch[1], one)))))
    except Exception as error:  # a loss, or an output, that knows no single sample
        del error
        return []
    return [(i, x) for i, x in found if math.isfinite(x)]


@contextmanager
def _kept(run: Run) -> Iterator[None]:
    """Buffers as they were."""
    run.update.begin()
    try:
        yield
    finally:
        run.update.abandon()


def _outstanding(losses: list[tuple[int, float]]) -> list[int]:
    """Samples whose loss is far above the others' median; none where none stands out."""
    middle = _median([x for _, x in losses])
    if middle is None:
        return []
    spread = _median([abs(x - middle) for _, x in losses]) or 0.0
    limit = middle + 20 * max(spread, 0.05 * abs(middle))
    return [i for i, x in sorted(losses, key=lambda pair: -pair[1]) if x > limit][:LISTED]


def _median(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def _about(times: float) -> str:
    """In two digits."""
    return f"{times:.1f}" if times < 10 else f"{float(f'{times:.2g}'):,.0f}"


def _times(bad: float, good: float) -> float:
    return bad / good if good > 0 else 1.0
