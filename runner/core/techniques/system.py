"""Process settings: number of threads, memory allocator, denormals, cuDNN benchmark.

On a CPU: one thread if the model is too small to parallelise, and one fewer for each core that
another process keeps busy; denormals are flushed to zero; freed memory is kept for the next step.
On a GPU: cuDNN benchmarks its kernels (unless device.deterministic); memory segments can expand.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runner.core.device import allocator, capabilities
from runner.core.device.device import Device
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import Evidence, RunBuilder
from runner.core.schemas.optimization import System

WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
OPENMP_LIBRARIES = ("libgomp", "libiomp", "libomp")
FENV_BYTES = 64  # room for a fenv_t, which takes 32 on x86-64 and 8 on arm
PARALLEL_ELEMENTS = 1 << 20  # elements: enough for an operator to run in all threads


def unavailable(config: System, device: Device) -> str | None:
    """Return a reason on MPS: it has no such switches, and does not use CPU threads."""
    return "no settings apply on mps" if device.kind == "mps" else None


def apply(config: System, builder: RunBuilder) -> str | None:
    """Set what the `device` group leaves open; record why the rest could not be set."""
    reasons: dict[str, str | None] = {}
    if builder.device.kind == "cpu":
        if builder.requested_threads is None:
            before = torch.get_num_threads()
            choose = partial(_choose_threads, config, builder, before)
            threads = builder.choose("device.threads", choose)
            builder.scope.callback(torch.set_num_threads, before)
            torch.set_num_threads(threads)
            reasons["threads"] = None
        reasons["denormals"] = flush_denormals(builder.scope)
        reasons["allocator"] = allocator.keep_freed_memory(builder.scope)
    else:
        reasons["expandable_segments"] = allocator.expand_segments(builder.scope)
        if config.cudnn_benchmark and torch.are_deterministic_algorithms_enabled():
            reasons["cudnn_benchmark"] = "device.deterministic: it picks kernels by timing"
        elif config.cudnn_benchmark:
            from runner.core.device import numerics

            numerics.set_cudnn_benchmark(True, builder.scope)
            reasons["cudnn_benchmark"] = None
    if all(reasons.values()):
        return "; ".join(f"{name}: {why}" for name, why in reasons.items())
    builder.technique_facts["system"] = {f"{n}_left_alone": w for n, w in reasons.items() if w}
    return None


def _choose_threads(config: System, builder: RunBuilder, max_threads: int) -> tuple[int, str]:
    """Choose the number of threads: 1 for small models, else one per free core.

    Threads wait for each other by spinning, for the slowest: one that shares its core.
    """
    from runner.core.techniques.cost import forward_cost

    cost = forward_cost(builder)
    if cost.mflop < config.small_mflop:
        return 1, f"{cost}, too little for several threads"
    reason = f"{cost}, enough for several threads"
    if torch.are_deterministic_algorithms_enabled():  # threads affect the last bits
        return max_threads, f"{reason}; device.deterministic: other processes are not considered"
    if max_threads == 1:
        return 1, f"{reason}, but torch has only one thread"
    from runner.core.device import process

    busy = process.busy_cores()
    threads = process.free_threads(max_threads, busy)
    if threads < max_threads:
        cores = len(capabilities.allowed_cores() or ()) or max_threads
        reason += f"; {cores} cores, {busy:.1f} of them busy with other processes"
    return threads, reason


def engaged(config: System, run: Run) -> Evidence:
    """Read the settings back from the process."""
    settings = run.device.settings
    facts: dict[str, Any] = {key: settings[key] for key in ("threads", "affinity", "priority")}
    facts["waiting"] = {k: os.environ[k] for k in WAIT_VARIABLES if k in os.environ} or "spin"
    facts["allocator"] = allocator.malloc_name()
    facts |= run.technique_facts.get("system", {})
    problems = []
    if run.device.kind == "cpu":
        threads = facts["threads"]
        chosen = next((c.value for c in run.choices if c.key == "device.threads"), threads)
        if chosen != threads:
            problems.append(f"device.threads is {threads}, not the {chosen} chosen")
        facts["denormals_are_zero"] = denormals_flushed()
        if not facts["denormals_are_zero"] and "denormals_left_alone" not in facts:
            problems.append("denormals are not flushed in every thread")
    else:
        facts |= {key: settings[key] for key in ("memory_fraction", "cudnn_benchmark")}
        facts["expandable_segments"], facts["segments"] = allocator.expandable_segments()
        fixed = not config.cudnn_benchmark or "cudnn_benchmark_left_alone" in facts
        if not fixed and not facts["cudnn_benchmark"]:
            problems.append("cudnn.benchmark is off")
    return Evidence(not problems, "; ".join(problems), facts)


def flush_denormals(scope: ExitStack) -> str | None:
    """Flush denormals (below 1e-38 in fp32) to zero in all threads, or return why not.

    CPUs are far slower on denormals, and Adam's moments decay to them if the gradient stays zero:
    an update full of them took 21 times as long. `torch.set_flush_denormal` sets the calling thread
    only (torch 2.13), so OpenMP's threads, in which operators run, are set separately.
    """
    paths = [p for p in allocator.loaded_libraries() if Path(p).name.startswith(OPENMP_LIBRARIES)]
    libraries = [ctypes.CDLL(path) for path in paths]
    parallel_regions = [lib.GOMP_parallel for lib in libraries if hasattr(lib, "GOMP_parallel")]
    if not parallel_regions:
        return "operator threads are not accessible"
    for kind in (np.float32, np.float64):
        str(np.finfo(kind))  # fills NumPy's cache, which would warn of flushed denormals
    libc = ctypes.CDLL(None)

    def read_fenv() -> ctypes.Array[ctypes.c_char]:
        fenv = ctypes.create_string_buffer(FENV_BYTES)
        libc.fegetenv(fenv)
        return fenv

    def set_fenv(fenv: ctypes.Array[ctypes.c_char]) -> None:
        function = ctypes.cast(libc.fesetenv, ctypes.c_void_p)
        for run_in_threads in parallel_regions:
            run_in_threads(function, fenv, torch.get_num_threads(), 0)
        libc.fesetenv(fenv)

    original = read_fenv()
    if not torch.set_flush_denormal(True):
        return "this CPU cannot flush denormals"
    scope.callback(set_fenv, original)
    set_fenv(read_fenv())
    return None


def denormals_flushed() -> bool:
    """Whether every thread of an operator flushes denormals to zero."""
    tiny = torch.finfo(torch.float32).tiny
    smallest = torch.full((PARALLEL_ELEMENTS,), tiny, dtype=torch.float32)
    return not bool((smallest * 0.5).count_nonzero())
