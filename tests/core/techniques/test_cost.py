"""Operations counted by shapes are those that torch's own counter counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runner.core.interfaces.batch import call_model
from runner.core.techniques.cost import count_flops
from tests import runs


def assert_as_torchs(operation: Callable[[], Any]) -> int:
    """The FLOP of a call are those of torch's counter; return the number of products."""
    flop, products = count_flops(operation)
    assert flop == count_flops(operation, exact=True)[0] > 0
    return products


@pytest.mark.parametrize(
    "model", ["mlp", "cnn", "gpt data=stdlib_text", "classifier data=stdlib_parts"]
)
def test_our_models_cost_what_torchs_counter_says(model: str) -> None:
    asked = [f"model={model.split()[0]}", *model.split()[1:], "training.batch_size=4"]
    with runs.opened("optimization=none", *asked) as run:
        run.model.eval()
        inputs = run.train.peek()[0]
        assert assert_as_torchs(lambda: call_model(run.model, inputs)) > 2


@pytest.mark.parametrize(
    "operation",
    [
        lambda: torch.rand(5, 3, 4) @ torch.rand(4, 7),
        lambda: torch.baddbmm(torch.rand(2, 5, 7), torch.rand(2, 5, 4), torch.rand(2, 4, 7)),
        lambda: F.conv2d(torch.rand(2, 6, 9, 9), torch.rand(8, 3, 3, 3), stride=2, groups=2),
        lambda: F.conv_transpose2d(torch.rand(2, 6, 5, 5), torch.rand(6, 4, 3, 3), stride=2),
        lambda: F.scaled_dot_product_attention(
            torch.rand(2, 3, 8, 16), torch.rand(2, 3, 12, 16), torch.rand(2, 3, 12, 16)
        ),
    ],
)
def test_a_product_costs_what_torchs_counter_says(operation: Callable[[], Any]) -> None:
    assert_as_torchs(operation)


def test_products_that_are_not_seen_from_python_are_counted_by_torchs_counter() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8)
    assert assert_as_torchs(lambda: layer(torch.rand(2, 3, 4))) >= 4
    equation = "ij,jk->ik"  # a product of Python's functions that is not in the formulas
    assert assert_as_torchs(lambda: torch.einsum(equation, torch.rand(5, 4), torch.rand(4, 3))) == 1
