"""The machine that times are taken on: what it is, and its load while an arm has its turn."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from runner.benchmark.blocks import TurnLoad
from runner.device import capabilities
from runner.record import provenance

GIB = 1 << 30
CLASS = "cpu cores memory_gib platform device device_name device_memory_gib threads".split()
"""What two machines must share to be compared; not the version of torch."""


def machine(summaries: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """This machine, with the device that the first of the runs' summaries names."""
    facts: dict[str, Any] = {
        "cpu": capabilities.cpu_name(),
        "cores": capabilities.usable_cores(),
        "memory_gib": round(capabilities.usable_memory() / GIB),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": provenance.versions().get("torch", ""),
    }
    device = next((s["device"] for s in summaries if s.get("device")), None)
    if device is not None:
        facts["device"] = device.get("kind")
        facts["device_name"] = device.get("name")
        facts["device_memory_gib"] = round((device.get("memory_bytes") or 0) / GIB)
        facts["threads"] = device.get("threads")
    return facts


def machine_differences(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    """Where two machines differ, as text; keys that only one of them has are skipped."""
    return [
        f"{key.replace('_', ' ')} is {now[key]} and was {then[key]}"
        for key in CLASS
        if key in now and key in then and now[key] != then[key]
    ]


@dataclass(frozen=True)
class Counters:
    """Counters of the kernel at one time, in seconds."""

    at: float
    busy: float  # of the CPUs that this process may use
    ours: float  # CPU time of the processes that work for us


class LoadMonitor:
    """Load during one turn of the process `pid`; some 300 µs at each end, 100 µs in between.

    Counters are in hundredths of a second, so one short turn is known to a few per cent only; what
    counts is the median over the blocks.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.mhz: float | None = None
        self.before = _read_counters(pid)

    def read_clock(self) -> None:
        """In the middle of the turn: clocks fall as soon as the work is done."""
        with suppress(OSError, NotImplementedError, RuntimeError):
            clock = psutil.cpu_freq()  # a mean over the cores; None where it is not known
            self.mhz = float(clock.current) if clock is not None and clock.current else None

    def load(self) -> TurnLoad:
        """The load since the monitor was made."""
        before, after = self.before, _read_counters(self.pid)
        if before is None or after is None or after.at <= before.at:
            return TurnLoad(mhz=self.mhz)
        capacity = (after.at - before.at) * len(os.sched_getaffinity(0))
        others = after.busy - before.busy - (after.ours - before.ours)
        return TurnLoad(min(1.0, max(0.0, others / capacity)), self.mhz)


def _read_counters(pid: int) -> Counters | None:
    """Counters now; None where the process is gone, or the system is not Linux."""
    at = time.monotonic()
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        cores, cpus = os.sched_getaffinity(0), psutil.cpu_times(percpu=True)
    except (OSError, AttributeError, psutil.Error):
        return None
    busy = sum(
        cpu.user + cpu.nice + cpu.system + cpu.irq + cpu.softirq
        for number, cpu in enumerate(cpus)
        if number in cores
    )
    ours = 0.0
    for process in (*processes, psutil.Process()):
        with suppress(psutil.Error):  # it ended meanwhile; its parent has its time
            spent = process.cpu_times()
            ours += spent.user + spent.system
            if process.pid != os.getpid():  # ours also has that of arms that are gone
                ours += spent.children_user + spent.children_system
    return Counters(at, busy, ours)
