"""How much is computed: floating-point operations of products, counted by torch's own counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def flops(what: Callable[[], Any], grad: bool = True) -> int:
    """Of matmul, convolution and attention in a call; a multiply-add is two.

    It runs eagerly, with attention written out in products: torch's counter sees neither inside a
    compiled graph nor a CPU's flash attention.
    """
    with (
        torch.set_grad_enabled(grad),
        torch.compiler.set_stance("force_eager"),
        sdpa_kernel([SDPBackend.MATH]),
        FlopCounterMode(display=False) as counter,
    ):
        what()
    return int(counter.get_total_flops())
