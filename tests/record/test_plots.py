from __future__ import annotations

import numpy as np
import pytest

from runner.record.plots import BLUE, RED, SIDE, confusion_matrix, image_grid


def has(picture: np.ndarray, colour: tuple[int, int, int]) -> bool:
    return bool((picture == np.array(colour, np.uint8)).all(2).any())


@pytest.mark.parametrize("classes", [2, 10, 24, 100])
@pytest.mark.parametrize("name", ["{}", "a class with a very long name {}", "größe {}", ""])
def test_any_number_of_classes_of_any_name_fits(classes: int, name: str) -> None:
    names = [name.format(i) for i in range(classes)]
    picture = confusion_matrix(np.eye(classes, dtype=np.int64) * 5, names)
    assert picture.shape[1] == SIDE and picture.shape[0] < 1.4 * SIDE
    assert has(picture, BLUE)  # the whole of a class in one cell


def test_a_class_without_samples_or_without_a_name_is_no_hindrance() -> None:
    assert not has(confusion_matrix(np.zeros((3, 3), np.int64), []), BLUE)


def test_of_many_classes_those_with_mistakes_are_drawn() -> None:
    counts = np.eye(60, dtype=np.int64) * 5
    quiet = confusion_matrix(counts, [str(i) for i in range(60)])
    counts[58] = 0
    counts[58, 59] = 5  # every one mistaken: a full cell off the diagonal
    assert not np.array_equal(quiet, confusion_matrix(counts, [str(i) for i in range(60)]))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("count", [1, 4, 12])
def test_only_what_was_mistaken_is_framed_in_red(channels: int, count: int) -> None:
    images = np.random.default_rng(0).normal(size=(count, channels, 8, 8))
    true = ["cat"] * count
    assert not has(image_grid(images, true, true), RED)
    assert has(image_grid(images, true, [*true[1:], "dog"]), RED)


def test_an_image_of_one_value_is_drawn_too() -> None:
    assert image_grid(np.ones((1, 1, 4, 4)), ["a"], ["a"]).shape[1] == SIDE
