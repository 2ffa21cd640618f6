"""Operations counted by shapes are those that torch's own counter counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from runner.core.interfaces.batch import call_model
from runner.core.techniques.cost import ProductCounter
from tests import runs


def counted(operation: Callable[[], Any]) -> tuple[int, ProductCounter]:
    """By torch, and by ours."""
    ours = ProductCounter()
    with torch.no_grad():
        # it does not know the CPU's flash kernel
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as torchs:
            operation()
        with ours:
            operation()
    return torchs.get_total_flops(), ours


@pytest.mark.parametrize(
    "model", ["mlp", "cnn", "gpt data=stdlib_text", "classifier data=stdlib_parts"]
)
def test_our_models_cost_what_torchs_counter_says(model: str) -> None:
    asked = [f"model={model.split()[0]}", *model.split()[1:], "training.batch_size=4"]
    with runs.opened("optimization=none", *asked) as run:
        run.model.eval()
        inputs = run.train.peek()[0]
        torchs, ours = counted(lambda: call_model(run.model, inputs))
    assert ours.flop == torchs > 0
    assert ours.products > 2
    assert not ours.uncounted


def random(*shape: int) -> Tensor:
    return torch.rand(shape)


@pytest.mark.parametrize(
    "operation",
    [
        lambda: random(5, 3, 4) @ random(4, 7),
        lambda: torch.baddbmm(random(2, 5, 7), random(2, 5, 4), random(2, 4, 7)),
        lambda: F.conv2d(random(2, 6, 9, 9), random(8, 3, 3, 3), stride=2, groups=2),
        lambda: F.conv_transpose2d(random(2, 6, 5, 5), random(6, 4, 3, 3), stride=2),
        lambda: F.scaled_dot_product_attention(
            random(2, 3, 8, 16), random(2, 3, 12, 16), random(2, 3, 12, 16)
        ),
    ],
)
def test_a_product_costs_what_torchs_counter_says(operation: Callable[[], Any]) -> None:
    torchs, ours = counted(operation)
    assert ours.flop == torchs > 0


@pytest.mark.parametrize("module", [nn.LSTM(4, 8), nn.TransformerEncoderLayer(4, 2, 8)])
def test_products_that_are_not_seen_are_named(module: nn.Module) -> None:
    assert counted(lambda: module(random(2, 3, 4)))[1].uncounted
