"""The cost of a model: time, operations, memory, and the share of the device's peak."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import profiler_legacy

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
    device_overrides,
    run_contexts,
    stash_gradients,
)
from runner.library.memory import count_text, size_text, table_text
from runner.library.optimize import Optimized
from runner.models.preserved_state import large_parameters, preserve_state
from runner.parity.flops import NAMES, PeakFlops, call_flops, peak_flops
from runner.random_state import exclusive_random_state
from runner.record.text import shorten
from runner.techniques.memory_prediction import Live

MOST_OPERATORS = 10
PROFILED_CALLS = 3


@dataclass(frozen=True)
class Operator:
    """One kind of operator in a call, without those that it calls."""

    name: str
    calls: int
    ms: float
    share: float  # of all operators' time


@dataclass(frozen=True)
class Profile:
    """The cost of one call of a model; `print` shows it as a table."""

    model: str
    device: str
    dtype: str  # of the products
    backward: bool  # a call is forward and backward
    samples: int
    runs: int
    latency_ms: dict[str, float]  # mean, p50, p90, p95 and p99, over all runs
    samples_per_second: float  # at the median
    flops_forward: int  # of products: matmul, convolution, attention; a multiply-add is two
    flops: int  # of the call that was timed
    flops_per_second: float  # at the median
    parameters: dict[str, int]  # all and trainable; bytes, and buffer_bytes
    memory: dict[str, int]  # bytes of tensors, without weights and input: peak; activations saved
    operators: list[Operator]  # the slowest first
    peak: PeakFlops | None
    mfu: float | None  # share of the device's peak that the median call reaches
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """All of it in plain values."""
        return asdict(self)

    def __str__(self) -> str:
        ms, memory, weights = self.latency_ms, self.memory, self.parameters
        call = "forward and backward" if self.backward else "forward"
        flops = f"{count_text(self.flops)}FLOP, {count_text(self.flops_per_second)}FLOP/s"
        kept, size = size_text(memory["activations"]), size_text(weights["bytes"])
        rows = [
            ("latency", "  ".join(f"{name} {value:.3f} ms" for name, value in ms.items())),
            ("throughput", f"{self.samples_per_second:,.0f} samples/s"),
            ("operations", flops),
            ("parameters", f"{weights['all']:,} ({weights['trainable']:,} trainable), {size}"),
            ("memory", f"{size_text(memory['peak'])} at most, {kept} kept for backward"),
        ]
        if self.peak is not None and self.mfu is not None:
            peak = f"{count_text(self.peak.flops_per_second)}FLOP/s in {self.peak.dtype}"
            rows.append(("MFU", f"{self.mfu:.1%} of {peak} ({self.peak.source})"))
        rows += [("note", note) for note in self.notes]
        slow = [(o.name, str(o.calls), f"{o.ms:.3f}", f"{o.share:.0%}") for o in self.operators]
        title = f"{self.model}: {call} of {self.samples} samples in {self.dtype}"
        tables = table_text((), rows), table_text(("operator", "calls", "ms", "share"), slow)
        return "\n\n".join([f"{title}, {self.runs} runs on {self.device}", *tables])


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
            raise UsageError(f"profile_model: {name} must be a whole number ≥ {least}, got {value}")
    module = model.model if isinstance(model, Optimized) else model
    check_module("profile_model", module)
    samples = batches.samples(example_input, "profile_model: example_input")
    if isinstance(model, Optimized):
        model.ready(example_input)
    where = device_of(module)
    with ExitStack() as scope:
        device = select(compose(device_overrides(where)).device, scope)
        scope.enter_context(exclusive_random_state("profile_model"))
        scope.enter_context(preserve_state(module, device=where, safe=large_parameters(module)))
        scope.enter_context(stash_gradients(module))
        module.train(backward)
        subject = _Subject(model, module, batches.moved(example_input, where), backward)
        dtype = subject.dtype(device)
        subject.warm_up(max(1, warmup))
        seconds = _measure_times(subject, device, runs)
        operators = _measure_operators(subject, device)
        memory = _measure_memory(subject, device)
        forward = call_flops(subject.forward, grad=False)
        flops = call_flops(subject) if backward else forward
        peak = peak_flops(device, dtype)
    p50, p90, p95, p99 = np.percentile(seconds, [50, 90, 95, 99]).tolist()
    times = {"mean": float(seconds.mean()), "p50": p50, "p90": p90, "p95": p95, "p99": p99}
    notes = []
    if not flops:
        notes.append("no product was counted (own kernels are not seen), so there is no MFU")
    if peak is None:
        notes.append(f"the peak of {device.name} in this type is not known, so there is no MFU")
    parameters = list(module.parameters())
    return Profile(
        model=type(module).__name__,
        device=f"{device.kind}: {device.name}",
        dtype=NAMES.get(dtype, str(dtype).removeprefix("torch.")),
        backward=backward,
        samples=samples,
        runs=runs,
        latency_ms={name: value * 1e3 for name, value in times.items()},
        samples_per_second=samples / p50,
        flops_forward=forward,
        flops=flops,
        flops_per_second=flops / p50,
        parameters={
            "all": sum(p.numel() for p in parameters),
            "trainable": sum(p.numel() for p in parameters if p.requires_grad),
            "bytes": sum(p.nbytes for p in parameters),
            "buffer_bytes": sum(b.nbytes for b in module.buffers()),
        },
        memory=memory,
        operators=operators,
        peak=peak,
        mfu=None if peak is None or not flops else flops / p50 / peak.flops_per_second,
        notes=notes,
    )


@dataclass
class _Subject:
    """One call of the model, as it is measured."""

    model: nn.Module | Optimized
    module: nn.Module
    inputs: Inputs
    backward: bool

    def __call__(self) -> None:
        """Forward, and backward if that is asked for; the gradients are dropped."""
        if not self.backward:
            with torch.no_grad():
                self.forward()
            return
        MeanOutputLoss()(self.forward(), None).backward()  # type: ignore[no-untyped-call]
        self.module.zero_grad()

    def forward(self) -> Any:
        """The output."""
        return call(self.model, self.inputs)

    def warm_up(self, calls: int) -> None:
        """Call it some times; UsageError where the model fails."""
        try:
            for _ in range(calls):
                self()
        except RunnerError:
            raise
        except Exception as error:
            raise UsageError(
                f"profile_model: the model failed on example_input, "
                f"{batches.describe(self.inputs)}: {type(error).__name__}: "
                f"{shorten(str(error), 300)}; give a tensor, a tuple (by position) or a dict "
                "(by name)"
            ) from error

    def dtype(self, device: Device) -> torch.dtype:
        """The type that products run in."""
        run = self.model.lazy.run if isinstance(self.model, Optimized) else None
        with ExitStack() if run is None else run_contexts(run):
            if torch.is_autocast_enabled(device.kind):
                return torch.get_autocast_dtype(device.kind)
        floats = (p.dtype for p in self.module.parameters() if p.is_floating_point())
        return next(floats, torch.float32)


def _measure_times(subject: _Subject, device: Device, runs: int) -> np.ndarray:
    """Seconds of each call, the device waited for at both ends."""
    seconds = np.empty(runs)
    device.synchronize()
    for i in range(runs):
        start = perf_counter()
        subject()
        device.synchronize()
        seconds[i] = perf_counter() - start
    return seconds


def _measure_operators(subject: _Subject, device: Device) -> list[Operator]:
    """The slowest operators of a call; on a GPU by the time of their kernels."""
    gpu = device.kind == "cuda"
    profiler: Any = torch.profiler.profile(acc_events=True) if gpu else profiler_legacy.profile()  # type: ignore[no-untyped-call]  # the other one takes a second
    with profiler:
        for _ in range(PROFILED_CALLS):
            subject()
        device.synchronize()
    times = [
        (e.key, e.count, (e.self_device_time_total if gpu else e.self_cpu_time_total) / 1e3)
        for e in profiler.key_averages()
    ]
    total = sum(ms for _, _, ms in times) or 1.0
    slowest = sorted(times, key=lambda row: -row[2])[:MOST_OPERATORS]
    return [
        Operator(name, calls // PROFILED_CALLS, ms / PROFILED_CALLS, ms / total)
        for name, calls, ms in slowest
        if ms
    ]


def _measure_memory(subject: _Subject, device: Device) -> dict[str, int]:
    """Counted on a GPU by its allocator, elsewhere over the outputs of operators."""
    given = [*subject.module.parameters(), *subject.module.buffers(), *tensors(subject.inputs)]
    known = {t.untyped_storage().data_ptr() for t in given}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        subject.forward()
    if device.kind == "cuda":
        torch.cuda.reset_peak_memory_stats(device.torch)
        before = torch.cuda.memory_allocated(device.torch)
        subject()
        peak = torch.cuda.max_memory_allocated(device.torch) - before
    else:
        live = Live()
        live.leave_out(iter(given))
        with live, torch.compiler.set_stance("force_eager"):
            subject()
        peak = live.peak
    return {"peak": peak, "activations": sum(saved.values())}
