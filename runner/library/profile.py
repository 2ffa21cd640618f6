"""What a model costs: time, operations, memory, and how near it comes to the device's peak."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from torch import Tensor, nn
from torch.autograd import profiler_legacy
from torch.utils._python_dispatch import TorchDispatchMode

from runner.composing import compose
from runner.data.batch import Inputs, call
from runner.data.nested import tensors
from runner.device.device import Device, select
from runner.errors import RunnerError, UsageError
from runner.library import batches
from runner.library.lazy_run import (
    MeanOutputLoss,
    check_module,
    device_of,
    run_contexts,
    stash_gradients,
)
from runner.library.memory import rich_text, size_text
from runner.library.optimize import Optimized
from runner.models.preserved_state import large_parameters, preserve_state
from runner.parity.flops import NAMES, Peak, call_flops, peak_flops
from runner.random_state import exclusive_random_state
from runner.record.console import plain_text
from runner.record.text import shorten


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
        return _profile_table(self)

    def __str__(self) -> str:
        return rich_text(_profile_table(self))


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
        scope.enter_context(preserve_state(module, device=where, safe=large_parameters(module)))
        scope.enter_context(stash_gradients(module))
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
        seconds = measure_times(subject, device, runs)
        operators = measure_operators(subject, device)
        memory = measure_memory(subject, device)
        forward, all_of_it = count_flops(subject)
        ceiling = peak_flops(device, dtype)
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


MOST_OPERATORS = 10
PROFILED = 3  # calls


@dataclass(frozen=True)
class Memory:
    """Bytes of tensors, beyond the model's own and the example."""

    peak: int  # held at most at a time, in one call
    activations: int  # held after a forward, for its backward


@dataclass(frozen=True)
class Operator:
    """One kind of operator in a call, without those that it calls."""

    name: str
    calls: int
    ms: float
    share: float  # of all operators' time


class Subject:
    """One call of the model, as it is measured."""

    def __init__(
        self, model: nn.Module | Optimized, module: nn.Module, inputs: Inputs, backward: bool
    ) -> None:
        self.model, self.module, self.inputs, self.backward = model, module, inputs, backward
        self.reach = MeanOutputLoss()

    def __call__(self) -> Any:
        """Forward, and backward if that is asked for; the gradients are dropped."""
        if not self.backward:
            with torch.no_grad():
                return self.forward()
        loss = self.reach(self.forward(), None)
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in self.module.parameters():
            parameter.grad = None
        return None

    def forward(self) -> Any:
        """The output."""
        return call(self.model, self.inputs)

    def dtype(self, device: Device) -> torch.dtype:
        """What products run in."""
        run = self.model.lazy.run if isinstance(self.model, Optimized) else None
        with ExitStack() if run is None else run_contexts(run):
            if torch.is_autocast_enabled(device.kind):
                return torch.get_autocast_dtype(device.kind)
        floats = (p.dtype for p in self.module.parameters() if p.is_floating_point())
        return next(floats, torch.float32)


def measure_times(subject: Subject, device: Device, runs: int) -> np.ndarray:
    """Seconds of each call, the device waited for at both ends."""
    seconds = np.empty(runs)
    device.synchronize()
    for i in range(runs):
        start = perf_counter()
        subject()
        device.synchronize()
        seconds[i] = perf_counter() - start
    return seconds


