"""The machine's memory, disk and GPU: cleaned, warned about, or stopped for in time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from runner.device import memory, resources
from runner.device.leaks import LeakDetector, Trend
from runner.device.resources import GIB, Machine, Reading, Room
from runner.record.history import Fault
from runner.record.text import resume_argument
from runner.stability.config import WatchConfig
from runner.training.hook import Hook, Report, Verdict
from runner.training.run import Run

GROWN = 0.01  # share of the memory since the last cleaning, below which another gains nothing
MIB = 2**20
OURS = 0.1  # share of the memory that this process must hold, for stopping it to help
NEARER = 1 / 8  # of the memory left, by which the process must grow for another reading
KEY = "stability.watch"


class Resources(Hook):
    """Cleans, warns and stops; finds leaks.

    - Above device.clean_above of the memory that is the process's or the device's it cleans. Logged
      once for as long as it stays above; `memory_cleaned` in `faults`. 50 ms.
    - Above stop_above of all memory there may be (machine, container, `ulimit -v`) the run ends,
      with a checkpoint: the kernel would end it without one.
    - A disk that is nearly full, swap, and a GPU that is hot are each logged once.
    - A leak of the process or the device is logged with its size a step.

    20 µs a report; the machine is read every monitoring.system_every_s seconds, and the
    memory sooner where the process grows.
    """

    def __init__(self, clean_above: float | None, config: WatchConfig, machine: Machine) -> None:
        self.clean_above = clean_above
        self.config = config
        self.machine = machine
        self.left: float | None = None  # share held after the last cleaning, while above
        self.room: Room | None = None
        self.held = 0  # by the process, when the room was read
        self.next_look = 0.0  # at the machine
        self.swap_before: int | None = None
        self.warned: set[str] = set()
        self.leaks: dict[str, Fault] = {}  # longer windows find them again

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Begin from the memory and swap of now."""
        if self.config.enabled:
            self.machine.open(run.device)
            self.swap_before = resources.swap_bytes()
            least = round(self.config.leak_mb * MIB)
            if self.config.leaks:
                run.leaks["process"] = LeakDetector(least=least)
            if self.config.leaks and run.device.kind == "cuda":
                run.leaks["device"] = LeakDetector(least=least)
        yield

    def on_report(self, run: Run, report: Report) -> Verdict | None:
        """Check what is cheap each time, the rest now and then."""
        self._clean(run, report)
        if not self.config.enabled:
            return None
        for what, detector in run.leaks.items():
            if detector.add(report.last, _held(run, what)):
                memory.clean(run.device)  # what still grows is held
                trend = detector.cleaned(report.last, _held(run, what))
                if trend is not None:
                    self._report_leak(run, what, trend, report.last)
        now = time.monotonic()
        if now >= self.next_look:
            self.next_look = now + self.machine.every_s
            self._warn(run, self.machine.sample(), report.last)
            self.room = None
        return self._stop(run, report)

    def _clean(self, run: Run, report: Report) -> None:
        if self.clean_above is None:
            return
        held = memory.used_share(run.device)
        if held <= self.clean_above:
            self.left = None
            return
        if self.left is not None and held < self.left + GROWN:
            return
        first = self.left is None
        memory.clean(run.device)
        self.left = memory.used_share(run.device)
        run.history.add(
            "memory_cleaned",
            f"{held:.0%} of the memory was held (device.clean_above={self.clean_above:g}); "
            f"{self.left:.0%} after cleaning",
            step=report.last,
            category="memory",
            action="cleaned",
            say=first,
        )

    def _stop(self, run: Run, report: Report) -> Verdict | None:
        """End the run if there is next to no memory left and it is this process that holds it."""
        above = self.config.stop_above
        if above is None or report.last >= run.total_steps:
            return None
        held = memory.process_bytes()
        if self.room is not None and held - self.held < NEARER * self.room.left:
            return None
        room = self._read_room()
        # a run that was cut smaller to fit lives at its own limit, where nothing is killed
        if room.used_share <= above or (room.own and run.history.counts.get("out_of_memory")):
            return None
        memory.clean(run.device)
        room, held = self._read_room(), self.held
        if room.used_share <= above:
            return None
        told = (
            f"{room.used_share:.0%} of {room.whose} ({room.limit / GIB:.1f} GiB) is taken, this "
            f"process holds {held / GIB:.1f} GiB"
        )
        if held < OURS * room.limit and not room.own:
            action = "the run goes on: other processes fill it"
            self._warn_once(run, "memory_short", told, report.last, action)
            return None
        told += f" ({KEY}.stop_above={above:g})"
        again = f" with {resume_argument(run.folder)}" if run.folder is not None else ""
        run.stop_reason = (
            f"{told}; go on{again} where there is more memory, or with a smaller "
            "training.batch_size"
        )
        run.history.add(
            "memory_stop",
            told,
            step=report.last,
            category="memory",
            severity="error",
            action="a checkpoint is saved and the run ends",
        )
        return Verdict.STOP

    def _read_room(self) -> Room:
        self.room, self.held = resources.room(), memory.process_bytes()
        return self.room

    def _report_leak(self, run: Run, what: str, trend: Trend, step: int) -> None:
        whose = "the process" if what == "process" else "the tensors on the device"
        reached = trend.held + trend.slope * (run.total_steps - step)
        message = (
            f"leak: {whose} grows by {trend.slope / 1e3:.1f} KB a step ({trend.low / 1e3:.1f} "
            f"to {trend.high / 1e3:.1f}, steps {trend.first} to {trend.last}); "
            f"{trend.held / MIB:,.0f} MiB now, {reached / MIB:,.0f} MiB at step {run.total_steps}"
        )
        if what in self.leaks:  # the same one, better known
            self.leaks[what].message = message
            self.leaks[what].last_step = step
            run.history.unwritten = True
            return
        named = run.settings.get("debug.memory.enabled")
        action = "" if named else "debug=memory names what grows"
        self.leaks[what] = run.history.add(
            "leak", message, step=step, category="memory", action=action
        )

    def _warn(self, run: Run, reading: Reading, step: int) -> None:
        config, gpu = self.config, reading.gpu
        free, swap = reading.disk_free_bytes, reading.swap_bytes
        if free is not None and free < config.disk_min_mb * 1e6:
            text = f"{free / 1e6:,.0f} MB are free on the disk of {run.folder or 'this folder'}"
            self._warn_once(run, "disk_low", f"{text} ({KEY}.disk_min_mb)", step)
        grown = 0 if swap is None or self.swap_before is None else swap - self.swap_before
        if grown > config.swap_mb * 1e6:
            text = f"{grown / 1e6:,.0f} MB more are swapped out than at the start"
            self._warn_once(run, "swapping", f"{text} ({KEY}.swap_mb)", step)
        if gpu is not None and (gpu.temperature or 0.0) > config.gpu_temperature:
            text = f"the GPU has {gpu.temperature:g} °C"
            self._warn_once(run, "gpu_hot", f"{text} ({KEY}.gpu_temperature)", step)
        if gpu is not None and gpu.slowed:
            text = f"the GPU lowered its clocks to {gpu.clock_mhz} MHz: too hot, or short of power"
            self._warn_once(run, "gpu_slowed", text, step)

    def _warn_once(self, run: Run, kind: str, message: str, step: int, action: str = "") -> None:
        if kind not in self.warned:
            self.warned.add(kind)
            run.history.add(kind, message, step=step, category="resources", action=action)


def _held(run: Run, what: str) -> int:
    if what == "process":
        return memory.anonymous_bytes()
    return torch.cuda.memory_allocated(run.device.torch)
