"""Tests marked `gpu` are skipped, with the reason, where torch sees no CUDA device."""

from __future__ import annotations

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch  # only now: most sessions of a few tests never need it

    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