def measure_operators(subject: Subject, device: Device) -> list[Operator]:
    """The operators that take most of a call; on a GPU by the time of their kernels."""
    gpu = device.kind == "cuda"
    profiler: Any = (
        torch.profiler.profile(acc_events=True) if gpu else profiler_legacy.profile()  # type: ignore[no-untyped-call]  # the other one takes a second
    )
    with profiler:
        for _ in range(PROFILED):
            subject()
        device.synchronize()
    spent = [
        (e.key, e.count, (e.self_device_time_total if gpu else e.self_cpu_time_total) / 1e3)
        for e in profiler.key_averages()
    ]
    total = sum(ms for _, _, ms in spent) or 1.0
    spent.sort(key=lambda row: -row[2])
    return [
        Operator(name, calls // PROFILED, ms / PROFILED, ms / total)
        for name, calls, ms in spent[:MOST_OPERATORS]
        if ms
    ]


def count_flops(subject: Subject) -> tuple[int, int]:
    """Of a forward, and of the call."""
    forward = call_flops(subject.forward, grad=False)
    return forward, call_flops(subject) if subject.backward else forward


def measure_memory(subject: Subject, device: Device) -> Memory:
    """Counted on a GPU by its allocator, elsewhere over the tensors that operators put out."""
    own = [*subject.module.parameters(), *subject.module.buffers(), *tensors(subject.inputs)]
    known = {t.untyped_storage().data_ptr() for t in own}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = subject.forward()
    del output
    if device.kind == "cuda":
        torch.cuda.reset_peak_memory_stats(device.torch)
        before = torch.cuda.memory_allocated(device.torch)
        subject()
        most = torch.cuda.max_memory_allocated(device.torch) - before
    else:
        with Alive(known) as alive, torch.compiler.set_stance("force_eager"):
            subject()
        most = alive.peak
    return Memory(most, sum(kept.values()))


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that operators put out, for as long as they live."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = known  # storages that were there before
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self.now = self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator and take note of what it made."""
        output = func(*args, **(kwargs or {}))
        for tensor in tensors(output):
            storage = tensor.untyped_storage()
            if storage in self.seen or storage.data_ptr() in self.known:
                continue
            size = storage.nbytes()
            self.seen.add(storage)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, size)
        return output

    def _freed(self, size: int) -> None:
        self.now -= size


def _profile_table(profile: Profile) -> RenderableType:
    """Time, operations and memory, then the operators that take the time."""
    ms, memory, parameters = profile.latency_ms, profile.memory, profile.parameters
    flops, weights = count_text(profile.flops), size_text(parameters.bytes)
    peak = size_text(memory.peak)
    what = "forward and backward" if profile.backward else "forward"
    rows = [
        ("latency", f"p50 {ms.p50:.3f}  p90 {ms.p90:.3f}  p95 {ms.p95:.3f}  p99 {ms.p99:.3f} ms"),
        ("throughput", f"{profile.samples_per_second:,.0f} samples/s"),
        ("operations", f"{flops}FLOP, {count_text(profile.flops_per_second)}FLOP/s"),
        ("parameters", f"{parameters.all:,} ({parameters.trainable:,} trainable), {weights}"),
        ("memory", f"{peak} at most, {size_text(memory.activations)} kept for backward"),
    ]
    if profile.peak is not None and profile.mfu is not None:
        of = f"{count_text(profile.peak.flops_per_second)}FLOP/s in {profile.peak.dtype}"
        rows.append(("MFU", f"{profile.mfu:.1%} of {of} ({profile.peak.source})"))
    rows += [("note", note) for note in profile.notes]
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    for name, value in rows:
        facts.add_row(name, plain_text(value))
    operators = Table(box=None, padding=(0, 2), pad_edge=False)
    operators.add_column("operator", overflow="fold")
    for heading in ("calls", "ms", "share"):
        operators.add_column(heading, justify="right")
    for row in profile.operators:
        operators.add_row(plain_text(row.name), str(row.calls), f"{row.ms:.3f}", f"{row.share:.0%}")
    title = f"{profile.model}: {what} of {profile.samples} samples in {profile.dtype}, "
    title += f"{profile.runs} runs on {profile.device}"
    return Group(
        plain_text(title, "bold"), Padding(facts, (0, 0, 1, 2)), Padding(operators, (0, 0, 0, 2))
    )


def count_text(value: float) -> str:
    """A number of operations with its prefix, such as `1.3 G`."""
    prefixes = iter("kMGTP")
    prefix = ""
    while abs(value) >= 1000:
        value, prefix = value / 1000, next(prefixes)
    return f"{value:.3g} {prefix}"
