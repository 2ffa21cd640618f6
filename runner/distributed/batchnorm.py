"""BatchNorm whose statistics are those of the whole batch, over all processes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

if TYPE_CHECKING:
    from runner.techniques.base import RunBuilder


def synchronise_batchnorm(draft: RunBuilder) -> None:
    """Have each BatchNorm normalise by the batch of all processes; its names stay.

    On CUDA by torch's SyncBatchNorm, which refuses CPU tensors; there by two sums.
    """
    layers = [m for m in draft.model.modules() if isinstance(m, _BatchNorm)]
    if not layers:
        return
    if draft.device.kind == "cuda":
        draft.model = nn.SyncBatchNorm.convert_sync_batchnorm(draft.model)  # type: ignore[no-untyped-call]
        draft.forward = draft.model
        return
    for layer in layers:
        layer.forward = partial(_forward, layer)  # type: ignore[method-assign]


def _forward(layer: _BatchNorm, x: Tensor) -> Tensor:
    """`[samples, channels, …]` normalised by mean and variance over samples and places."""
    if not layer.training:
        mean, variance = layer.running_mean, layer.running_var
        own = mean is None or variance is None  # without running statistics, those of the batch
        return F.batch_norm(x, mean, variance, layer.weight, layer.bias, own, 0, layer.eps)
    places = [0, *range(2, x.dim())]
    shape = [1, -1, *[1] * (x.dim() - 2)]
    exact = x.to(torch.promote_types(x.dtype, torch.float32))  # 16 bits count to 256
    count = exact.new_full((1,), x.numel() / x.shape[1])
    sums = _total(torch.cat([exact.sum(places), count]))
    n = sums[-1].detach()
    mean = sums[:-1] / n
    centred = exact - mean.view(shape)
    variance = _total(centred.square().sum(places)) / n
    _follow(layer, mean.detach(), variance.detach() * n / (n - 1))
    y: Tensor = centred * torch.rsqrt(variance + layer.eps).view(shape)
    if layer.weight is not None:
        y = y * layer.weight.view(shape) + layer.bias.view(shape)
    return y.to(x.dtype)


class _Sum(torch.autograd.Function):
    """The sum over all processes, which each one's loss depends on."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


def _total(values: Tensor) -> Tensor:
    total: Tensor = _Sum.apply(values)  # type: ignore[no-untyped-call]
    return total


@torch.no_grad()
def _follow(layer: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    if layer.running_mean is None or layer.running_var is None:
        return
    share = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if share is None:  # a plain mean over all batches
            share = 1.0 / float(layer.num_batches_tracked)
    share = share or 0.0
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), share)
    layer.running_var.lerp_(variance.to(layer.running_var.dtype), share)
