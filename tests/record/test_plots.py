"""Pictures: their width, what stands out in them, and names of any kind."""

from __future__ import annotations

import math

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from runner.record import plots
from runner.record.plots import BLUE, GREEN, ORANGE, RED, SIDE, confusion_matrix, image_grid


def has(picture: np.ndarray, colour: str) -> bool:
    pixel = np.array([round(255 * part) for part in to_rgb(colour)], np.uint8)
    return bool((picture == pixel).all(2).any())


@pytest.mark.parametrize("classes", [2, 100])
@pytest.mark.parametrize("name", ["a class with a very long name {}", "größe $x^ {}", ""])
def test_any_number_of_classes_of_any_name_fits(classes: int, name: str) -> None:
    names = [name.format(i) for i in range(classes)]
    picture = confusion_matrix(np.eye(classes, dtype=np.int64) * 5, names)
    assert picture.shape == (SIDE, SIDE, 3) and picture.dtype == np.uint8
    assert has(picture, BLUE)  # the whole of a class in one cell


def test_a_class_without_samples_or_without_a_name_is_no_hindrance() -> None:
    assert not has(confusion_matrix(np.zeros((3, 3), np.int64), []), BLUE)


@pytest.mark.parametrize(("channels", "count"), [(1, 1), (3, 12)])
def test_only_what_was_mistaken_is_framed_in_red(channels: int, count: int) -> None:
    images = np.random.default_rng(0).normal(size=(count, channels, 8, 8))
    true = ["cat"] * count
    right = image_grid(images, true, true)
    assert right.shape[1] == SIDE and not has(right, RED)
    assert has(image_grid(images, true, [*true[1:], "dog"]), RED)


def test_faults_have_the_colour_of_their_severity() -> None:
    kinds = {"spike": "warning", "non_finite": "error"}
    lanes = {"spike": {3, 9}, "non_finite": {5}}
    for picture in (
        plots.fault_timeline(lanes, {"spike": 50, "non_finite": 1}, kinds, 100),
        plots.fault_counts({"spike": 50, "non_finite": 1}, kinds, 100),
    ):
        assert has(picture, ORANGE) and has(picture, RED) and not has(picture, BLUE)


def test_layers_of_any_number_are_drawn_with_their_colours() -> None:
    values = [1e-3, None, 0.0, math.inf, math.nan]
    names = [f"blocks.{i}.attention.mixing_of_heads.projection" for i in range(5)]
    picture = plots.gradient_flow(names, values, values, [BLUE] * 3 + [RED] * 2, {"fine": BLUE}, 7)
    assert has(picture, BLUE) and has(picture, RED) and has(picture, GREEN)
    nothing = plots.gradient_flow(["a"], [None], [None], [BLUE], {}, 1)
    assert nothing.shape[1] == SIDE
