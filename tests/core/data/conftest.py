"""What the tests of the data have in common: a CPU, a loader over it, and how batches compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from runner.core.data.dataset import Dataset
from runner.core.data.loader import BatchLoader, make_loader
from runner.core.interfaces.nested import tensors
from runner.core.schemas.data import DataConfig


@pytest.fixture
def same() -> Callable[[Any, Any], bool]:
    """Whether two nests of tensors are equal bit for bit."""

    def compare(a: Any, b: Any) -> bool:
        pairs = list(zip(tensors(a), tensors(b), strict=True))
        return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)

    return compare


@pytest.fixture
def load() -> Iterator[Callable[..., BatchLoader]]:
    """A loader of the training part, closed when the test ends."""
    made: list[BatchLoader] = []

    def make(source: Dataset, config: DataConfig | None = None, **changes: Any) -> BatchLoader:
        options: dict[str, Any] = {
            "device": torch.device("cpu"), "batch_size": 8, "seed": 3, "shuffle": True,
            "repeat": True, "augment": True,
        } | changes  # fmt: skip
        config = config or DataConfig(kind="any", workers=0)
        indices = options.pop("indices", source.train)
        loader = make_loader(source, indices, config=config, **options)
        made.append(loader)
        return loader

    yield make
    for loader in made:
        loader.close()
