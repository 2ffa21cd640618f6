"""Memory of a program: bytes held, peaks by phase, leaks; and a description of this machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from threading import Lock
from time import perf_counter
from typing import Any

import torch

from runner.composing import compose
from runner.device import memory, phases, resources
from runner.device.device import select
from runner.device.leaks import LeakDetector, Trend, describe_leaks
from runner.library.lazy_run import device_overrides


@dataclass(frozen=True)
class MemoryStats:
    """What is held now, in bytes. On a CPU the device's numbers are 0."""

    process: int  # resident, of this process alone
    peak_process: int  # since it started
    available: int  # until the nearest limit: the machine's, the container's, `ulimit -v`
    limit: int  # that one
    limited_by: str
    swap: int | None  # in use on this machine; None where it does not tell
    device_allocated: int  # by tensors
    device_reserved: int  # by the caching allocator, including tensors
    peak_device: int  # by tensors, since the process started
    device_total: int

    def as_dict(self) -> dict[str, Any]:
        """All of it in plain values."""
        return asdict(self)


@dataclass
class MemoryPhase:
    """One stretch of a program, over all the times that it ran."""

    name: str
    times: int = 0
    seconds: float = 0.0
    peak_process: int = 0  # the most that the process held meanwhile
    added_process: int = 0  # the most beyond what it held when the phase began
    peak_device: int = 0
    added_device: int = 0


class Memory:
    """Watches the memory of a program, and of one device.

    >>> memory = Memory()
    >>> with memory.track("evaluate"):
    ...     evaluate(model)
    >>> memory.sample(step)  # now and then; memory.leaking says whether it grows without end
    >>> print(memory)

    `device` is as in `device=…` of the runner: "cpu", "cuda", "cuda:1", "mps"; None takes the
    fastest that is there. Raises DeviceError where it is not there.
    """

    def __init__(self, device: str | torch.device | None = None) -> None:
        overrides = [] if device is None else device_overrides(torch.device(device))
        with ExitStack() as scope:  # no switch of the process stays flipped
            self.device = select(compose(overrides).device, scope)
        self.phases: dict[str, MemoryPhase] = {}
        self._lock = Lock()
        self._process, self._on_device = LeakDetector(), LeakDetector()

    def stats(self) -> MemoryStats:
        """What is held now; 300 µs, and no wait for the device."""
        device, room = self.device, resources.room()
        allocated = reserved = memory.device_mark(device) if device.kind == "mps" else 0
        if device.kind == "cuda":
            allocated = torch.cuda.memory_allocated(device.torch)
            reserved = torch.cuda.memory_reserved(device.torch)
        return MemoryStats(
            process=memory.process_bytes(),
            peak_process=memory.peak_process_bytes(),
            available=room.left,
            limit=room.limit,
            limited_by=room.whose,
            swap=resources.swap_bytes(),
            device_allocated=allocated,
            device_reserved=reserved,
            peak_device=memory.peak_device_bytes(device),
            device_total=0 if device.kind == "cpu" else device.memory_bytes,
        )

    def clear(self) -> int:
        """Collect garbage, give cached blocks and freed heap back; the bytes by which that helped.

        50 ms. On a GPU these are bytes of the device, elsewhere of the process.
        """
        before = self._held()
        memory.clean(self.device)
        return max(0, before - self._held())

    @contextmanager
    def track(self, name: str) -> Iterator[MemoryPhase]:
        """The peak of what happens inside, in `phases[name]`; it may nest, and run in threads.

        40 µs. Memory that other threads hold meanwhile counts too.
        """
        start = perf_counter()
        with self._lock:
            phase = self.phases.setdefault(name, MemoryPhase(name))
        with ExitStack() as stack:
            peak = stack.enter_context(phases.peak(self.device))
            try:
                yield phase
            finally:
                stack.close()  # now the peak is complete
                self._add(phase, peak, perf_counter() - start)

    def _add(self, phase: MemoryPhase, peak: phases.MemoryPeak, seconds: float) -> None:
        added = peak.process - peak.process_before, peak.on_device - peak.on_device_before
        with self._lock:
            phase.times += 1
            phase.seconds += seconds
            phase.peak_process = max(phase.peak_process, peak.process)
            phase.peak_device = max(phase.peak_device, peak.on_device)
            phase.added_process = max(phase.added_process, added[0])
            phase.added_device = max(phase.added_device, added[1])

    def sample(self, step: int) -> Trend | None:
        """Note what is held at this step; the trend, when a leak is found.

        10 µs. Call it at a like point of each step, or of each tenth; steps rise. Where memory
        looks like a leak it collects garbage, and waits for what still grows.
        """
        leak: Trend | None = None
        for detector, held in (
            (self._process, memory.anonymous_bytes),
            (self._on_device, self._allocated),
        ):
            if detector.add(step, held()):
                memory.clean(self.device)
                leak = detector.cleaned(step, held()) or leak
        return leak

    def _allocated(self) -> int:
        on_gpu = self.device.kind == "cuda"
        return torch.cuda.memory_allocated(self.device.torch) if on_gpu else 0

    @property
    def leaking(self) -> bool:
        """Whether `sample` has found a leak."""
        return self._process.leaking or self._on_device.leaking

    @property
    def trend(self) -> Trend | None:
        """Growth over the newest window, that of a leak first; None: too few samples."""
        trends = [d.trend for d in (self._on_device, self._process) if d.trend is not None]
        return max(trends, key=lambda trend: trend.leaking, default=None)

    def _held(self) -> int:
        if self.device.kind == "cuda":
            return torch.cuda.memory_reserved(self.device.torch)
        return memory.process_bytes()

    def __str__(self) -> str:
        now = self.stats()
        rows = [
            ("process", f"{size_text(now.process)}, {size_text(now.peak_process)} at most"),
            (
                "available",
                f"{size_text(now.available)} of {size_text(now.limit)}: {now.limited_by}",
            ),
        ]
        if self.device.kind != "cpu":
            sizes = now.device_allocated, now.device_reserved, now.peak_device, now.device_total
            text = "{} allocated, {} reserved, {} at most, of {}".format(*map(size_text, sizes))
            rows.append((self.device.name, text))
        detectors = {"process": self._process}
        if self.device.kind == "cuda":
            detectors["device"] = self._on_device
        if sampled := {name: d for name, d in detectors.items() if d.recent}:
            rows.append(("leaks", describe_leaks(sampled)))
        text = table_text((), rows)
        if self.phases:
            text += "\n\n" + table_text(
                ("phase", "times", "seconds", "process", "added", "device", "added"),
                [_cells(phase) for phase in list(self.phases.values())],
            )
        return text


