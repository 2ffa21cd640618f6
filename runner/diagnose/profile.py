"""Profile a model: latency, FLOPs, memory, and share of the device's peak (MFU)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from runner.core.build.arguments import (
    check_model_arguments,
    check_whole_number,
    count_samples,
    device_of,
    device_overrides,
    move_to_device,
    translate_model_errors,
)
from runner.core.config.composing import compose
from runner.core.device.device import Device, select
from runner.core.device.memory import peak_memory as peak_memory
from runner.core.format import count_noun, share, size
from runner.core.interfaces.batch import Inputs, call_model
from runner.core.interfaces.nested import tensors
from runner.core.preserved_state import (
    NotRestorable,
    exclusive_random_state,
    large_parameters,
    preserve_state,
)
from runner.core.techniques.cost import count_flops
from runner.core.techniques.flops import DTYPE_NAMES, PeakFlops, peak_flops
from runner.core.techniques.model_calls import enter_contexts
from runner.core.techniques.probe import saved_bytes
from runner.diagnose.debug.module_times import (
    HEADER,
    ModuleRanges,
    ModuleTime,
    Trace,
    module_cells,
    quiet_profiler,
    read_trace,
)
from runner.diagnose.memory import table_text
from runner.loops.optimize import Optimized, mean_output, stash_gradients

MOST_OPERATORS = MOST_MODULES = 10
PROFILED_CALLS = 3


@dataclass(frozen=True)
class Profile:
    """The cost of one call of a model; `print` shows a table."""

    model: str
    device: str
    dtype: str  # of matrix products
    backward: bool  # a call is forward and backward
    samples: int
    runs: int
    latency_ms: dict[str, float]  # mean, p50, p90, p95 and p99, over all runs
    samples_per_second: float  # at the median
    flops: int  # of matmul, convolution, attention; a multiply-add counts as two
    parameters: dict[str, int]  # all and trainable; bytes, and buffer_bytes
    memory: dict[str, int]  # bytes: activations saved for backward; on a GPU also the peak
    operators_ms: dict[str, float]  # self time per call, slowest first
    modules: list[ModuleTime]  # the operators' time by module, per call, slowest first
    peak: PeakFlops | None  # None: unknown
    mfu: float | None  # share of the device's peak FLOP/s at the median

    def __str__(self) -> str:
        weights = self.parameters
        call = "forward and backward" if self.backward else "forward"
        trainable = f"{weights['all']:,} ({weights['trainable']:,} trainable)"
        rows = [
            ("latency", "  ".join(f"{k} {ms:.3f} ms" for k, ms in self.latency_ms.items())),
            ("throughput", f"{self.samples_per_second:,.0f} samples/s"),
            ("operations", f"{self.flops:,} FLOP"),
            ("parameters", f"{trainable}, {size(weights['bytes'])}"),
            ("memory", ", ".join(f"{name} {size(n)}" for name, n in self.memory.items())),
        ]
        if self.peak is not None and self.mfu is not None:
            peak = f"{self.peak.flops_per_second / 1e9:,.3g} GFLOP/s in {self.peak.dtype}"
            rows.append(("MFU", f"{share(self.mfu)} of {peak} ({self.peak.source})"))
        slow = [(name, f"{ms:.3f}") for name, ms in self.operators_ms.items()]
        title = f"{self.model}: {call} of {count_noun(self.samples, 'sample')} in {self.dtype}"
        title += f", {count_noun(self.runs, 'run')} on {self.device}"
        tables = [table_text(rows), table_text([("operator", "ms"), *slow])]
        tables.append(table_text([HEADER, *map(module_cells, self.modules[:MOST_MODULES])]))
        return "\n\n".join([title, *tables])


def profile_model(
    model: nn.Module | Optimized,
    example_input: Inputs,
    *,
    runs: int = 50,
    warmup: int = 5,
    backward: bool = False,
) -> Profile:
    """Measure time, FLOPs, memory and MFU of a call of the model with `example_input`.

    The input is a tensor, a tuple (by position) or a dict (by name), sample dimension first; it is
    moved to the model's device. Without `backward` the model runs in eval mode without gradients;
    with it, forward and backward in train mode. Weights, gradients, buffers, attributes and random
    state are restored. Raises UsageError if the model fails.
    """
    for name, value, minimum in (("runs", runs, 1), ("warmup", warmup, 0)):
        check_whole_number("profile_model", name, value, minimum)
    module = model.model if isinstance(model, Optimized) else model
    check_model_arguments("profile_model", module)
    n = count_samples(example_input, "profile_model: example_input")
    contexts: list[Any] = []
    if isinstance(model, Optimized):
        contexts = model.prepare(example_input).contexts
    device_of_model = device_of(module)
    with ExitStack() as scope:
        device = select(compose(device_overrides(device_of_model)).device, scope)
        scope.enter_context(exclusive_random_state("profile_model"))
        large = large_parameters(module)
        scope.enter_context(preserve_state(module, device=device_of_model, safe=large))
        scope.enter_context(stash_gradients(module))
        module.train(backward)
        inputs = move_to_device(example_input, device_of_model)
        forward = partial(call_model, model, inputs)

        def run_call() -> None:
            with torch.set_grad_enabled(backward):
                output = forward()
            if backward:
                mean_output(output).backward()  # type: ignore[no-untyped-call]
                module.zero_grad()

        fix = "; give a tensor, a tuple (by position) or a dict (by name)"
        with translate_model_errors("profile_model", inputs, fix):
            for _ in range(max(1, warmup)):
                run_call()
        seconds = np.array([device.seconds_of(run_call) for _ in range(runs)])
        trace = _profile_calls(run_call, module, device)
        with torch.enable_grad():
            memory = {"activations": saved_bytes(module, forward, *tensors(inputs))}
        if device.kind == "cuda":
            with peak_memory(device) as peak_usage:
                run_call()
            memory["peak"] = peak_usage.on_device - peak_usage.on_device_before
        flops = _count_flops(run_call, backward)
        with enter_contexts(contexts):
            dtype = _product_dtype(module, device)
        peak = peak_flops(device, dtype)
    p50, p90, p95, p99 = np.percentile(seconds, [50, 90, 95, 99]).tolist()
    times = {"mean": float(seconds.mean()), "p50": p50, "p90": p90, "p95": p95, "p99": p99}
    parameters = list(module.parameters())
    return Profile(
        model=type(module).__name__,
        device=f"{device.kind}: {device.name}",
        dtype=DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch.")),
        backward=backward,
        samples=n,
        runs=runs,
        latency_ms={name: value * 1e3 for name, value in times.items()},
        samples_per_second=n / p50,
        flops=flops,
        parameters={
            "all": sum(p.numel() for p in parameters),
            "trainable": sum(p.numel() for p in parameters if p.requires_grad),
            "bytes": sum(p.nbytes for p in parameters),
            "buffer_bytes": sum(b.nbytes for b in module.buffers()),
        },
        memory=memory,
        operators_ms={
            row["name"]: row["seconds"] * 1e3 / PROFILED_CALLS
            for row in trace.operators[:MOST_OPERATORS]
            if row["seconds"]
        },
        modules=trace.modules,
        peak=peak,
        mfu=None if peak is None or not flops else flops / p50 / peak.flops_per_second,
    )


def _count_flops(call: Callable[[], Any], grad: bool) -> int:
    """Return the FLOP of a call (a multiply-add is two), uncompiled, by torch's counter.

    Without a backward also by ours, which knows recurrent layers and products with vectors.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    with (
        torch.set_grad_enabled(grad),
        torch.compiler.set_stance("force_eager"),
        sdpa_kernel([SDPBackend.MATH]),  # attention as products: the counter misses flash on a CPU
        FlopCounterMode(display=False) as counter,
    ):
        call()
    flop = int(counter.get_total_flops())
    if not grad:
        with suppress(NotRestorable):
            flop = max(flop, count_flops(call)[0])
    return flop


def _product_dtype(module: nn.Module, device: Device) -> torch.dtype:
    """Return the dtype of matrix products under the current contexts."""
    if torch.is_autocast_enabled(device.kind):
        return torch.get_autocast_dtype(device.kind)
    floats = (p.dtype for p in module.parameters() if p.is_floating_point())
    return next(floats, torch.float32)


def _profile_calls(run_call: Callable[[], None], module: nn.Module, device: Device) -> Trace:
    """Return what the profiler records of PROFILED_CALLS calls."""
    with quiet_profiler(), ModuleRanges(module).record():
        profiler = torch.profiler.profile(acc_events=True)
        with profiler:
            for _ in range(PROFILED_CALLS):
                run_call()
            device.synchronize()
    return read_trace(profiler, PROFILED_CALLS)
