"""A small model, batches it can learn, and the process as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from runner import compose
from runner.core.data.open import open_data


def small(width: int = 32) -> nn.Module:
    """The same weights every time; with buffers that a forward changes.

    No bias ahead of BatchNorm: its gradient is rounding noise, which Adam would blow up.
    """
    torch.manual_seed(0)
    first = nn.Linear(64, width, bias=False)
    norm = nn.BatchNorm1d(width)
    return nn.Sequential(nn.Flatten(), first, norm, nn.ReLU(), nn.Linear(width, 10))


@pytest.fixture
def net() -> nn.Module:
    return small()


@pytest.fixture
def twin() -> nn.Module:
    """Another one with the same weights."""
    return small()


@pytest.fixture(scope="session")
def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The training and the validation part of the handwritten digits."""
    source = open_data(compose(["data=digits"]).data, None)
    return source.fetch(source.train, None), source.fetch(source.validation, None)


@pytest.fixture(scope="session")
def batches(digits: tuple[tuple[Tensor, Tensor], ...]) -> list[tuple[Tensor, Tensor]]:
    x, y = digits[0]
    return [(x[i : i + 32], y[i : i + 32]) for i in range(0, 32 * 40, 32)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums come out the same; what a test leaves behind shows."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)
