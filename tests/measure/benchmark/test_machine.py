"""The load of the machine during a turn: others' work apart from ours."""

import os
import subprocess
import sys
from time import perf_counter

import psutil
import pytest

from runner.core.device.load import LoadMonitor

BURN = "print(flush=True)\nwhile True: pass"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_the_work_of_others_counts_and_that_of_the_arm_does_not() -> None:
    """Both monitors watch the same time, so the rest of the machine's load is in both."""
    command = [sys.executable, "-c", BURN]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        arm, other = (psutil.Process(process.pid) for process in processes)
        for one in (arm, other):  # their times stand still while both monitors read them
            one.suspend()
        start, own, blind = perf_counter(), LoadMonitor(arm.pid), LoadMonitor(other.pid)
        delay = perf_counter() - start
        before = [sum(one.cpu_times()[:2]) for one in (arm, other)]
        for one in (arm, other):
            one.resume()
        while perf_counter() < start + 0.8:  # ours in both
            pass
        for one in (arm, other):
            one.suspend()
        end = perf_counter()
        load, unaware = own.other_cpu_share(), blind.other_cpu_share()
        delay += perf_counter() - end  # in which only one of the monitors saw the machine
        seconds = perf_counter() - start  # beside busy neighbours more than 0.8
        its, others = (
            sum(x.cpu_times()[:2]) - b for x, b in zip((arm, other), before, strict=True)
        )
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert load is not None and unaware is not None
    capacity = seconds * len(os.sched_getaffinity(0))
    tolerance = 0.05 + 2 * delay / seconds
    assert unaware - load == pytest.approx((its - others) / capacity, abs=tolerance)
    assert load >= others / capacity - tolerance
    assert LoadMonitor(arm.pid).other_cpu_share() is None  # it is gone
