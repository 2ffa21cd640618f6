"""BatchNorm with statistics of the whole batch over all processes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from runner.scale.distributed.world import World, world_of

if TYPE_CHECKING:
    from runner.core.interfaces.technique import RunBuilder


def synchronise_batchnorm(builder: RunBuilder) -> None:
    """Make each BatchNorm normalise by the batch of all processes; module names are unchanged.

    On any device by one all-gather in the forward and one all-reduce in the backward of each layer.
    torch's SyncBatchNorm counts samples that stand in for none, and waits for the host.
    """
    layers = [m for m in builder.model.modules() if isinstance(m, _BatchNorm)]
    if not layers or (world := world_of(builder)) is None:
        return
    for layer in layers:
        layer.forward = partial(_forward, layer, world)  # type: ignore[method-assign]


def _forward(layer: _BatchNorm, world: World, x: Tensor) -> Tensor:
    """Normalise `[samples, channels, …]` per channel by mean and variance over all processes."""
    if not layer.training:
        mean, variance = layer.running_mean, layer.running_var
        use_batch = mean is None or variance is None  # no running statistics
        return F.batch_norm(x, mean, variance, layer.weight, layer.bias, use_batch, 0, layer.eps)
    values = x.numel() // x.shape[1]  # per channel
    # with one value this process has one sample or a stand-in, so each sample has one value
    if not torch.compiler.is_compiling() and values <= 1 and world.count_samples() <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got {x.shape}")
    count = 0 if world.is_stand_in else values
    y, mean, variance, total_count = _Normalise.apply(x, layer.weight, layer.bias, layer.eps, count)  # type: ignore[no-untyped-call]
    _update_running_statistics(layer, mean, variance * (total_count / (total_count - 1)))
    normalised: Tensor = y
    return normalised


class _Normalise(torch.autograd.Function):
    """Normalises by the statistics of all processes; the gradient accounts for all of them.

    The passes over `x` are torch kernels: statistics, normalisation with given statistics (also for
    the affine part of the gradient), and the two sums of the backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, count: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return y, and mean, biased variance and count per channel over all processes."""
        dtype = torch.promote_types(x.dtype, torch.float32)  # bf16 counts exactly only up to 256
        unused = torch.zeros(2, x.shape[1], dtype=dtype, device=x.device)  # also sets the dtype
        local = torch.batch_norm_update_stats(x, unused[0], unused[1], 0.0)
        mean, variance, n = _merge_statistics(local[0], local[1], count)
        mean, variance = mean.to(dtype), variance.to(dtype)
        scale = mean.new_ones(mean.shape) if weight is None else weight.to(dtype)
        shift = None if bias is None else bias.to(dtype)
        y = F.batch_norm(x, mean, variance, scale, shift, False, 0, eps)
        ctx.save_for_backward(x, scale, mean, variance, n)
        ctx.mark_non_differentiable(mean, variance, n)
        ctx.eps, ctx.counts = eps, count > 0
        ctx.dtypes = [None if each is None else each.dtype for each in (weight, bias)]
        return y, mean, variance, n

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return dx = w/σ · (dy - mean(dy) - x̂ · mean(dy · x̂)), with means over all processes."""
        x, scale, mean, variance, n = ctx.saved_tensors
        dx, dtype = None, mean.dtype
        x_wide, dy = x.to(dtype), gradients[0].to(dtype)
        inverse_std = torch.rsqrt(variance + ctx.eps)  # CUDA's kernel takes it and mean as saved
        _, products, sums = torch.ops.aten.native_batch_norm_backward(
            dy, x_wide, scale, mean, variance, mean, inverse_std, False, ctx.eps,
            [False, True, True],
        )  # fmt: skip
        if ctx.needs_input_grad[0]:
            total = torch.stack([products, sums])
            dist.all_reduce(total)
            factor = scale * inverse_std
            # stand-in samples were not part of mean and variance
            slope, level = -factor * total * (ctx.counts / n).to(dtype)
            dx = F.batch_norm(x_wide, mean, variance, slope, level, False, 0, ctx.eps)
            dx = dx.addcmul_(dy, factor.view(1, -1, *[1] * (x.dim() - 2))).to(x.dtype)
        pairs = zip((products, sums), ctx.dtypes, strict=True)
        return dx, *(None if to is None else gradient.to(to) for gradient, to in pairs), None, None


def _merge_statistics(mean: Tensor, variance: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Merge mean, biased variance and count over processes in fp64 (Chan, Golub, LeVeque 1983)."""
    local = torch.cat([mean.double(), variance.double(), mean.new_full((1,), count).double()])
    gathered = local.new_empty(dist.get_world_size(), local.numel())
    dist.all_gather(list(gathered), local)
    counts = gathered[:, -1:]
    means, variances = gathered[:, :-1].chunk(2, 1)
    n = counts.sum()
    total_mean = (means * counts).sum(0) / n
    moments = variances + (means - total_mean).square()
    return total_mean, (moments * counts).sum(0) / n, n


@torch.no_grad()
def _update_running_statistics(layer: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    if layer.running_mean is None or layer.running_var is None:
        return
    momentum: Tensor | float = 0.0 if layer.momentum is None else layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:  # cumulative mean over all batches
            momentum = layer.num_batches_tracked.double().reciprocal()
    for statistic, value in ((layer.running_mean, mean), (layer.running_var, variance)):
        weight = momentum.to(statistic.dtype) if isinstance(momentum, Tensor) else momentum
        statistic.lerp_(value.to(statistic.dtype), weight)
