"""Augmented, blended and cached images: pure functions of seed, epoch and index."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from runner import train
from runner.core.data.order import sample_seeds
from runner.core.errors import ConfigError
from runner.core.objectives.classification import ClassificationObjective
from runner.datasets.images import OPERATIONS, ImageCache, ImageFolder, blend, rand_augment
from tests import runs

TYPED = ("data=images", "model=cnn", "data.image_size=16", "model.width=4", "model.stages=1")
SHORT = ("training.batch_size=6", "training.steps=7", "optimization=none", "checkpoint.every=3")
SHORT += ("checkpoint.keep=9",)
EVERYTHING = ("data.augment=true", "data.randaugment=2", "data.mixup=0.4", "data.cutmix=1.0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of noise of different sizes, a hidden folder and an empty one."""
    root, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for name in ("cat", "dog", ".hidden", "empty"):
        (root / name).mkdir()
    for number in range(24):
        shape = (20 + number, 44 - number, 3)
        pixels = draw.integers(0, 256, shape, np.uint8) // (1 + number % 2)
        Image.fromarray(pixels).save(root / ("cat", "dog")[number % 2] / f"{number:02}.png")
    return root


def opened(folder: Path, *overrides: str) -> Any:
    config: Any = runs.config(*TYPED, f"data.path={folder}", *overrides).data
    return ImageFolder(config)


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_file_that_is_no_image_leaves_the_others_cached(folder: Path, tmp_path: Path) -> None:
    root = shutil.copytree(folder, tmp_path / "images")
    (root / "cat" / "00.png").write_bytes(b"no image")
    data = opened(root, "data.augment=true", "data.bad_samples=drop", "data.cache_mb=64")
    assert data.cache.capacity == len(data.sources) == 23  # without the bad one


@pytest.mark.parametrize("more", [(), EVERYTHING[:1], EVERYTHING[:2], EVERYTHING[1:2], EVERYTHING])
def test_a_sample_is_the_same_in_any_batch_and_cache(folder: Path, more: tuple[str, ...]) -> None:
    indices = np.arange(24)
    seeds = sample_seeds(3, 1, indices)
    plain, cached = (opened(folder, *more, f"data.cache_mb={mb}") for mb in (0, 64))
    first = plain.fetch(indices, seeds)
    assert plain.cache.capacity == 0 and cached.cache.capacity == 24
    for _ in range(2):  # decoded, then out of memory
        assert same(cached.fetch(indices, seeds), first)
    turned = cached.fetch(indices[::-1].copy(), seeds[::-1].copy())
    assert same([part.flip(0) for part in turned], first)
    others = plain.fetch(indices, sample_seeds(3, 2, indices))
    assert torch.equal(others[0], first[0]) != bool(more)  # another epoch draws others
    # held-out samples are as they are
    assert same(cached.fetch(indices, None), opened(folder, "data.cache_mb=0").fetch(indices, None))


def test_processes_share_what_one_of_them_has_decoded_and_half_of_an_image_is_none() -> None:
    cache = ImageCache(np.array([12, 12, 12]), 3, 100)
    assert cache.capacity == 2 and cache.get(0) is None
    pixels = np.arange(36, dtype=np.uint8).reshape(3, 4, 3)
    child = multiprocessing.get_context("fork").Process(target=cache.store, args=(1, pixels))
    child.start()
    child.join()
    found = cache.get(1)
    assert found is not None and np.array_equal(found, pixels)
    cache.store(2, pixels)  # has no room
    cache.store(0, np.zeros((9, 9, 3), np.uint8))  # nor has this
    assert cache.get(2) is None and cache.get(0) is None
    cache.pixels[44:52] = 0  # as where a process died before it wrote the size
    assert cache.get(1) is None


class Watched(np.ndarray):
    """An array that notes where it is written to."""

    starts: list[int | None]

    def __setitem__(self, place: slice, value: object) -> None:
        self.starts.append(place.start)
        super().__setitem__(place, value)


