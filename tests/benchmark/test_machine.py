"""What the machine does during a turn: others' work is told from ours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import psutil
import pytest

from runner.benchmark.machine import LoadMonitor

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
BURN = "print(flush=True)\nwhile True: pass"


@contextmanager
def burning() -> Iterator[int]:
    """A process that takes one core, already at it."""
    process = subprocess.Popen([sys.executable, "-c", BURN], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield process.pid
    finally:
        process.kill()
        process.communicate()


@linux
def test_what_others_do_counts_and_what_the_arm_does_not() -> None:
    """Both are told of the same second, so whatever else the machine does is in both."""
    with burning() as arm, burning() as other:
        start, own, blind = perf_counter(), LoadMonitor(arm), LoadMonitor(other)
        before = sum(psutil.Process(arm).cpu_times()[:2])
        beside = sum(psutil.Process(other).cpu_times()[:2])
        while perf_counter() < start + 0.8:  # ours in both
            pass
        load, unaware = own.others(), blind.others()
        seconds = perf_counter() - start  # beside busy neighbours more than 0.8
        its = sum(psutil.Process(arm).cpu_times()[:2]) - before
        others = sum(psutil.Process(other).cpu_times()[:2]) - beside
    assert load is not None and unaware is not None
    capacity = seconds * len(os.sched_getaffinity(0))
    assert unaware - load == pytest.approx((its - others) / capacity, abs=0.05)
    assert load >= others / capacity - 0.05


def test_an_arm_that_is_gone_has_an_unknown_load() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert LoadMonitor(process.pid).others() is None
