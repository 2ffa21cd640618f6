"""One call of a model, measured: its time, operators, operations and memory."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import profiler_legacy
from torch.utils._python_dispatch import TorchDispatchMode

from runner.batch import Inputs, call
from runner.device.device import Device
from runner.library.assembly import Reach, entered
from runner.library.optimize import Optimized
from runner.measure import flops as counted
from runner.nest import tensors

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
        self.reach = Reach()

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
        run = self.model.assembly.run if isinstance(self.model, Optimized) else None
        with ExitStack() if run is None else entered(run):
            if torch.is_autocast_enabled(device.kind):
                return torch.get_autocast_dtype(device.kind)
        floats = (p.dtype for p in self.module.parameters() if p.is_floating_point())
        return next(floats, torch.float32)


def times(subject: Subject, device: Device, runs: int) -> np.ndarray:
    """Seconds of each call, the device waited for at both ends."""
    seconds = np.empty(runs)
    device.synchronize()
    for i in range(runs):
        start = perf_counter()
        subject()
        device.synchronize()
        seconds[i] = perf_counter() - start
    return seconds


def operators(subject: Subject, device: Device) -> list[Operator]:
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


def flops(subject: Subject) -> tuple[int, int]:
    """Of a forward, and of the call."""
    forward = counted.flops(subject.forward, grad=False)
    return forward, counted.flops(subject) if subject.backward else forward


def memory(subject: Subject, device: Device) -> Memory:
    """Counted on a GPU by its allocator, elsewhere over the tensors that operators put out."""
    own = [
        *subject.module.parameters(),
        *subject.module.buffers(),
        *tensors(subject.inputs),
    ]
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
