"""Operations counted by shapes are those that torch's own counter finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from runner.build import build
from runner.composing import compose
from runner.data.batch import call
from runner.techniques.products import ProductCounter


def counted(what: Callable[[], Any]) -> tuple[int, ProductCounter]:
    """By torch, and by ours."""
    ours = ProductCounter()
    with torch.no_grad():
        # it does not know the CPU's flash kernel
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as torchs:
            what()
        with ours:
            what()
    return torchs.get_total_flops(), ours


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=mlp"],
        ["model=cnn"],
        ["data=stdlib_text", "model=gpt"],
        ["data=stdlib_parts", "model=classifier"],
    ],
    ids=lambda overrides: overrides[-1],
)
def test_our_models_cost_what_torchs_counter_says(overrides: list[str]) -> None:
    with build(compose([*overrides, "optimization=none", "training.batch_size=4"])) as run:
        run.model.eval()
        inputs = run.train.peek()[0]
        torchs, ours = counted(lambda: call(run.model, inputs))
    assert ours.flop == torchs > 0
    assert ours.products > 2
    assert not ours.opaque


def random(*shape: int) -> Tensor:
    return torch.rand(shape)


@pytest.mark.parametrize(
    "what",
    [
        lambda: random(5, 3, 4) @ random(4, 7),
        lambda: torch.addmm(random(5, 7), random(5, 4), random(4, 7)),
        lambda: torch.baddbmm(random(2, 5, 7), random(2, 5, 4), random(2, 4, 7)),
        lambda: F.conv2d(random(2, 6, 9, 9), random(8, 3, 3, 3), stride=2, groups=2),
        lambda: F.conv1d(random(2, 6, 9), random(8, 6, 3), padding=1),
        lambda: F.conv_transpose2d(random(2, 6, 5, 5), random(6, 4, 3, 3), stride=2),
        lambda: F.scaled_dot_product_attention(
            random(2, 3, 8, 16), random(2, 3, 12, 16), random(2, 3, 12, 16)
        ),
    ],
)
def test_a_product_costs_what_torchs_counter_says(what: Callable[[], Any]) -> None:
    torchs, ours = counted(what)
    assert ours.flop == torchs > 0


@pytest.mark.parametrize(
    "module", [nn.LSTM(4, 8, batch_first=True), nn.TransformerEncoderLayer(4, 2, 8)]
)
def test_products_that_are_not_seen_are_named(module: nn.Module) -> None:
    _, ours = counted(lambda: module(random(2, 3, 4)))
    assert ours.opaque
