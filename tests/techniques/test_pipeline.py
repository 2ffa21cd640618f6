"""The pipeline: workers where they pay, chosen from measured times; the batches stay the same."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from runner import build, compose, train
from runner.data.batch import Batch
from runner.techniques.base import TechniqueStatus
from runner.training.run import Run

PIPELINE = [
    "monitoring.progress=false",
    "optimization=custom",
    "optimization.pipeline.enabled=true",
    "training.batch_size=16",
    "training.steps=6",
    "device.threads=1",
]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Images that take some milliseconds a batch to decode."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (folder / label).mkdir()
        for number in range(40):
            pixels = rng.integers(0, 256, (160, 200, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{number}.png")
    yield str(folder)
    shutil.rmtree(folder)


def images(folder: str, *more: str) -> list[str]:
    return [
        *PIPELINE,
        "device=cpu",
        "data=images",
        f"data.path={folder}",
        "data.image_size=16",
        "data.augment=true",
        "model=cnn",
        "model.width=8",
        *more,
    ]


def row(run: Run) -> TechniqueStatus:
    return next(row for row in train(run).techniques if row.name == "pipeline")


def some(run: Run, count: int = 12) -> list[Batch]:
    batches = list(islice(run.train.batches(0), count))
    run.train.close()
    return batches


def test_workers_are_chosen_from_what_was_measured(pictures: str) -> None:
    with build(compose(images(pictures, "optimization.pipeline.budget_s=3"))) as run:
        choice = next(c for c in run.choices if c.key == "data.workers")
        found = row(run)
    assert found.engaged is (choice.value > 0)  # on a busy machine none may pay
    assert found.evidence["workers"] == choice.value
    assert "ms with 0" in choice.reason
    rates = found.evidence["batches_per_second"]
    assert 0 in rates
    assert choice.value in rates
    assert all(rate > 0 for rate in rates.values())
    assert 0 <= found.evidence["wait_share"] <= 1


def test_data_in_memory_needs_no_worker_and_says_so() -> None:
    with build(compose([*PIPELINE, "device=cpu"])) as run:
        found = row(run)
    assert not found.engaged
    assert "in memory" in found.reason


def test_workers_that_are_named_stay(pictures: str) -> None:
    with build(compose(images(pictures, "data.workers=1"))) as run:
        found = row(run)
        assert run.settings["data.workers"] == 1
    assert not found.engaged
    assert "data.workers=1 decides" in found.reason


def test_a_resumed_run_keeps_the_workers_it_had(pictures: str, tmp_path: Path) -> None:
    with build(compose(images(pictures)), tmp_path) as run:
        train(run)
        chosen = next(c.value for c in run.choices if c.key == "data.workers")
    again = images(pictures, "checkpoint.resume=auto", "training.steps=8")
    with build(compose(again), tmp_path) as run:
        choice = next(c for c in run.choices if c.key == "data.workers")
    assert choice.value == chosen
    assert choice.reason == "as before the run was resumed"


@pytest.mark.gpu
def test_batches_copied_aside_are_those_copied_in_line() -> None:
    cuda = [*PIPELINE, "device=cuda", "data=synthetic", "data.samples=256"]
    with build(compose(cuda)) as run:
        found = row(run)
        aside = some(run, 40)
    assert found.engaged
    with build(compose([*cuda, "data.device_prefetch=false"])) as run:
        in_line = some(run, 40)
    torch.cuda.synchronize()
    for (x, y), (a, b) in zip(aside, in_line, strict=True):
        assert x.is_cuda
        assert torch.equal(x, a)
        assert torch.equal(y, b)