def test_the_size_of_a_cached_image_is_written_after_its_pixels() -> None:
    cache, starts = ImageCache(np.array([12, 12]), 3, 100), list[int | None]()
    cache.pixels = cache.pixels.view(Watched)
    Watched.starts = starts
    cache.store(1, np.ones((3, 4, 3), np.uint8))
    assert starts == [None, int(cache.starts[1])]  # pixels, in a view of their own; then the header


def test_each_operation_changes_an_image_at_full_strength_and_both_modes_take_it() -> None:
    draw = np.random.default_rng(0)
    pixels = draw.integers(40, 200, (24, 20, 3), np.uint8)
    for mode in ("RGB", "L"):
        image = Image.fromarray(pixels).convert(mode)
        for name in OPERATIONS:
            changed = OPERATIONS[name](image, 1.0, -1.0)
            assert (changed.mode, changed.size) == (image.mode, image.size), name
            grey = name == "color" and mode == "L"
            assert (changed.tobytes() == image.tobytes()) == (name == "identity" or grey), name
    again = [rand_augment(image, np.random.default_rng(5), 3, 9.0).tobytes() for _ in range(2)]
    assert again[0] == again[1]


def test_shares_are_those_of_the_pixels() -> None:
    ones, zeros = np.full((16, 12, 3), 255, np.uint8), np.zeros((16, 12, 3), np.uint8)
    for seed in range(20):
        for mixup, cutmix in ((0.4, 0.0), (0.0, 1.0), (0.4, 1.0)):
            draw = np.random.default_rng(seed)
            mixed, share = blend(ones, zeros, draw, mixup, cutmix)
            assert 0 <= share <= 1 and mixed.mean() / 255 == pytest.approx(share, abs=1e-6)
            if not mixup:
                assert set(np.unique(mixed)) <= {0.0, 255.0}


def test_the_loss_of_shares_is_the_mixture_of_the_losses_of_both_classes() -> None:
    torch.manual_seed(0)
    logits, share = torch.randn(6, 3), torch.rand(6)
    one, other = torch.randint(0, 3, (2, 6))
    hot = torch.nn.functional.one_hot
    target = share[:, None] * hot(one, 3) + (1 - share[:, None]) * hot(other, 3)
    for weights in (None, torch.tensor([0.5, 1.0, 4.0])):
        loss = ClassificationObjective(3, class_weights=weights)
        each = torch.nn.functional.cross_entropy
        own = torch.ones(3) if weights is None else weights
        terms = share * own[one] * each(logits, one, reduction="none")
        terms += (1 - share) * own[other] * each(logits, other, reduction="none")
        expected = terms.sum() / (share * own[one] + (1 - share) * own[other]).sum()
        torch.testing.assert_close(loss(logits, target), expected)
        # micro-batches weigh as much as they have
        parts = [(logits[p], target[p]) for p in (slice(0, 2), slice(2, 6))]
        summed = sum(loss(*part) * loss.weight(part[1]) for part in parts)
        torch.testing.assert_close(summed / loss.weight(target), expected)


def test_all_of_it_has_the_same_bits_with_workers_and_resumed(folder: Path, tmp_path: Path) -> None:
    typed = [*TYPED, *SHORT, *EVERYTHING, f"data.path={folder}", "device.threads=1"]
    ends = {}
    for name, *more in (
        ("whole", "data.workers=0"),
        ("workers", "data.workers=2", "data.cache_mb=0"),
        ("resumed", "data.workers=0", "checkpoint.resume=auto"),
    ):
        if name == "resumed":
            step = next((tmp_path / "whole/checkpoints").glob("step_*3"))
            shutil.copytree(step, tmp_path / name / "checkpoints" / step.name)
        with runs.opened(*typed, *more, folder=tmp_path / name) as run:
            assert run.progress.step == 3 * (name == "resumed")
            train(run)
            ends[name] = runs.weights(run)
    assert not runs.differences(ends["whole"], ends["workers"])
    assert not runs.differences(ends["whole"], ends["resumed"])


def test_a_loss_that_takes_one_class_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.mixup: .*focal takes one class"):
        runs.config(*TYPED, f"data.path={folder}", "data.mixup=0.2", "objective.loss=focal")
