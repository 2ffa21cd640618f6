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

from runner.data.config import DataConfig, Digits, Images, StdlibText
from runner.data.dataset import Dataset
from runner.data.embedded import digits
from runner.data.images import ImageFolder
from runner.data.loader import BatchLoader
from runner.data.stdlib import stdlib_text
from runner.errors import ConfigError, DataError

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


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_change_nothing_about_the_batches(
    source: Dataset, load: Load, same: Same, persistent: bool
) -> None:
    few = source.train[:30]  # several epochs
    alone = load(source, indices=few).batches(0)
    workers = config(workers=4, persistent_workers=persistent)
    together = load(source, workers, indices=few).batches(0)
    for _ in range(13):
        assert same(next(alone), next(together))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("start", [1, 4, 9])
def test_starting_at_a_step_is_skipping_up_to_it(
    source: Dataset, load: Load, same: Same, start: int, workers: int
) -> None:
    few = source.train[:30]
    skipped = islice(load(source, indices=few).batches(0), start, None)
    started = load(source, config(workers=workers), indices=few).batches(start)
    for _ in range(6):
        assert same(next(skipped), next(started))


def test_starting_anew_drops_what_workers_have_in_hand(load: Load, same: Same) -> None:
    source = digits(Digits())
    loader = load(source, config(workers=2, prefetch=3))
    first = next(loader.batches(0))
    assert same(next(loader.batches(100)), next(load(source).batches(100)))
    assert same(next(loader.batches(0)), first)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_global_generators_are_left_alone(load: Load, workers: int) -> None:
    import random

    loader = load(digits(Digits()), config(workers=workers))
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    next(loader.batches(0))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


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


def test_drop_last_leaves_the_ragged_end_out(load: Load) -> None:
    loader = load(digits(Digits()), config(drop_last=True), batch_size=100)
    assert loader.steps_per_epoch == 14
    assert {len(y) for _, y in islice(loader.batches(0), 28)} == {100}
    assert loader.samples(13) == 100


def test_an_epoch_without_batches_is_refused(load: Load) -> None:
    source = digits(Digits())
    with pytest.raises(ConfigError, match=r"training.batch_size.*data.drop_last"):
        load(source, config(drop_last=True), batch_size=5000)
    with pytest.raises(DataError, match="training set is empty"):
        load(source, indices=source.train[:0])


def test_without_shuffling_every_epoch_is_in_order(load: Load) -> None:
    source = digits(Digits())
    loader = load(source, shuffle=False, indices=source.train[:16])
    expected = source.fetch(source.train[:16], None)[1]
    labels = torch.cat([y for _, y in islice(loader.batches(0), 4)])
    assert torch.equal(labels, expected.repeat(2))


def test_seeds_order_differently(load: Load, same: Same) -> None:
    source = digits(Digits())
    assert not same(next(load(source, seed=0).batches(0)), next(load(source, seed=1).batches(0)))


def test_augmentation_is_another_one_each_epoch_and_can_be_off(tmp_path: Path, load: Load) -> None:
    source = pictures(tmp_path)
    plain = {"shuffle": False, "batch_size": len(source.train)}
    epochs = [x for x, _ in islice(load(source, **plain).batches(0), 2)]
    assert not torch.equal(*epochs)
    fixed = [x for x, _ in islice(load(source, augment=False, **plain).batches(0), 2)]
    assert torch.equal(*fixed)


def test_placements_see_every_batch(load: Load) -> None:
    loader = load(digits(Digits()), placements=(lambda batch: (batch[0] * 2, batch[1]),))
    assert float(next(loader.batches(0))[0].max()) == 2.0


def test_every_automatic_choice_has_its_reason(load: Load, tmp_path: Path) -> None:
    chosen = {c.key: c for c in load(digits(Digits()), config(workers=None)).choices}
    assert (chosen["data.workers"].value, chosen["data.pin_memory"].value) == (0, False)
    assert "in memory" in chosen["data.workers"].reason
    decoding = {c.key: c for c in load(pictures(tmp_path), config(workers=None)).choices}
    assert decoding["data.workers"].value > 0
    assert decoding["data.prefetch"].value == 2


def test_what_was_asked_for_and_cannot_be_is_said(load: Load) -> None:
    asked = config(workers=0, pin_memory=True, persistent_workers=True, prefetch=4)
    chosen = {c.key: c.value for c in load(digits(Digits()), asked).choices}
    assert chosen == {
        "data.pin_memory": False, "data.persistent_workers": False, "data.prefetch": 0,
    }  # fmt: skip


def test_what_was_asked_for_and_honoured_is_no_choice(load: Load) -> None:
    asked = config(workers=2, pin_memory=False, persistent_workers=True, prefetch=4)
    assert load(digits(Digits()), asked).choices == []


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_on_a_gpu_are_those_of_the_cpu(workers: int, same: Same) -> None:
    from types import SimpleNamespace

    from runner.data.loader import make_loader

    source = digits(Digits())
    cpu, cuda = (
        make_loader(
            source, source.train, batch_size=32, seed=0, config=config(workers=workers),
            device=SimpleNamespace(torch=torch.device(kind)), shuffle=True, repeat=True,
            augment=True,
        )
        for kind in ("cpu", "cuda")
    )  # fmt: skip
    try:
        for here, there in islice(zip(cpu.batches(0), cuda.batches(0), strict=True), 50):
            assert there[0].device.type == "cuda"
            assert same(here, tuple(x.cpu() for x in there))
    finally:
        cpu.close()
        cuda.close()
