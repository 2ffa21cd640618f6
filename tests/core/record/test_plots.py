"""Pictures: their width, what stands out in them, and names of any kind."""

import math

import numpy as np
from matplotlib.colors import to_rgb

from runner.core.record import plots
from runner.core.record.plots import BLUE, GREEN, RED, WIDTH


def has(picture: np.ndarray, colour: str) -> bool:
    pixel = np.array([round(255 * part) for part in to_rgb(colour)], np.uint8)
    return bool((picture == pixel).all(2).any())


def test_layers_of_any_number_are_drawn_with_their_colours() -> None:
    values = [1e-3, None, 0.0, math.inf, math.nan]
    names = [f"blocks.{i}.attention.mixing_of_heads.$x^" for i in range(5)]
    picture = plots.gradient_flow(names, values, values, [BLUE] * 3 + [RED] * 2, {"fine": BLUE}, 7)
    assert has(picture, BLUE) and has(picture, RED) and has(picture, GREEN)
    assert plots.gradient_flow(["a"], [None], [None], [BLUE], {}, 1).shape[1] == WIDTH
