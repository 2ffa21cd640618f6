"""Memory of a program: bytes in use, peaks by phase, leaks; and a report on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Lock
from time import perf_counter
from typing import Any

import psutil
import torch

from runner.core.build.arguments import check_whole_number, device_overrides
from runner.core.config.composing import compose
from runner.core.device import memory, resources
from runner.core.device.device import select
from runner.core.device.leaks import LeakDetector, Trend, describe_leaks
from runner.core.format import size
from runner.core.record.text import escape_lines


@dataclass(frozen=True)
class MemoryStats:
    """Memory in use now, in bytes; device values are 0 on a CPU."""

    process: int  # resident, of this process alone
    peak_process: int  # since it started
    available: int  # until the nearest limit: the machine's, the container's, `ulimit -v`
    limit: int  # the nearest limit
    limited_by: str
    device_allocated: int  # by tensors
    peak_device: int  # by tensors, since the process started
    device_total: int
    virtual: int = 0  # address space of this process
    swap: int = 0  # of this process, swapped out


@dataclass
class MemoryPhase:
    """A named phase of a program, aggregated over all its executions."""

    name: str
    times: int = 0
    seconds: float = 0.0
    peak_process: int = 0  # maximum of the process during the phase
    added_process: int = 0  # maximum increase over the start of the phase
    peak_device: int = 0
    added_device: int = 0


class Memory:
    """Measures the memory of a program and of one device.

    >>> memory = Memory()
    >>> with memory.track("evaluate"):
    ...     evaluate(model)
    >>> memory.sample(step)  # regularly; then memory.leaking says whether memory keeps growing
    >>> print(memory)

    `device` is as in `device=…` of the runner: "cpu", "cuda", "cuda:1", "mps"; None selects the
    fastest available. Raises DeviceError if it is not available.
    """

    def __init__(self, device: str | torch.device | None = None) -> None:
        overrides = [] if device is None else device_overrides(device)
        with ExitStack() as scope:  # restores all global switches
            self.device = select(compose(overrides).device, scope)
        self.phases: dict[str, MemoryPhase] = {}
        self._lock = Lock()
        self._size_readers = {
            "process": memory.anonymous_bytes,
            "child processes": memory.child_bytes,
        }
        if self.device.kind == "cuda":
            self._size_readers["device"] = self._allocated
        self._detectors = {name: LeakDetector() for name in self._size_readers}

    def stats(self) -> MemoryStats:
        """Return the memory in use now; 300 µs, without device synchronisation."""
        device, room = self.device, resources.tightest_memory_limit()
        return MemoryStats(
            process=memory.process_bytes(),
            peak_process=memory.peak_process_bytes(),
            available=room.left,
            limit=room.limit,
            limited_by=room.name,
            device_allocated=self._allocated(),
            peak_device=memory.peak_device_bytes(device),
            device_total=0 if device.kind == "cpu" else device.memory_bytes,
            virtual=memory.status_bytes("VmSize") or psutil.Process().memory_info().vms,
            swap=memory.status_bytes("VmSwap") or 0,
        )

    def clear(self) -> int:
        """Collect garbage and release cached blocks and freed heap; returns the bytes released.

        50 ms. On a GPU these are device bytes, otherwise process bytes.
        """
        before = self._reserved()
        memory.free_caches(self.device)
        return max(0, before - self._reserved())

    @contextmanager
    def track(self, name: str) -> Iterator[MemoryPhase]:
        """Record the peak within the block in `phases[name]`; may nest and run in threads.

        40 µs. Includes memory allocated by other threads meanwhile.
        """
        start = perf_counter()
        with self._lock:
            phase = self.phases.setdefault(name, MemoryPhase(name))
        with ExitStack() as stack:
            peak = stack.enter_context(memory.peak_memory(self.device))
            try:
                yield phase
            finally:
                stack.close()  # now the peak is complete
                added = peak.process - peak.process_before, peak.on_device - peak.on_device_before
                with self._lock:
                    phase.times += 1
                    phase.seconds += perf_counter() - start
                    phase.peak_process = max(phase.peak_process, peak.process)
                    phase.peak_device = max(phase.peak_device, peak.on_device)
                    phase.added_process = max(phase.added_process, added[0])
                    phase.added_device = max(phase.added_device, added[1])

    def sample(self, step: int) -> Trend | None:
        """Record the memory at this step; returns the trend if there is a leak.

        20 µs. Call it at the same point of each step, or every tenth, with increasing steps. Counts
        this process, the tensors on the device, and processes started by `multiprocessing` such as
        a DataLoader's workers. If memory seems to leak, it collects garbage, but not that of other
        processes, and continues to observe.
        """
        check_whole_number("Memory.sample", "step", step, 0)
        leak: Trend | None = None
        for name, detector in self._detectors.items():
            read_bytes = self._size_readers[name]
            size = read_bytes()
            if name == "child processes" and not size:
                continue
            if detector.add(step, size):
                memory.free_caches(self.device)
                leak = detector.add_after_cleaning(step, read_bytes()) or leak
        return leak

    @property
    def leaking(self) -> bool:
        """Whether `sample` has confirmed a leak that still grows."""
        return any(detector.leaking for detector in self._detectors.values())

    def _allocated(self) -> int:
        if self.device.kind == "cuda":
            return torch.cuda.memory_allocated(self.device.torch)
        return memory.device_mark(self.device) if self.device.kind == "mps" else 0

    def _reserved(self) -> int:
        on_gpu = self.device.kind == "cuda"
        return torch.cuda.memory_reserved(self.device.torch) if on_gpu else memory.process_bytes()

    def __str__(self) -> str:
        stats = self.stats()
        rows = [
            ("process", f"{size(stats.process)}, {size(stats.peak_process)} at most"),
            ("virtual", f"{size(stats.virtual)}; {size(stats.swap)} swapped out"),
            ("available", f"{size(stats.available)} of {size(stats.limit)}: {stats.limited_by}"),
        ]
        if self.device.kind != "cpu":
            text = f"{size(stats.device_allocated)}, {size(stats.peak_device)} at most"
            rows.append((self.device.name, f"{text}, of {size(stats.device_total)}"))
        if sampled := {name: d for name, d in self._detectors.items() if d.start is not None}:
            rows.append(("leaks", describe_leaks(sampled)))
        header = ("phase", "times", "seconds", "process", "added", "device", "added")
        phases: list[tuple[str, ...]] = [header]
        for phase in [*self.phases.values()]:
            sizes = phase.peak_process, phase.added_process, phase.peak_device, phase.added_device
            cells = phase.name, str(phase.times), f"{phase.seconds:.3f}"
            phases.append((*cells, *map(size, sizes)))
        return table_text(rows) + ("\n\n" + table_text(phases) if self.phases else "")


def system_info() -> dict[str, Any]:
    """Return device, CPU, memory, versions, techniques and checks, as in `job=doctor`.

    All values are JSON-compatible. Compiles a line of C++ and inspects installed packages: about a
    second.
    """
    from runner.diagnose.doctor import examine_machine

    return examine_machine(compose()).as_dict()


def table_text(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return escape_lines("\n".join(line.rstrip() for line in lines))
