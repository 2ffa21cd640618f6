"""Identity and load of the machine that is measured on."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import psutil

from runner.device import capabilities
from runner.record import provenance

GIB = 1 << 30
COMPARED = "cpu cores memory_gib platform device device_name device_memory_gib threads".split()
"""Facts that must be equal for two machines to be comparable; the torch version is not one."""


def machine_facts(summaries: Iterable[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return facts about this machine, with the device of the first summary that names one."""
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


def machine_differences(current: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[str]:
    """Return the facts that differ, as text; keys that only one of them has are skipped."""
    return [
        f"{key.replace('_', ' ')} is {current[key]}, was {baseline[key]}"
        for key in COMPARED
        if key in current and key in baseline and current[key] != baseline[key]
    ]


class LoadMonitor:
    """CPU load by others during one turn of process `pid`; costs about 300 µs at each end.

    The kernel counts in 1/100 s, so one short turn is accurate to a few per cent only; use the
    median over blocks.
    """

    def __init__(self, pid: int) -> None:
        self.pid, self.start = pid, _read_counters(pid)

    def other_cpu_share(self) -> float | None:
        """Return the share of the CPUs used by other processes since creation; None if unknown."""
        start, end = self.start, _read_counters(self.pid)
        if start is None or end is None or end[0] <= start[0]:
            return None
        seconds, busy, own = (b - a for a, b in zip(start, end, strict=True))
        return min(1.0, max(0.0, (busy - own) / (seconds * len(os.sched_getaffinity(0)))))


def _read_counters(pid: int) -> tuple[float, float, float] | None:
    """Return (time, busy time of our CPUs, CPU time of our processes), all in seconds.

    None if the process has ended or the system is not Linux.
    """
    timestamp = time.monotonic()
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        cores, cpus = os.sched_getaffinity(0), psutil.cpu_times(percpu=True)
    except (OSError, AttributeError, psutil.Error):
        return None
    own_cpus = [cpu for number, cpu in enumerate(cpus) if number in cores]
    busy = sum(cpu.user + cpu.nice + cpu.system + cpu.irq + cpu.softirq for cpu in own_cpus)
    own_seconds = 0.0
    for process in (*processes, psutil.Process()):
        with suppress(psutil.Error):  # it ended meanwhile; its parent has its times
            times = process.cpu_times()
            own_seconds += times.user + times.system
            if process.pid != os.getpid():  # our own children's times include ended arms
                own_seconds += times.children_user + times.children_system
    return timestamp, busy, own_seconds
