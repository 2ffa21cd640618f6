"""The loader: the same batches whatever fetches them, from any step on."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from runner.core.data.dataset import Dataset
from runner.core.data.embedded import digits
from runner.core.data.loader import BatchLoader
from runner.core.errors import ConfigError, DataError
from runner.core.schemas.data import DataConfig, Digits, Images, StdlibText
from runner.datasets.images import ImageFolder
from runner.datasets.text import stdlib_text

Load = Callable[..., BatchLoader]
Same = Callable[[Any, Any], bool]


def pictures(folder: Path) -> Dataset:
    rng = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (folder / label).mkdir()
        for number in range(9):
            pixels = rng.integers(0, 256, (20, 26, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{number}.png")
    return ImageFolder(Images(path=str(folder), image_size=8, augment=True))


@pytest.fixture(params=["digits", "stdlib_text", "images"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Dataset:
    if request.param == "digits":
        return digits(Digits())
    return stdlib_text(StdlibText()) if request.param == "stdlib_text" else pictures(tmp_path)


def config(**changes: Any) -> DataConfig:
    return DataConfig(kind="any", **{"workers": 0, **changes})


def test_workers_change_nothing_about_the_batches(source: Dataset, load: Load, same: Same) -> None:
    few = source.train[:30]  # several epochs
    alone = load(source, indices=few).batches(0)
    workers = config(workers=4, persistent_workers=source.in_memory)
    together = load(source, workers, indices=few).batches(0)
    for _ in range(13):
        assert same(next(alone), next(together))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("start", [1, 9])
def test_starting_at_a_step_is_skipping_up_to_it(
    source: Dataset, load: Load, same: Same, start: int, workers: int
) -> None:
    few = source.train[:30]
    skipped = islice(load(source, indices=few).batches(0), start, None)
    loader = load(source, config(workers=workers), indices=few)
    next(loader.batches(0))  # and what workers fetched for that is dropped
    started = loader.batches(start)
    for _ in range(6):
        assert same(next(skipped), next(started))
    other = load(source, indices=few, seed=1)
    assert not same(next(other.batches(0)), next(loader.batches(0)))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_single_pass_holds_each_sample_once_in_order(load: Load, workers: int) -> None:
    source = digits(Digits())
    once = {"repeat": False, "shuffle": False, "augment": False, "indices": source.validation}
    loader = load(source, config(workers=workers, drop_last=True), batch_size=100, **once)
    for _ in range(2):  # and again, as each validation does
        batches = list(loader.batches(0))
        assert [len(y) for _, y in batches] == [100, 100, 100, 59]
        whole = source.fetch(source.validation, None)[1]
        assert torch.equal(torch.cat([y for _, y in batches]), whole)
    assert [loader.samples(step) for step in range(4)] == [100, 100, 100, 59]


def test_an_epoch_holds_each_sample_once_and_keeps_its_ragged_end(load: Load) -> None:
    source = digits(Digits())
    loader = load(source, batch_size=100)
    assert loader.steps_per_epoch == 15
    sizes = [len(y) for _, y in islice(loader.batches(0), 30)]
    assert sizes == ([100] * 14 + [38]) * 2
    assert sizes == [loader.samples(step) for step in range(30)]
    whole = load(digits(Digits()), config(drop_last=True), batch_size=100)
    assert {len(y) for _, y in islice(whole.batches(0), 28)} == {100}


def test_an_epoch_without_batches_is_refused(load: Load) -> None:
    source = digits(Digits())
    with pytest.raises(ConfigError, match=r"training.batch_size.*data.drop_last"):
        load(source, config(drop_last=True), batch_size=5000)
    with pytest.raises(DataError, match="training set is empty"):
        load(source, indices=source.train[:0])


def test_the_choice_of_workers_has_its_reason(load: Load, tmp_path: Path) -> None:
    (chosen,) = load(digits(Digits()), config(workers=None)).choices
    assert (chosen.key, chosen.value) == ("data.workers", 0)
    assert "in memory" in chosen.reason
    decoding = {c.key: c.value for c in load(pictures(tmp_path), config(workers=None)).choices}
    assert decoding["data.workers"] > 0


def test_a_request_that_cannot_be_met_is_reported(load: Load) -> None:
    asked = config(workers=0, pin_memory=True, persistent_workers=True, prefetch=4)
    chosen = {c.key: c.value for c in load(digits(Digits()), asked).choices}
    keys = ("pin_memory", "persistent_workers", "prefetch")
    assert chosen == {f"data.{key}": False for key in keys}
    honoured = config(workers=2, pin_memory=False, persistent_workers=True, prefetch=4)
    assert load(digits(Digits()), honoured).choices == []


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_on_a_gpu_are_those_of_the_cpu(workers: int, load: Load, same: Same) -> None:
    source = digits(Digits())
    cpu, cuda = (
        load(source, config(workers=workers), device=torch.device(kind)).batches(0)
        for kind in ("cpu", "cuda")
    )
    for here, there in islice(zip(cpu, cuda, strict=True), 50):
        assert there[0].device.type == "cuda"
        assert same(here, tuple(x.cpu() for x in there))
