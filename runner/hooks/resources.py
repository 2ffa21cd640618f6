"""The machine's memory, disk and GPU: cleaned, warned about, or stopped for in time."""

from __future__ import annotations

import logging
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

log = logging.getLogger("runner")

GROWN = 0.01  # share of the memory since the last cleaning, below which another gains nothing
MIB = 2**20
OURS = 0.1  # share of the memory that this process must hold, for stopping it to help
NEARER = 1 / 8  # of what was left, by which the process grew: time to look again
KEY = "stability.watch"


class Resources(Hook):
    """Cleans, warns and stops; finds leaks.

    - Above device.clean_above of the memory that is the process's or the device's it cleans. Said
      once for as long as it stays above; `memory_cleaned` in `faults`. 50 ms.
    - Above stop_above of all memory there may be (machine, container, `ulimit -v`) the run ends,
      with a checkpoint: the kernel would end it without one.
    - A disk that is nearly full, swap, and a GPU that is hot are each said once.
    - A leak of the process or the device is said with its size a step.

    20 µs a report; the machine is looked at every monitoring.system_every_s seconds, and the
    memory sooner where the process grows.
    """

    def __init__(self, clean_above: float | None, config: WatchConfig, machine: Machine) -> None:
        self.clean_above = clean_above
        self.config = config
        self.machine = machine
        self.left: float | None = None  # share held after the last cleaning, while above
        self.room: Room | None = None
        self.held = 0  # by the process, when the room was looked at
        self.next_look = 0.0  # at the machine
        self.swap_before: int | None = None
        self.warned: set[str] = set()
        self.found: dict[str, Fault] = {}  # leaks, which longer windows find again

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Begin from what there is now."""
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
        """Look at what is cheap each time, at the rest now and then."""
        self._clean(run, report)
        if not self.config.enabled:
            return None
        for what, detector in run.leaks.items():
            if detector.add(report.last, _held(run, what)):
                memory.clean(run.device)  # what grows on in spite of it is held
                trend = detector.cleaned(report.last, _held(run, what))
                if trend is not None:
                    self._leak(run, what, trend, report.last)
        now = time.monotonic()
        if now >= self.next_look:
            self.next_look = now + self.machine.every_s
            self._warn(run, self.machine.look(), report.last)
            self.room = None
        return self._stop(run, report)

    # -- memory ----------------------------------------------------------------------------------

    def _clean(self, run: Run, report: Report) -> None:
        if self.clean_above is None:
            return
        held = memory.share_held(run.device)
        if held <= self.clean_above:
            self.left = None
            return
        if self.left is not None and held < self.left + GROWN:
            return
        first = self.left is None
        memory.clean(run.device)
        self.left = memory.share_held(run.device)
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
        if above is None or report.last >= run.total_steps:  # at the end there is nothing to stop
            return None
        held = memory.process_bytes()
        if self.room is not None and held - self.held < NEARER * self.room.left:
            return None
        if self._taken(run, held) <= above:
            return None
        memory.clean(run.device)
        held = memory.process_bytes()
        room, taken = self.room, self._taken(run, held)
        if room is None or taken <= above:
            return None
        told = f"{taken:.0%} of {room.whose} ({room.limit / GIB:.1f} GiB) is taken"
        mine = f"this process holds {held / GIB:.1f} GiB"
        if held < OURS * room.limit and not room.own:
            self._once(
                run,
                "memory_short",
                f"{told}; {mine}",
                report.last,
                "the run goes on: it is others who fill it",
            )
            return None
        again = f" with {resume_argument(run.folder)}" if run.folder is not None else ""
        run.stop_reason = (
            f"{told}, {mine} ({KEY}.stop_above={above:g}); go on{again} where there is more "
            "memory, or with a smaller training.batch_size"
        )
        run.history.add(
            "memory_stop",
            f"{told}, {mine} ({KEY}.stop_above={above:g})",
            step=report.last,
            category="memory",
            severity="error",
            action="a checkpoint is saved and the run ends",
        )
        return Verdict.STOP

    def _taken(self, run: Run, held: int) -> float:
        """The share of the memory that is taken; what was looked at is kept."""
        self.room, self.held = resources.room(), held
        # a run that was cut smaller to fit lives at its own limit, where nothing is killed
        if self.room.own and run.history.counts.get("out_of_memory"):
            return 0.0
        return self.room.taken

    def _leak(self, run: Run, what: str, trend: Trend, step: int) -> None:
        whose = "the process" if what == "process" else "what tensors hold on the device"
        reached = trend.held + trend.slope * (run.total_steps - step)
        message = (
            f"leak: {whose} grows by {trend.slope / 1e3:.1f} KB a step ({trend.low / 1e3:.1f} "
            f"to {trend.high / 1e3:.1f}, steps {trend.first} to {trend.last}); "
            f"{trend.held / MIB:,.0f} MiB now, {reached / MIB:,.0f} MiB at step {run.total_steps}"
        )
        if what in self.found:  # the same one, better known
            self.found[what].message = message
            self.found[what].last_step = step
            run.history.unwritten = True
            return
        named = run.settings.get("debug.memory.enabled")
        action = "" if named else "debug=memory names what grows"
        self.found[what] = run.history.add(
            "leak", message, step=step, category="memory", action=action
        )

    # -- the rest --------------------------------------------------------------------------------

    def _warn(self, run: Run, reading: Reading, step: int) -> None:
        config = self.config
        free, gpu, swap = reading.disk_free_bytes, reading.gpu, reading.swap_bytes
        if free is not None and free < config.disk_min_mb * 1e6:
            where = run.folder or "the current folder"
            self._once(
                run,
                "disk_low",
                f"{free / 1e6:,.0f} MB are free on the disk of {where} "
                f"({KEY}.disk_min_mb={config.disk_min_mb:g})",
                step,
                "the run goes on; checkpoints and records end when it is full",
            )
        if swap is not None and self.swap_before is not None:
            grown = swap - self.swap_before
            if grown > config.swap_mb * 1e6:
                self._once(
                    run,
                    "swapping",
                    f"{grown / 1e6:,.0f} MB more are swapped out than at the "
                    "start; steps that wait for them take many times as long",
                    step,
                )
        if gpu is not None and (gpu.temperature or 0.0) > config.gpu_temperature:
            self._once(
                run,
                "gpu_hot",
                f"the GPU has {gpu.temperature:g} °C "
                f"({KEY}.gpu_temperature={config.gpu_temperature:g})",
                step,
            )
        if gpu is not None and gpu.slowed:
            self._once(
                run,
                "gpu_slowed",
                f"the GPU has lowered its clocks to {gpu.clock_mhz} MHz: "
                "it is too hot, or short of power",
                step,
            )

    def _once(self, run: Run, kind: str, message: str, step: int, action: str = "") -> None:
        if kind not in self.warned:
            self.warned.add(kind)
            run.history.add(kind, message, step=step, category="resources", action=action)


def _held(run: Run, what: str) -> int:
    if what == "process":
        return memory.anonymous_bytes()
    return torch.cuda.memory_allocated(run.device.torch)
