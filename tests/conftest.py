"""What all tests share: `gpu` marks skip where there is no such device; user code is importable."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch  # only now: most sessions of a few tests never need it

    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")


@pytest.fixture
def my_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own code (`tests/my_package.py`) can be imported."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
