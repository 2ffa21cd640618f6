"""Count the FLOP of a call: matrix products, convolutions and attention."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def count_flops(
    call: Callable[[], Any], grad: bool = False, exact: bool = False
) -> tuple[int, int]:
    """Return FLOP (a multiply-add is two) and number of products of a call, uncompiled.

    Counted from the arguments of functions; by torch's counter if one of them cannot be counted so,
    with `exact` (for scripted code) and with `grad` (for a backward). The call is then repeated.
    """
    if not (grad or exact):
        compiled = "torch._dynamo" in sys.modules
        uncompiled = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
        with uncompiled, torch.no_grad(), _ProductCounter() as counter:
            call()
        if not counter.uncounted:
            return counter.flop, counter.products
    # a dispatch mode, which imports 800 modules (2 s, once)
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode, flop_registry

    from runner.core.techniques.probe import OperatorObserver

    products: list[object] = []
    with (
        torch.set_grad_enabled(grad),
        torch.compiler.set_stance("force_eager"),
        sdpa_kernel([SDPBackend.MATH]),  # attention as products: the counter misses flash on a CPU
        OperatorObserver(lambda operator, _: products.append(operator._overloadpacket)),
        FlopCounterMode(display=False) as torch_counter,
    ):
        call()
    flop = int(torch_counter.get_total_flops())
    return flop, sum(operator in flop_registry for operator in products)


UNCOUNTED_FUNCTIONS = {
    "bilinear", "cdist", "chain_matmul", "einsum", "gru", "gru_cell", "inner", "kron", "lstm",
    "lstm_cell", "multi_dot", "multi_head_attention_forward", "outer", "rnn_relu", "rnn_relu_cell",
    "rnn_tanh", "rnn_tanh_cell", "tensordot",
}  # fmt: skip
"""Functions with products inside that _ProductCounter does not see."""


def _matmul_flop(operand: int) -> Callable[[Sequence[Any], Tensor], int]:
    """Return the FLOP formula of `[…, n, k] @ […, k, m]`; args[operand] has k as last dimension."""
    return lambda args, out: 2 * out.numel() * int(args[operand].shape[-1])


def _convolution_flop(args: Sequence[Any], out: Tensor) -> int:
    return 2 * out.numel() * int(args[1][0].numel())


def _transposed_convolution_flop(args: Sequence[Any], out: Tensor) -> int:
    return 2 * int(args[0].numel()) * int(args[1][0].numel())


def _attention_flop(args: Sequence[Any], out: Tensor) -> int:
    query, key, value = args[:3]  # […, length, width]
    width = query.shape[-1] + value.shape[-1]
    return 2 * int(query.numel() // query.shape[-1] * key.shape[-2] * width)


FLOP_FORMULAS: dict[str, Callable[[Sequence[Any], Tensor], int]] = {
    **dict.fromkeys(("linear", "matmul", "__matmul__", "mm", "bmm", "mv", "dot"), _matmul_flop(0)),
    **dict.fromkeys(("addmm", "addbmm", "baddbmm", "addmv", "__rmatmul__"), _matmul_flop(1)),
    **{f"conv{n}d": _convolution_flop for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _transposed_convolution_flop for n in (1, 2, 3)},
    "scaled_dot_product_attention": _attention_flop,
}


class _ProductCounter(TorchFunctionMode):
    """Counts functions called from Python; `uncounted` are those whose products it cannot see."""

    def __init__(self) -> None:
        super().__init__()
        self.flop = self.products = 0
        self.uncounted: set[str] = set()  # functions whose products were not seen

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        if name in UNCOUNTED_FUNCTIONS:
            self.uncounted.add(name)
        elif name in FLOP_FORMULAS:
            try:
                self.flop += FLOP_FORMULAS[name](args, result)
                self.products += 1
            except (AttributeError, IndexError, TypeError):  # keyword arguments
                self.uncounted.add(name)
        return result
