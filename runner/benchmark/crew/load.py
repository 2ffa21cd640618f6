"""How the machine is while an arm has its turn: others' share of the CPUs, clocks, stolen time.

Read by the process that waits, from counters of the kernel in hundredths of a second, so one
short turn is known to a few per cent only; what counts is the median over the blocks.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from runner.benchmark.blocks import TurnLoad


@dataclass(frozen=True)
class Counters:
    """What the kernel had counted at one time, in seconds."""

    at: float
    busy: float  # of the CPUs that this process may use
    stolen: float
    ours: float  # CPU time of the processes that work for us


class Watch:
    """Load during one turn of the process `pid`; some 300 µs at each end, 100 µs in between."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.mhz: float | None = None
        self.before = _count(pid)

    def glance(self) -> None:
        """In the midst of the turn: clocks fall as soon as the work is done."""
        self.mhz = _mhz()

    def load(self, device_mhz: float | None) -> TurnLoad:
        """Of all that has passed since."""
        before, after = self.before, _count(self.pid)
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


def _count(pid: int) -> Counters | None:
    """Now; None where the system does not tell (not Linux)."""
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
    """The CPU's clock now, mean over its cores; None where it is not told."""
    try:
        found = psutil.cpu_freq()
    except (OSError, NotImplementedError, RuntimeError):
        return None
    return float(found.current) if found is not None and found.current else None
