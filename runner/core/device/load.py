"""How busy other processes keep the CPUs."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import psutil


class LoadMonitor:
    """CPU load by others than process `pid`, this process and their children; None: this one alone.

    Costs about 300 µs at each end. The kernel counts in 1/100 s, so one short turn is accurate to a
    few per cent only; use the median over blocks.
    """

    def __init__(self, pid: int | None = None, count_nice: bool = True) -> None:
        """Without `count_nice`, processes of positive niceness do not count."""
        self.pid, self.count_nice = pid, count_nice
        self.start = _read_counters(pid, count_nice)

    def other_cpu_share(self) -> float | None:
        """Return the share of the CPUs used by other processes since creation; None if unknown."""
        start, end = self.start, _read_counters(self.pid, self.count_nice)
        if start is None or end is None or end[0] <= start[0]:
            return None
        seconds, busy, own = (b - a for a, b in zip(start, end, strict=True))
        return min(1.0, max(0.0, (busy - own) / (seconds * len(os.sched_getaffinity(0)))))


def _read_counters(pid: int | None, count_nice: bool) -> tuple[float, float, float] | None:
    """Return (time, busy time of our CPUs, CPU time of our processes), all in seconds.

    None if the process has ended or the system is not Linux.
    """
    timestamp = time.monotonic()
    try:
        measured = psutil.Process(pid)
        processes = {p.pid: p for p in (measured, *measured.children(recursive=True))}
        cores, cpus = os.sched_getaffinity(0), psutil.cpu_times(percpu=True)
    except (OSError, AttributeError, psutil.Error):
        return None
    own_cpus = [cpu for number, cpu in enumerate(cpus) if number in cores]
    busy = sum(cpu.user + cpu.system + cpu.irq + cpu.softirq for cpu in own_cpus)
    busy += sum(cpu.nice for cpu in own_cpus) if count_nice else 0.0
    own_seconds = 0.0
    for process in {os.getpid(): psutil.Process(), **processes}.values():
        with suppress(psutil.Error):  # it ended meanwhile; its parent has its times
            times = process.cpu_times()
            own_seconds += times.user + times.system
            if pid is None or process.pid != os.getpid():  # the parent's include ended arms
                own_seconds += times.children_user + times.children_system
    return timestamp, busy, own_seconds