def _cells(phase: MemoryPhase) -> list[str]:
    sizes = phase.peak_process, phase.added_process, phase.peak_device, phase.added_device
    return [phase.name, str(phase.times), f"{phase.seconds:.3f}", *map(size_text, sizes)]


def system_info() -> dict[str, Any]:
    """Device, capabilities, CPU, memory, versions, techniques and checks, as `job=doctor` has them.

    All in plain values, so `json.dumps` takes it. It compiles a line of C++ and looks at what is
    installed: about a second.
    """
    from runner.jobs.doctor import examine

    return examine(compose()).as_dict()


def size_text(value: float) -> str:
    """Bytes with their prefix, such as `9.7 KiB`."""
    return _scaled(value, 1024, ("", "Ki", "Mi", "Gi", "Ti"), 4) + "B"


def count_text(value: float) -> str:
    """A number of operations with its prefix, such as `1.3 G`."""
    return _scaled(value, 1000, ("", "k", "M", "G", "T", "P"), 3)


def _scaled(value: float, base: int, prefixes: Sequence[str], digits: int) -> str:
    power = 0
    while abs(value) >= base and power < len(prefixes) - 1:
        value, power = value / base, power + 1
    return f"{value:.{digits}g} {prefixes[power]}"


def table_text(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table for print and logs: no colours, at most 100 columns, long cells folded."""
    from rich.table import Table

    from runner.record.console import Screen, plain_text

    table = Table(box=None, padding=(0, 2), pad_edge=False, show_header=bool(header))
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(plain_text, row))
    screen = Screen(width=100, no_color=True)
    with screen.capture() as captured:
        screen.print(table)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())
