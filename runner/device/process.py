"""What a process may be asked on any device: threads, the cores it runs on, and its priority.

Each function undoes what it did through the scope it is given, and returns what the person
should know about it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from time import monotonic, process_time, sleep

import torch

from runner.device.capabilities import usable_cores
from runner.errors import ConfigError

log = logging.getLogger(__name__)


def set_affinity(cores: list[int], scope: ExitStack) -> None:
    """Run on these cores only, every thread of the process and those it starts later."""
    if sys.platform != "linux":
        raise ConfigError("device.affinity", f"{sys.platform} has no affinity", "leave it out")
    allowed = os.sched_getaffinity(0)
    absent = sorted(set(cores) - allowed)  # the kernel would drop them without a word
    if not cores or absent:
        problem = f"this process cannot use core {absent[0]}" if absent else "names no core"
        raise ConfigError("device.affinity", problem, f"choose from {sorted(allowed)}")
    before = {thread: os.sched_getaffinity(thread) for thread in _threads()}

    def restore() -> None:
        _each_thread(lambda thread: os.sched_setaffinity(thread, before.get(thread, allowed)))

    scope.callback(restore)
    _each_thread(lambda thread: os.sched_setaffinity(thread, cores))


def set_priority(niceness: int, scope: ExitStack) -> None:
    """Give way to (above 0) or go before (below 0) other processes, with every thread."""
    before = os.getpriority(os.PRIO_PROCESS, 0)

    def restore() -> None:
        try:
            _each_thread(lambda thread: os.setpriority(os.PRIO_PROCESS, thread, before))
        except PermissionError:  # anyone may become nicer, few may take it back
            log.info("the process keeps niceness %s: going back needs a privilege", niceness)

    try:
        _each_thread(lambda thread: os.setpriority(os.PRIO_PROCESS, thread, niceness))
    except PermissionError:
        raise ConfigError(
            "device.priority",
            f"{niceness} is before the present {before}, which needs a privilege",
            f"use {before} to 19, or start the runner with CAP_SYS_NICE",
        ) from None
    scope.callback(restore)


def set_threads(wanted: int | None, narrowed: bool, scope: ExitStack) -> list[str]:
    """Threads inside one operator; None leaves torch's choice, but never above a narrowed affinity.

    More threads than cores is the one setting that must not happen by accident: OpenMP's
    threads spin while they wait, and a step took four times as long.
    """
    before, cores = torch.get_num_threads(), usable_cores()
    notes = []
    if wanted is None and narrowed and before > cores:
        wanted = cores
        notes.append(f"threads: {cores}, one for each core of device.affinity")
    if wanted is not None and wanted != before:
        scope.callback(torch.set_num_threads, before)
        torch.set_num_threads(wanted)
    if (threads := torch.get_num_threads()) > cores:
        notes.append(
            f"{threads} threads on {cores} usable cores wait for each other; "
            f"set device.threads={cores}"
        )
    return notes


def set_interop_threads(wanted: int) -> list[str]:
    """Threads that run independent operators; torch takes it once a process, for good."""
    if torch.get_num_interop_threads() == wanted:
        return []
    try:
        torch.set_num_interop_threads(wanted)
    except RuntimeError:
        kept = torch.get_num_interop_threads()
        return [
            f"device.interop_threads={wanted} came too late, torch keeps {kept}: it can be set "
            "only once in a process, before its first parallel work"
        ]
    return []


def busy_cores(seconds: float = 0.2) -> float:
    """Cores' worth of time that other processes take on the cores this one may use; 0 if unknown.

    Waits so long and compares. Whoever has made himself nice gives way to us and does not count.
    The kernel counts in hundredths of a second.
    """
    if sys.platform != "linux":
        return 0.0
    before, own = _core_seconds(), process_time()
    start = monotonic()
    sleep(seconds)
    others = _core_seconds() - before - (process_time() - own)
    return max(0.0, others / (monotonic() - start))


def free_threads(wanted: int, busy: float) -> int:
    """So many threads as there are cores without a neighbour: `wanted` at most, half at least.

    Operators wait for the slowest thread, so that one that shares its core with a neighbour makes
    all the others wait. Half, since neighbours come and go and a run keeps its threads.
    """
    there = len(affinity() or ()) or usable_cores()
    return max((wanted + 1) // 2, min(wanted, round(there - busy)))


def affinity() -> list[int] | None:
    """The cores this process may run on; None where the system has no such thing."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else None


def _core_seconds() -> float:
    """Seconds for which this process's cores have been busy, nice work left out: /proc/stat."""
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return 0.0
    for line in lines:
        name, *fields = line.split()
        if name in cores:
            user, _nice, system, _idle, _waiting, interrupts, soft_interrupts = map(int, fields[:7])
            ticks += user + system + interrupts + soft_interrupts
    return ticks / os.sysconf("SC_CLK_TCK")


def _threads() -> list[int]:
    """The ids of this process's threads; Linux keeps affinity and niceness for each."""
    try:
        return [int(entry.name) for entry in Path("/proc/self/task").iterdir()]
    except FileNotFoundError:
        return [0]


def _each_thread(act: Callable[[int], None]) -> None:
    for thread in _threads():
        with suppress(ProcessLookupError):  # it ended meanwhile
            act(thread)
