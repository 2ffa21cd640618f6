"""Every model: shapes, gradients, 16 bits, and that it is what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.data.batch import call
from runner.models.cnn import CNN
from runner.models.mlp import MLP


def mlp(**changes: Any) -> MLP:
    return MLP(
        **{"in_features": 64, "classes": 10, "width": 32, "depth": 2, "dropout": 0.0, **changes}
    )


def cnn(**changes: Any) -> CNN:
    sizes = {"in_channels": 1, "image_size": 8, "classes": 10}
    return CNN(**{**sizes, "width": 8, "stages": 3, "blocks": 2, **changes})


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], tuple[int, ...]]] = {
    "mlp over images": (lambda: mlp(dropout=0.5), lambda: torch.randn(5, 1, 8, 8), (5, 10)),
    "mlp without hidden layers": (lambda: mlp(depth=0), lambda: torch.randn(5, 64), (5, 10)),
    "cnn 8": (cnn, lambda: torch.randn(5, 1, 8, 8), (5, 10)),
    "cnn 32": (
        lambda: cnn(in_channels=3, image_size=32),
        lambda: torch.randn(4, 3, 32, 32),
        (4, 10),
    ),
    "cnn deeper than the image halves": (
        lambda: cnn(stages=5, width=4),
        lambda: torch.randn(5, 1, 8, 8),
        (5, 10),
    ),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_a_gradient_reaches_every_parameter(case: str, precision: str) -> None:
    make, inputs, shape = CASES[case]
    model = make()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        output = call(model, inputs())
    assert output.shape == shape and output.isfinite().all()
    F.cross_entropy(output.float(), torch.arange(len(output))).backward()
    assert list(model.parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_cnn_works_on_at_most_64_pixels_and_at_least_4_after_its_stem() -> None:
    model = cnn(in_channels=3, image_size=200, stages=7, blocks=1, width=2)
    sides: list[int] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _m, _i, y: sides.append(y.shape[-1]))
    model(torch.randn(1, 3, 200, 200))
    assert sides == [50, 25, 13, 7, 7, 7, 7]


def test_a_fresh_mlp_keeps_the_scale_of_its_inputs_through_any_depth() -> None:
    model = mlp(in_features=256, width=256, depth=12, classes=256)
    hidden = model.layers[:-1](torch.randn(512, 256))
    assert 0.5 < float(hidden.detach().square().mean()) < 2.0
