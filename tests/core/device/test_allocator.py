"""Freed memory that stays in the process, and denormals that are zero in each of its threads."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from runner.core.device import allocator
from runner.core.techniques import system

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
linux = pytest.mark.skipif(sys.platform != "linux", reason="OpenMP's threads are found there")
PAGES = 40 << 20  # bytes: more than glibc keeps by itself


def faults() -> int:
    """Page faults of 40 MiB that are allocated and freed again and again; holes settle at first."""
    for _ in range(20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(PAGES, dtype=torch.uint8)
        torch.ones(PAGES, dtype=torch.uint8)
        count = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return count


CODE = """
from contextlib import ExitStack
import torch
from tests.core.device.test_allocator import faults
from runner.core.device import allocator, memory
before = faults()
with ExitStack() as scope:
    assert allocator.keep_freed_memory(scope) is None
    kept = faults()
    torch.ones(200 << 20, dtype=torch.uint8)
    held = memory.process_bytes()
print(before, kept, held - memory.process_bytes())
"""


@pytest.mark.slow
@glibc
def test_memory_that_is_kept_is_not_faulted_in_again_and_given_back_at_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    before, kept, given_back = map(int, done.stdout.split())
    assert before > 1000
    assert kept < 100
    assert given_back > 150 << 20


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


def product() -> torch.Tensor:
    """Of matrices, whose every element is a denormal; another library's threads make it."""
    return torch.full((512, 512), 1e-20) @ torch.full((512, 512), 1e-22)


@linux
def test_denormals_are_zero_in_every_thread_until_the_scope_ends() -> None:
    torch.set_num_threads(2)
    assert not system.denormals_flushed()
    weight = torch.full((1 << 20,), 0.5, requires_grad=True)
    with ExitStack() as scope:
        assert system.flush_denormals(scope) is None
        assert system.denormals_flushed()
        assert not product().count_nonzero()
        (weight * torch.finfo(torch.float32).tiny).mul(0.5).sum().backward()
        assert not weight.grad.count_nonzero()
        assert np.finfo(np.float32).eps > 0  # without a warning of numpy's
        torch.set_num_threads(3)
        scope.callback(torch.set_num_threads, 2)
        assert system.denormals_flushed()  # threads that come later do as the others
    assert not system.denormals_flushed()
    assert product().count_nonzero() == 512 * 512
