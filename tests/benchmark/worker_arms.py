"""Arms to start processes of, and whether a process is gone."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil

from runner import compose
from runner.benchmark.arms import Arm
from runner.benchmark.config import BenchmarkConfig

BASE = ["data=digits", "model=mlp", "device=cpu", "device.threads=1", "schedule.warmup=20"]
PARTS = "tests.benchmark.arm_parts"
OWN = ["device=cpu", "device.threads=1", f"security.trusted=[{PARTS}]"]
QUICK = BenchmarkConfig(warmup_steps=4)


def arm(name: str, *overrides: str) -> Arm:
    return Arm(name, compose([*overrides]), [], f"python -m runner optimization={name}", name)


def own(name: str, model: str, *overrides: str) -> Arm:
    return arm(name, *OWN, "data=cancer", f"model._target_={PARTS}.{model}", *overrides)


def is_gone(pid: int) -> bool:
    """Neither the process nor any of its group runs; one that was killed may take a moment."""
    family = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if process.pid == pid or os.getpgid(process.pid) == pid:
                family.append(process)
    return not any(map(_runs, psutil.wait_procs(family, timeout=20)[1]))


def _runs(process: psutil.Process) -> bool:
    """Who waits to be collected, which nobody does in some containers, does not."""
    with suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
