"""What a model costs: time, operations, memory, and how near it comes to what the device can do."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from torch import nn

from runner.batch import Inputs
from runner.composing import compose
from runner.device.device import Device, select
from runner.errors import RunnerError, UsageError
from runner.library import batches, measurements
from runner.library.assembly import check_module, device_of, gradients_aside
from runner.library.measurements import Memory, Operator, Subject
from runner.library.optimize import Optimized
from runner.library.report import show
from runner.measure.peaks import NAMES, Peak, peak
from runner.random_state import exclusive_random_state
from runner.record.text import shorten
from runner.untouched import large_parameters, untouched


@dataclass(frozen=True)
class Latency:
    """Milliseconds a call, over all runs."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


@dataclass(frozen=True)
class Parameters:
    """How many there are, and what they and the buffers take."""

    all: int
    trainable: int
    bytes: int
    buffer_bytes: int


@dataclass(frozen=True)
class Profile:
    """What one call of a model costs; `print` shows it as a table."""

    model: str
    device: str
    dtype: str  # of the products
    backward: bool  # a call is forward and backward
    samples: int
    runs: int
    latency_ms: Latency
    samples_per_second: float  # at the median
    flops_forward: int  # of products: matmul, convolution, attention; a multiply-add is two
    flops: int  # of the call that was timed
    parameters: Parameters
    memory: Memory
    operators: list[Operator]
    peak: Peak | None
    mfu: float | None  # share of the device's peak that the median call reaches
    notes: list[str] = field(default_factory=list)

    @property
    def flops_per_second(self) -> float:
        """What the median call reaches."""
        return self.flops / (self.latency_ms.p50 / 1e3)

    def as_dict(self) -> dict[str, Any]:
        """All of it in plain values."""
        return {**asdict(self), "flops_per_second": self.flops_per_second}

    def __rich__(self) -> Any:
        return show(self)

    def __str__(self) -> str:
        from runner.record.console import Screen

        console = Screen(width=100, no_color=True)
        with console.capture() as captured:
            console.print(show(self))
        return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def profile_model(
    model: nn.Module | Optimized,
    example_input: Inputs,
    *,
    runs: int = 50,
    warmup: int = 5,
    backward: bool = False,
) -> Profile:
    """Time, operations, memory and MFU of a call of the model with `example_input`.

    The input is a tensor, a tuple (by position) or a dict (by name), the sample first, and goes to
    where the model is. Without `backward` the model is called in eval mode and without gradients;
    with it a call is forward and backward in train mode. Weights, gradients, buffers, attributes
    and random state are restored. Raises UsageError where the model fails.
    """
    for name, value, least in (("runs", runs, 1), ("warmup", warmup, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(f"profile_model: {name}={value!r}; use a whole number from {least} on")
    module = model.model if isinstance(model, Optimized) else model
    check_module("profile_model", module)
    samples = batches.samples(example_input, "profile_model: example_input")
    if isinstance(model, Optimized):
        model.ready(example_input)
    inputs = batches.moved(example_input, device_of(module))
    with ExitStack() as scope:
        where = device_of(module)
        index = [f"device.index={where.index}"] if where.type == "cuda" else []
        device = select(compose([f"device={where.type}", *index]).device, scope)
        scope.enter_context(exclusive_random_state("profile_model"))
        scope.enter_context(untouched(module, device=where, safe=large_parameters(module)))
        scope.enter_context(gradients_aside(module))
        module.train(backward)
        subject = Subject(model, module, inputs, backward)
        dtype = subject.dtype(device)
        try:
            for _ in range(max(1, warmup)):
                subject()
        except RunnerError:
            raise
        except Exception as error:
            raise UsageError(
                f"profile_model: the model failed on example_input, {batches.describe(inputs)}: "
                f"{type(error).__name__}: {shorten(str(error), 300)}; give what it is "
                "called with: a tensor, a tuple (by position) or a dict (by name)"
            ) from error
        seconds = measurements.times(subject, device, runs)
        operators = measurements.operators(subject, device)
        memory = measurements.memory(subject, device)
        forward, all_of_it = measurements.flops(subject)
        ceiling = peak(device, dtype)
    latency = Latency(
        float(seconds.mean() * 1e3), *np.percentile(seconds * 1e3, [50, 90, 95, 99]).tolist()
    )
    rate = all_of_it / (latency.p50 / 1e3)
    return Profile(
        model=type(module).__name__,
        device=f"{device.kind}: {device.name}",
        dtype=NAMES.get(dtype, str(dtype).removeprefix("torch.")),
        backward=backward,
        samples=samples,
        runs=runs,
        latency_ms=latency,
        samples_per_second=samples / (latency.p50 / 1e3),
        flops_forward=forward,
        flops=all_of_it,
        parameters=_parameters(module),
        memory=memory,
        operators=operators,
        peak=ceiling,
        mfu=None if ceiling is None or not all_of_it else rate / ceiling.flops_per_second,
        notes=_notes(device, ceiling, all_of_it),
    )


def _parameters(module: nn.Module) -> Parameters:
    every = list(module.parameters())
    return Parameters(
        all=sum(p.numel() for p in every),
        trainable=sum(p.numel() for p in every if p.requires_grad),
        bytes=sum(p.numel() * p.element_size() for p in every),
        buffer_bytes=sum(b.numel() * b.element_size() for b in module.buffers()),
    )


def _notes(device: Device, ceiling: Peak | None, flops: int) -> list[str]:
    notes = []
    if not flops:
        notes.append("no product was counted (own kernels are not seen), so there is no MFU")
    if ceiling is None:
        notes.append(f"the peak of {device.name} in this type is not known, so there is no MFU")
    return notes
