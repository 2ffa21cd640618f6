"""The exported program from raw inputs is the preprocessing and the model, for any batch size."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from runner.data.batch import Column, Sizes
from runner.data.preprocessing import Preprocessing
from runner.jobs.export import _exported
from runner.jobs.pipeline import RawInputModel, raw_inputs


def test_gaps_and_unknown_categories_in_the_targets_unit() -> None:
    columns = (
        Column("b", values=("x", "y")),
        Column("a", 5.0, 2.0, fill=7.0),
        Column("a", part="missing"),
    )
    sizes = Sizes("regression", 5, classes=1, target_mean=100.0, target_deviation=10.0)
    preprocessing, model = Preprocessing("tabular", "", sizes, columns), nn.Linear(5, 1)
    pipeline = RawInputModel(model, preprocessing).eval()
    numbers = torch.tensor([[1.0], [float("nan")], [9.0], [5.0]])
    categories = torch.tensor([[0], [1], [-1], [2]])
    inputs = np.array(
        [[1, 0, 0, -2, 0], [0, 1, 0, 1, 1], [0, 0, 1, 2, 0], [0, 0, 1, 0, 0]], np.float32
    )
    expected = (inputs @ model.weight.detach().numpy().T + model.bias.detach().numpy()) * 10 + 100
    program = _exported(pipeline, (numbers[:2], categories[:2])).module()
    for call in (pipeline, program):
        np.testing.assert_allclose(call(numbers, categories).detach(), expected, rtol=1e-5)
    raw = raw_inputs(preprocessing, torch.from_numpy(inputs[:1]))
    assert torch.equal(raw[0], numbers[:1]) and torch.equal(raw[1], categories[:1])


def test_pixels_become_probabilities() -> None:
    sizes = Sizes("classification", 12, in_channels=3, image_size=2, classes=2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    preprocessing = Preprocessing("images", "", sizes)
    pixels = torch.arange(36, dtype=torch.uint8).reshape(3, 3, 2, 2) * 7
    expected = model(pixels.float() / 255).softmax(1)
    program = _exported(RawInputModel(model, preprocessing).eval(), pixels[:2]).module()
    torch.testing.assert_close(program(pixels), expected)
    torch.testing.assert_close(raw_inputs(preprocessing, pixels.float() / 255)[0], pixels)
