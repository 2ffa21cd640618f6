"""CPU affinity, priority, and load of the cores; imported only if used."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from time import sleep

from runner.core.device.capabilities import allowed_cores, usable_cores
from runner.core.device.load import LoadMonitor
from runner.core.errors import ConfigError


def set_affinity(cores: list[int], scope: ExitStack) -> None:
    """Restrict all threads, including later ones, to `cores`. Raises ConfigError."""
    if sys.platform != "linux":
        raise ConfigError("device.affinity", f"is not supported on {sys.platform}", "leave it out")
    allowed = os.sched_getaffinity(0)
    missing = sorted(set(cores) - allowed)  # the kernel would silently drop them
    if not cores or missing:
        problem = f"this process cannot use core {missing[0]}" if missing else "names no core"
        raise ConfigError("device.affinity", problem, f"choose from {sorted(allowed)}")
    scope.callback(_apply_to_threads, lambda thread: os.sched_setaffinity(thread, allowed))
    _apply_to_threads(lambda thread: os.sched_setaffinity(thread, cores))


def set_priority(niceness: int, scope: ExitStack) -> None:
    """Set the niceness of every thread; a lower one needs a privilege. Raises ConfigError."""
    before = os.getpriority(os.PRIO_PROCESS, 0)

    def set_all(value: int) -> None:
        _apply_to_threads(lambda thread: os.setpriority(os.PRIO_PROCESS, thread, value))

    try:
        set_all(niceness)
    except PermissionError:
        problem = f"{niceness} is below the current {before}, which needs a privilege"
        fix = f"use {before} to 19, or start the runner with CAP_SYS_NICE"
        raise ConfigError("device.priority", problem, fix) from None
    scope.callback(_restore_priority, set_all, before)


def _restore_priority(set_all: Callable[[int], None], before: int) -> None:
    with suppress(PermissionError):  # lowering the niceness again needs a privilege
        set_all(before)


def busy_cores(seconds: float = 0.2) -> float:
    """Return the usable cores that others, not niced, keep busy for `seconds`; 0: unknown."""
    monitor = LoadMonitor(count_nice=False)
    sleep(seconds)
    return (monitor.other_cpu_share() or 0.0) * len(allowed_cores() or ())


def free_threads(requested: int, busy: float) -> int:
    """Return the number of threads for the free cores: at most `requested`, at least half of it.

    Operators wait for the slowest thread, one that shares its core with another process. At least
    half, since other processes come and go while a run keeps its threads.
    """
    cores = len(allowed_cores() or ()) or usable_cores()
    return max((requested + 1) // 2, min(requested, round(cores - busy)))


def _apply_to_threads(apply: Callable[[int], None]) -> None:
    """Call `apply` for every thread: Linux keeps affinity and niceness per thread."""
    folder = Path("/proc/self/task")
    for thread in [int(entry.name) for entry in folder.iterdir()] if folder.is_dir() else [0]:
        with suppress(ProcessLookupError):  # the thread has ended
            apply(thread)
