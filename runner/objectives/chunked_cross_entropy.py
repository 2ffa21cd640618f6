"""Cross-entropy over a large vocabulary, in chunks of tokens without all logits in memory.

With 50,000 words the logits of 8,192 tokens take 1.6 GB, and cross-entropy needs them three times.
Loss and gradients can be computed chunk by chunk.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.objectives.model_output import DeferredLogits


class OutputLayer(nn.Module):
    """A product with a weight of another layer, without own parameters."""

    def forward(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Hidden [..., width] and weight [vocab, width] -> logits [..., vocab]."""
        return F.linear(hidden, weight)


def defer(layer: nn.Module, chunk: int) -> None:
    """Make a linear or output layer return DeferredLogits in training mode, until `undo`.

    The new forward is bound to the layer, so that a copy of the model defers its own layer.
    """

    def forward(self: Any, hidden: Tensor, weight: Tensor | None = None) -> Any:
        weight = self.weight if weight is None else weight
        bias = getattr(self, "bias", None)
        if self.training:
            return DeferredLogits(hidden, weight, bias, chunk)
        return F.linear(hidden, weight, bias)

    bound: Any = MethodType(forward, layer)
    layer.forward = bound


def undo(layer: nn.Module) -> None:
    """Restore the forward of the layer's class."""
    layer.__dict__.pop("forward", None)


class _MeanCrossEntropy(torch.autograd.Function):
    """Loss and gradients in one pass over chunks, with the logits of only one chunk in memory.

    Gradients are computed in the forward, since recomputing logits in the backward would cost
    another product. They are for an upstream gradient of 1, and those of the weight are summed in
    fp32, so that a loss scale is applied to values that did not underflow; the inputs of 16-bit
    products lie between -1 and 1 for any number of tokens.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
    ) -> Tensor:
        compute = _opaque_pass if torch.compiler.is_compiling() else _pass
        total, count, *slopes = compute(hidden, weight, bias, *rest)
        ctx.save_for_backward(count, *slopes)
        ctx.kinds = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total / count

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        count, *slopes = ctx.saved_tensors
        share = upstream / count.clamp(min=1)  # 0 targets: gradients are 0, not NaN
        pairs = zip(slopes, ctx.kinds, strict=True)
        given = (None if kind is None else (slope * share).to(kind) for slope, kind in pairs)
        return (*given, None, None, None, None)


def _pass(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    skip: int,
    chunk: int,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Return the sum of the losses, their number, and gradients of the sum."""
    low_weight, low_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    results = _empty_results(hidden, weight, bias, dtype)
    total, count, of_hidden, of_weight, of_bias = results
    counted = (target != skip).unsqueeze(1)
    label = torch.where(counted, target.unsqueeze(1), 0).long()
    for start in range(0, hidden.shape[0], chunk):
        part = slice(start, start + chunk)
        h, at, counts = hidden[part].to(dtype), label[part], counted[part]
        log_p = F.log_softmax(F.linear(h, low_weight, low_bias).to(total.dtype), dim=1)
        total -= torch.where(counts, log_p.gather(1, at), 0.0).sum()
        slope = log_p.exp_()  # in place: a chunk's logits are the largest tensor
        slope.scatter_add_(1, at, torch.full_like(at, -1, dtype=slope.dtype))
        slope.masked_fill_(~counts, 0.0)
        if bias is not None:
            of_bias += slope.sum(0)
        slope = slope.to(dtype)
        of_hidden[part] = slope @ low_weight
        if dtype is of_weight.dtype:
            of_weight.addmm_(slope.T, h)
        else:
            of_weight += slope.T @ h
    count += counted.sum()
    return results


def _empty_results(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Allocate the results of a pass."""
    exact: Any = {"dtype": torch.promote_types(dtype, torch.float32), "device": hidden.device}
    return (
        torch.zeros((), **exact),
        torch.zeros((), dtype=torch.int64, device=hidden.device),
        torch.empty(hidden.shape, dtype=dtype, device=hidden.device),
        torch.zeros(weight.shape, **exact),
        torch.zeros(0 if bias is None else len(bias), **exact),
    )


# Opaque to the compiler: inductor would reorder the chunks, and used more memory than the whole
# logits.
_opaque_pass = torch.library.custom_op(
    "runner::chunked_cross_entropy",
    _pass,
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, int skip, int chunk, "
    "ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_opaque_pass.register_fake(lambda h, w, bias, *rest: _empty_results(h, w, bias, rest[-1]))
