"""The machine that times are taken on: what it is, and its load while an arm has its turn.

Load is read by the waiting process from kernel counters in hundredths of a second, so one short
turn is known to a few per cent only; what counts is the median over the blocks.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from runner.benchmark.blocks import TurnLoad
from runner.device import capabilities
from runner.record import provenance

GIB = 1 << 30
CLASS = ("cpu", "cores", "memory_gib", "platform", "device", "device_name", "device_memory_gib")
"""What two machines must share, with `threads`, to be compared; not the version of torch."""


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
        for key in (*CLASS, "threads")
        if key in now and key in then and now[key] != then[key]
    ]


@dataclass(frozen=True)
class Counters:
    """Counters of the kernel at one time, in seconds."""

    at: float
    busy: float  # of the CPUs that this process may use
    stolen: float
    ours: float  # CPU time of the processes that work for us


class LoadMonitor:
    """Load during one turn of the process `pid`; some 300 µs at each end, 100 µs in between."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.mhz: float | None = None
        self.before = _read_counters(pid)

    def read_clock(self) -> None:
        """In the middle of the turn: clocks fall as soon as the work is done."""
        self.mhz = _mhz()

    def load(self, device_mhz: float | None) -> TurnLoad:
        """The load since the monitor was made."""
        before, after = self.before, _read_counters(self.pid)
        if before is None or after is None or after.at <= before.at:
            return TurnLoad(mhz=self.mhz, device_mhz=device_mhz)
        capacity = (after.at - before.at) * max(1, len(_cores()))
        others = after.busy - before.busy - (after.ours - before.ours)
        return TurnLoad(
            others=min(1.0, max(0.0, others / capacity)),
            mhz=self.mhz,
            device_mhz=device_mhz,
            stolen=min(1.0, max(0.0, (after.stolen - before.stolen) / capacity)),
        )


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []


def _read_counters(pid: int) -> Counters | None:
    """Counters now; None where the system has none (not Linux)."""
    at = time.monotonic()
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except (OSError, psutil.Error):
        return None
    tick, cores = os.sysconf("SC_CLK_TCK"), {f"cpu{core}" for core in _cores()}
    busy = stolen = 0.0
    for line in lines:
        name, *fields = line.split()
        if name in cores:
            user, nice, system, _idle, _waiting, hard, soft, away = map(int, fields[:8])
            busy += (user + nice + system + hard + soft) / tick
            stolen += away / tick
    ours = 0.0
    for process in (*processes, psutil.Process()):
        with suppress(psutil.Error):  # it ended meanwhile; its parent has its time
            spent = process.cpu_times()
            ours += spent.user + spent.system
            if process.pid != os.getpid():  # ours also has that of arms that are gone
                ours += spent.children_user + spent.children_system
    return Counters(at, busy, stolen, ours)


def _mhz() -> float | None:
    """The CPU's clock now, mean over its cores; None where it is not known."""
    try:
        clock = psutil.cpu_freq()
    except (OSError, NotImplementedError, RuntimeError):
        return None
    return float(clock.current) if clock is not None and clock.current else None
