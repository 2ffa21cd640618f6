"""Memory of a program: what is held, peaks by phase, leaks; and what this machine has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from runner.composing import compose
from runner.device import memory, phases, resources
from runner.device.device import select
from runner.device.leaks import LeakDetector, Trend, describe_leaks

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Stats:
    """What is held now, in bytes. On a CPU the device's numbers are 0."""

    process: int  # resident, of this process alone
    peak_process: int  # since it started
    available: int  # until the nearest limit: the machine's, the container's, `ulimit -v`
    limit: int  # that one
    limited_by: str
    swap: int | None  # in use on this machine; None where it does not tell
    device_allocated: int  # by tensors
    device_reserved: int  # by the caching allocator, what tensors hold included
    peak_device: int  # by tensors, since the process started
    device_total: int

    def as_dict(self) -> dict[str, Any]:
        """All of it in plain values."""
        return asdict(self)


@dataclass
class Phase:
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
        wanted = None if device is None else torch.device(device)
        overrides = [] if wanted is None else [f"device={wanted.type}"]
        if wanted is not None and wanted.type == "cuda" and wanted.index is not None:
            overrides.append(f"device.index={wanted.index}")
        with ExitStack() as scope:  # looked up, and set to nothing
            self.device = select(compose(overrides).device, scope)
        self.phases: dict[str, Phase] = {}
        self._lock = Lock()
        self._process = LeakDetector()
        self._on_device = LeakDetector()

    def stats(self) -> Stats:
        """What is held now; 300 µs, and no wait for the device."""
        device, room = self.device, resources.room()
        allocated = reserved = memory.device_mark(device) if device.kind == "mps" else 0
        if device.kind == "cuda":
            allocated = torch.cuda.memory_allocated(device.torch)
            reserved = torch.cuda.memory_reserved(device.torch)
        return Stats(
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
    def track(self, name: str) -> Iterator[Phase]:
        """The peak of what happens in here, in `phases[name]`; it may nest, and run in threads.

        40 µs. A phase that runs again goes on with the numbers that it has. What other threads
        hold meanwhile counts too. On a GPU kernels that were only queued need no memory later:
        it is handed out when they are queued.
        """
        start = perf_counter()
        with self._lock:
            phase = self.phases.setdefault(name, Phase(name))
        with ExitStack() as stack:
            found = stack.enter_context(phases.peak(self.device))
            try:
                yield phase
            finally:
                stack.close()  # now the peak is whole
                self._add(phase, found, perf_counter() - start)

    def _add(self, phase: Phase, found: phases.Peak, seconds: float) -> None:
        added = found.process - found.process_before, found.on_device - found.on_device_before
        with self._lock:
            phase.times += 1
            phase.seconds += seconds
            phase.peak_process = max(phase.peak_process, found.process)
            phase.peak_device = max(phase.peak_device, found.on_device)
            phase.added_process = max(phase.added_process, added[0])
            phase.added_device = max(phase.added_device, added[1])

    def sample(self, step: int) -> Trend | None:
        """Take note of what is held at this step; the trend, when a leak is found.

        10 µs. Call it at a like point of each step, or of each tenth; steps rise. Where memory
        looks like a leak it collects garbage, and waits for what grows on.
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
        """How memory goes over the newest window, that of a leak first; None: too few samples."""
        trends = [d.trend for d in (self._on_device, self._process) if d.trend is not None]
        return max(trends, key=lambda trend: trend.leaking, default=None)

    def _held(self) -> int:
        if self.device.kind == "cuda":
            return torch.cuda.memory_reserved(self.device.torch)
        return memory.process_bytes()

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table

        from runner.record.console import plain_text

        stats = self.stats()
        facts = Table.grid(padding=(0, 2))
        rows = [
            ("process", f"{size_text(stats.process)}, {size_text(stats.peak_process)} at most"),
            (
                "available",
                f"{size_text(stats.available)} of {size_text(stats.limit)}: {stats.limited_by}",
            ),
        ]
        if stats.swap:
            rows.append(("swap", f"{size_text(stats.swap)} in use"))
        if self.device.kind != "cpu":
            sizes = stats.device_allocated, stats.device_reserved, stats.peak_device
            held, reserved, peak = map(size_text, sizes)
            text = f"{held} allocated, {reserved} reserved, {peak} at most, of "
            rows.append((self.device.name, text + size_text(stats.device_total)))
        watched = {"process": self._process}
        if self.device.kind == "cuda":
            watched["device"] = self._on_device
        if sampled := {name: d for name, d in watched.items() if d.recent}:
            rows.append(("leaks", describe_leaks(sampled)))
        for row in rows:
            facts.add_row(*map(plain_text, row))
        if not self.phases:
            return facts
        table = Table(box=None, padding=(0, 2), pad_edge=False)
        table.add_column("phase", overflow="fold")
        gpu = self.device.kind != "cpu"
        for heading in ("times", "seconds", "process, at most", "added"):
            table.add_column(heading, justify="right")
        for heading in ("device, at most", "added") if gpu else ():
            table.add_column(heading, justify="right")
        for phase in list(self.phases.values()):
            cells = [phase.name, str(phase.times), f"{phase.seconds:.3f}"]
            cells += [size_text(phase.peak_process), size_text(phase.added_process)]
            cells += [size_text(phase.peak_device), size_text(phase.added_device)] if gpu else []
            table.add_row(*map(plain_text, cells))
        return Group(facts, "", table)

    def __str__(self) -> str:
        return rich_text(self)


def system_info() -> dict[str, Any]:
    """Device, capabilities, CPU, memory, versions, techniques and checks, as `job=doctor` has them.

    All in plain values, so `json.dumps` takes it. It compiles a line of C++ and looks at what is
    installed: about a second.
    """
    from runner.jobs.doctor import examine

    return examine(compose()).as_dict()


def size_text(value: float) -> str:
    """Bytes with their prefix, such as `9.7 KiB`."""
    prefixes = iter(("Ki", "Mi", "Gi", "Ti"))
    prefix = ""
    while value >= 1024:
        value, prefix = value / 1024, next(prefixes)
    return f"{value:.4g} {prefix}B"


def rich_text(renderable: RenderableType) -> str:
    """The same without colours, for print and logs."""
    from runner.record.console import Screen

    console = Screen(width=100, no_color=True)
    with console.capture() as captured:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())
