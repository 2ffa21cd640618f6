"""Products of matrices, convolutions and attention in a call, counted by their shapes.

torch's own counter needs a dispatch mode, which imports 800 modules (two seconds, once). This one
sees the functions that Python calls, and knows where that is not enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

OPAQUE = {
    "bilinear", "cdist", "chain_matmul", "einsum", "gru", "gru_cell", "inner", "kron", "lstm",
    "lstm_cell", "multi_dot", "multi_head_attention_forward", "outer", "rnn_relu", "rnn_relu_cell",
    "rnn_tanh", "rnn_tanh_cell", "tensordot",
}  # fmt: skip
"""Functions that make products inside, where this does not see them."""


def _inner(operand: int) -> Callable[[Sequence[Any], Tensor], int]:
    """`[…, n, k] @ […, k, m]`; the operand with k as its last dimension is that argument."""
    return lambda args, out: 2 * out.numel() * int(args[operand].shape[-1])


def _convolution(args: Sequence[Any], out: Tensor) -> int:
    return 2 * out.numel() * int(args[1][0].numel())


def _transposed(args: Sequence[Any], out: Tensor) -> int:
    return 2 * int(args[0].numel()) * int(args[1][0].numel())


def _attention(args: Sequence[Any], out: Tensor) -> int:
    query, key, value = args[:3]  # […, length, width]
    width = query.shape[-1] + value.shape[-1]
    return 2 * int(query.numel() // query.shape[-1] * key.shape[-2] * width)


FLOP: dict[str, Callable[[Sequence[Any], Tensor], int]] = {
    **dict.fromkeys(("linear", "matmul", "__matmul__", "mm", "bmm", "mv", "dot"), _inner(0)),
    **dict.fromkeys(("addmm", "addbmm", "baddbmm", "addmv"), _inner(1)),
    **{f"conv{n}d": _convolution for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _transposed for n in (1, 2, 3)},
    "__rmatmul__": lambda args, out: 2 * out.numel() * int(args[1].shape[-1]),
    "scaled_dot_product_attention": _attention,
}


class ProductCounter(TorchFunctionMode):
    """While entered, adds up floating-point operations; a multiply-add is two."""

    def __init__(self) -> None:
        super().__init__()
        self.flop = self.products = 0
        self.opaque: set[str] = set()  # functions whose products were not seen

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        if name in OPAQUE:
            self.opaque.add(name)
        elif name in FLOP:
            try:
                self.flop += FLOP[name](args, result)
                self.products += 1
            except (AttributeError, IndexError, TypeError):  # arguments by their names
                self.opaque.add(name)
        return result
