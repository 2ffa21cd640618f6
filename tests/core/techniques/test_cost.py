"""Operations counted by shapes are those that torch's own counter counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_sequence
from torch.utils.flop_counter import FlopCounterMode

from runner.core.interfaces.batch import call_model
from runner.core.preserved_state import NotRestorable
from runner.core.techniques.cost import count_flops
from tests import runs


def assert_as_torchs(operation: Callable[[], Any]) -> int:
    """The FLOP of a call are those of torch's counter; return the number of products."""
    flop, products = count_flops(operation)
    as_products = sdpa_kernel([SDPBackend.MATH])  # torch's counter misses flash on a CPU
    with as_products, torch.no_grad(), FlopCounterMode(display=False) as counter:
        operation()
    assert flop == counter.get_total_flops() > 0
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
        lambda: F.conv2d(weight=torch.rand(8, 6, 3, 3), input=torch.rand(2, 6, 9, 9)),
        lambda: torch.inner(torch.rand(5, 4), torch.rand(3, 4)),
        lambda: nn.TransformerEncoderLayer(4, 2, 8)(torch.rand(2, 3, 4)),
        lambda: nn.MultiheadAttention(4, 2, batch_first=True, kdim=6, vdim=6)(
            torch.rand(2, 3, 4), torch.rand(2, 5, 6), torch.rand(2, 5, 6)
        ),
        lambda: nn.GRU(4, 5, bidirectional=True)(pack_sequence([torch.rand(3, 4)])),
        lambda: nn.LSTMCell(4, 5)(torch.rand(2, 4)),
        lambda: torch.einsum("ij,jk->ik", torch.rand(5, 4), torch.rand(4, 3)),
        lambda: torch.einsum("b...hi,b...ih->b...", torch.rand(2, 3, 4, 5), torch.rand(2, 3, 5, 4)),
        lambda: torch.einsum("bd,de,ef->bf", torch.rand(2, 4), torch.rand(4, 5), torch.rand(5, 6)),
        lambda: torch.einsum("bd,de", [torch.rand(2, 4), torch.rand(4, 5)]),
    ],
)
def test_an_operation_with_products_costs_what_torchs_counter_says(
    operation: Callable[[], Any],
) -> None:
    assert_as_torchs(operation)


def test_an_lstm_which_torchs_counter_misses_on_a_cpu_multiplies_each_weight_at_each_position() -> (
    None
):
    layer = nn.LSTM(4, 5, num_layers=2, bias=False)
    weights = sum(weight.numel() for weight in layer.parameters())
    assert count_flops(lambda: layer(torch.rand(3, 2, 4))) == (2 * 3 * 2 * weights, 1)


def test_a_call_without_a_formula_is_not_taken_for_free() -> None:
    with pytest.raises(NotRestorable, match="the FLOP of linalg_multi_dot cannot be counted"):
        count_flops(lambda: torch.linalg.multi_dot([torch.rand(2, 3), torch.rand(3, 4)]))
