"""What all tests share: `gpu` marks skip where there is no such device; user code is importable."""

from __future__ import annotations

import gc
import logging
import mmap
import os
import signal
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from tests import composed, cpu_times, shared_sandbox, warm_workers

TESTS = Path(__file__).parent
LONG_TESTS = TESTS / "long_tests.txt"  # by scripts/long_tests.py
LONGEST = (
    *("core/techniques/test_whole_step.py", "datasets/test_predict.py"),
    *("blackbox/test_runs.py", "core/train/test_resume.py"),
    *("measure/parity/test_mutants.py", "core/hooks/test_resources.py"),
    *("measure/benchmark/test_job.py", "core/data/test_foreign_files.py"),
    *("datasets/test_export.py", "measure/benchmark/test_worker_ends.py"),
    *("blackbox/test_sweeps.py", "test_packaging.py", "diagnose/debug/test_memory.py"),
    *("blackbox/test_ranks.py", "core/techniques/test_compile.py"),
    *("diagnose/replay/test_seeded_faults.py", "measure/parity/test_parity.py"),
)


def pytest_configure(config: pytest.Config) -> None:
    if cpu_times.VARIABLE in os.environ:
        config.pluginmanager.register(cpu_times)
    # a shell's background job ignores Ctrl-C, and one under nohup SIGHUP, which tests send
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    composed.install()
    shared_sandbox.install()
    warm_workers.install()


@pytest.hookimpl(tryfirst=True)  # before those marked `slow` are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that no process is left alone with one at the end."""
    long_tests = {*LONG_TESTS.read_text().splitlines()}
    for item in items:
        if item.nodeid in long_tests:
            item.add_marker("slow")
    order = {TESTS / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


def pytest_collection_finish() -> None:
    """What is imported by now is looked at by no garbage collection of a test."""
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    # a handler that an earlier test left or put back would print each line twice
    if console := sys.modules.get("runner.core.record.console"):
        console.close_logging()
    for handler in list(logging.root.handlers):  # of a copy of that module that a test imported
        if type(handler).__module__.startswith("runner."):
            logging.root.removeHandler(handler)
    if item.get_closest_marker("gpu") is None:
        return
    import torch  # only now: most sessions of a few tests never need it

    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """What a test printed may hold bytes that are no text, which no process could be sent."""
    return _sendable((yield))


def _sendable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_sendable(key): _sendable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_sendable, value))
    return value


@pytest.fixture
def mapped() -> Callable[[int], mmap.mmap]:
    """Makes memory that cannot lie in holes that other tests left in this process's heap."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        pytest.skip("Windows has no private mapping")

    def made(size: int) -> mmap.mmap:
        block = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block.write(b"x" * size)
        return block

    return made


@pytest.fixture
def my_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own code (`tests/my_package.py`) can be imported."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
