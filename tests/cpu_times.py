"""Writes the CPU seconds of each test, its processes' included, into the file $TEST_CPU_TIMES."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import psutil
import pytest

VARIABLE = "TEST_CPU_TIMES"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    before = _cpu_seconds()
    result = yield
    with open(os.environ[VARIABLE], "a") as file:  # one write a line, by each of the workers
        file.write(f"{_cpu_seconds() - before:.3f} {item.nodeid}\n")
    return result


def _cpu_seconds() -> float:
    """Of this process, its descendants, and those of them that have ended."""
    total, this = 0.0, psutil.Process()
    for process in (this, *this.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.Error:  # it has ended
            continue
    return total
