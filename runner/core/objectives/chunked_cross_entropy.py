"""Cross-entropy over a large vocabulary, in chunks of tokens, without the whole logits.

With 50,000 words the logits of 8,192 tokens take 1.6 GB, and cross-entropy stores them three times.
Loss and gradients are accumulated chunk by chunk instead.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.core.interfaces.nested import DeferredLogits


class OutputLayer(nn.Module):
    """Linear layer without parameters: another layer owns the weight."""

    def forward(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return logits [..., vocab] of hidden [..., width] and weight [vocab, width]."""
        return F.linear(hidden, weight)


def defer_logits(layer: nn.Module, chunk: int) -> None:
    """Make a linear or output layer return DeferredLogits in training, until `restore_forward`.

    The forward is a bound method, so that a copied model uses its own layer's weight.
    """

    def forward(self: Any, hidden: Tensor, weight: Tensor | None = None) -> Any:
        weight = self.weight if weight is None else weight
        bias = getattr(self, "bias", None)
        if self.training:
            return DeferredLogits(hidden, weight, bias, chunk)
        return F.linear(hidden, weight, bias)

    bound: Any = MethodType(forward, layer)
    layer.forward = bound


def restore_forward(layer: nn.Module) -> None:
    """Restore the forward of the layer's class."""
    layer.__dict__.pop("forward", None)


def mean_cross_entropy(logits: DeferredLogits, target: Tensor, ignore_index: int) -> Tensor:
    """Return the mean loss over targets other than `ignore_index`, 0-d, in fp32 or better.

    NaN with gradients of 0 if there are none, as in torch.
    """
    kind, dtype = logits.hidden.device.type, logits.hidden.dtype
    if torch.is_autocast_enabled(kind) and dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(kind)  # as in a linear layer
    hidden, target = logits.hidden.flatten(0, -2), target.flatten()
    loss: Tensor = _MeanCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, logits.weight, logits.bias, target, ignore_index, logits.chunk, dtype
    )
    return loss


class _MeanCrossEntropy(torch.autograd.Function):
    """Loss and gradients in one pass: a chunk's logits are freed before the next chunk's are made.

    Gradients are computed in the forward, which has the logits: recomputing those in the backward
    would cost another product. They are for an upstream gradient of 1 and summed in fp32, so that
    small values survive until a loss scale multiplies them; inputs of 16-bit products lie between
    -1 and 1 for any number of tokens.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
    ) -> Tensor:
        compute = _chunked_pass_op if torch.compiler.is_compiling() else _chunked_pass
        total, count, *gradients = compute(hidden, weight, bias, *rest)
        ctx.save_for_backward(count, *gradients)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total / count

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        count, *gradients = ctx.saved_tensors
        scale = upstream / count.clamp(min=1)  # without targets the gradients are 0, not NaN
        pairs = zip(gradients, ctx.dtypes, strict=True)
        input_gradients = (None if dtype is None else (g * scale).to(dtype) for g, dtype in pairs)
        return (*input_gradients, None, None, None, None)


def _chunked_pass(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    chunk: int,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Return the sum of the losses, their number, and the sum's gradients."""
    low_weight, low_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    results = _empty_results(hidden, weight, bias, dtype)
    total, count, hidden_gradient, weight_gradient, bias_gradient = results
    mask = (target != ignore_index).unsqueeze(1)
    label = torch.where(mask, target.unsqueeze(1), 0).long()
    for start in range(0, hidden.shape[0], chunk):
        part = slice(start, start + chunk)
        part_hidden, part_label, part_mask = hidden[part].to(dtype), label[part], mask[part]
        log_p = F.log_softmax(F.linear(part_hidden, low_weight, low_bias).to(total.dtype), dim=1)
        total -= torch.where(part_mask, log_p.gather(1, part_label), 0.0).sum()
        logit_gradient = log_p.exp_()  # in place: a chunk's logits are the largest tensor
        minus_one = torch.full_like(part_label, -1, dtype=logit_gradient.dtype)
        logit_gradient.scatter_add_(1, part_label, minus_one)
        logit_gradient.masked_fill_(~part_mask, 0.0)
        if bias is not None:
            bias_gradient += logit_gradient.sum(0)
        logit_gradient = logit_gradient.to(dtype)
        hidden_gradient[part] = logit_gradient @ low_weight
        if dtype is weight_gradient.dtype:
            weight_gradient.addmm_(logit_gradient.T, part_hidden)
        else:
            weight_gradient += logit_gradient.T @ part_hidden
    count += mask.sum()
    return results


def _empty_results(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return the result tensors, which `_chunked_pass` fills in."""
    options: Any = {"dtype": torch.promote_types(dtype, torch.float32), "device": hidden.device}
    return (
        torch.zeros((), **options),
        torch.zeros((), dtype=torch.int64, device=hidden.device),
        torch.empty(hidden.shape, dtype=dtype, device=hidden.device),
        torch.zeros(weight.shape, **options),
        torch.zeros(0 if bias is None else len(bias), **options),
    )


# An opaque operator in compiled graphs: inductor would reorder the chunks, which in a measurement
# took more memory than the whole logits.
_chunked_pass_op = torch.library.custom_op(
    "runner::chunked_cross_entropy",
    _chunked_pass,
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, int ignore_index, "
    "int chunk, ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_chunked_pass_op.register_fake(lambda h, w, bias, *rest: _empty_results(h, w, bias, rest[-1]))
