"""Denormals are zero in each thread that computes, and are themselves again afterwards."""

from __future__ import annotations

import sys
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from runner.device import denormals

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="OpenMP's threads are found there")


@pytest.fixture(autouse=True)
def two_threads() -> None:
    torch.set_num_threads(2)


def product() -> torch.Tensor:
    """Of matrices, whose every element is a denormal; another library's threads make it."""
    return torch.full((512, 512), 1e-20) @ torch.full((512, 512), 1e-22)


def test_denormals_are_zero_in_every_thread_until_the_scope_ends() -> None:
    assert not denormals.flushed()
    with ExitStack() as scope:
        assert denormals.flush(scope) is None
        assert denormals.flushed()
        assert not product().count_nonzero()
    assert not denormals.flushed()
    assert product().count_nonzero() == 512 * 512


def test_torchs_own_switch_turns_one_thread_alone_which_is_seen() -> None:
    denormals.flushed()  # the threads are there
    try:
        torch.set_flush_denormal(True)
        assert not denormals.flushed()
    finally:
        torch.set_flush_denormal(False)


def test_threads_that_come_later_do_as_the_others() -> None:
    with ExitStack() as scope:
        denormals.flush(scope)
        torch.set_num_threads(3)
        scope.callback(torch.set_num_threads, 2)
        assert denormals.flushed()


def test_a_backward_pass_counts_them_as_zero_too() -> None:
    weight = torch.full((1 << 20,), 0.5, requires_grad=True)
    with ExitStack() as scope:
        denormals.flush(scope)
        (weight * torch.finfo(torch.float32).tiny).mul(0.5).sum().backward()
        assert not weight.grad.count_nonzero()


def test_numpy_does_not_complain_about_the_switch() -> None:
    with ExitStack() as scope:
        denormals.flush(scope)
        for kind in (np.float32, np.float64):
            assert "finfo" in repr(np.finfo(kind))
            assert np.finfo(kind).eps > 0
