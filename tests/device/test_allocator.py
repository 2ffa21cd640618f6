"""Memory that is freed stays in the process, where nobody else has a say in that."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
from contextlib import ExitStack

import pytest
import torch

from runner.device import allocator

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
PAGES = 40 << 20  # bytes: more than glibc keeps by itself


def faults() -> int:
    """Page faults of 40 MiB that are allocated and freed again and again; holes settle at first."""
    for _ in range(20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(PAGES, dtype=torch.uint8)
        torch.ones(PAGES, dtype=torch.uint8)
        found = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return found


@glibc
def test_memory_that_is_kept_is_not_faulted_in_again() -> None:
    code = (
        "from contextlib import ExitStack\n"
        "from tests.device.test_allocator import faults\n"
        "from runner.device import allocator\n"
        "before = faults()\n"
        "with ExitStack() as scope:\n"
        "    assert allocator.keep_freed_memory(scope) is None\n"
        "    print(before, faults())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, kept = map(int, done.stdout.split())
    assert before > 1000
    assert kept < 100


@glibc
def test_what_was_kept_is_given_back_at_the_end() -> None:
    code = (
        "from contextlib import ExitStack\n"
        "import torch\n"
        "from runner.device import allocator, memory\n"
        "with ExitStack() as scope:\n"
        "    allocator.keep_freed_memory(scope)\n"
        "    torch.ones(200 << 20, dtype=torch.uint8)\n"
        "    held = memory.process_bytes()\n"
        "print(held - memory.process_bytes())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 150 << 20


@glibc
@pytest.mark.parametrize(
    ("key", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "1000"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")],
)
def test_the_environments_own_settings_win(
    monkeypatch: pytest.MonkeyPatch, key: str, value: str
) -> None:
    monkeypatch.setenv(key, value)
    with ExitStack() as scope:
        why = allocator.keep_freed_memory(scope)
    assert why is not None
    assert "environment" in why


def test_the_libraries_of_the_process_are_found() -> None:
    if sys.platform == "linux":
        assert any("libtorch" in path for path in allocator.libraries())
    assert allocator.name()
