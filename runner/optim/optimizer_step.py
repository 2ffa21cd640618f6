"""The optimizer step: gradient norm, guard, clipping, update, schedule, weight average."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from runner.checkpoint.sound import finite
from runner.optim.buffers import LARGEST, Buffers
from runner.optim.fused_kernel import FusedKernel, RevertibleStep
from runner.optim.gradients import (
    coalesced_gradients,
    divide_gradients,
    gradient_values,
    tensor_norms,
)
from runner.optim.origin import runs_torchs_step, without_compiler
from runner.stability.config import StabilityConfig

if TYPE_CHECKING:
    from runner.distributed.sharded import Shards
    from runner.optim.clip import Clip
    from runner.optim.optimizer_state import Optimizer


class OptimizerStep:
    """Turns gradients into an update, made or skipped without a host sync where possible.

    A fused optimizer of torch takes the flag (`found_inf`) and the clipping (`grad_scale`) in its
    kernel. On an accelerator, the update of other torch optimizers is reverted on the device if
    skipped (`RevertibleStep`). In all other cases, and whenever a user's code is part of step(),
    the host reads the flag once a step (free on a CPU) and calls step() only if it is not skipped.
    After a skipped step parameters, buffers, optimizer state, schedule and average are bit-equal to
    those before it.

    The gradient norm is over the whole model: a NaN or Inf anywhere, in a gradient or the loss,
    makes it non-finite. A step is skipped if its loss or norm is not finite or above `limits`, or
    if a normalisation's statistics (`running_…`) are no longer finite.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: StabilityConfig,
        lr: float | None,  # None: the optimizer's owner sets its rates at any time
        factors: list[float],
        *,
        loss_scale: float | None = None,
        ema: float | None = None,
        shards: Shards | None = None,  # this process's shard of every weight
    ) -> None:
        self.optimizer, self.shards = optimizer, shards
        self.groups: list[list[Tensor]] = [group["params"] for group in optimizer.param_groups]
        # each group's multiple of the scheduled rate; 1 if an owner sets the rates
        owned = lr is None
        self.rate_shares = [
            1.0 if owned else g.get("lr_share", 1.0) for g in optimizer.param_groups
        ]
        self.parameters = [parameter for group in self.groups for parameter in group]
        self.device = self.parameters[0].device
        # fused kernels of MPS accept the flag and the scale, and ignore both (torch 2.13)
        groups = optimizer.param_groups
        fused = all(group.get("fused") and not group.get("dampening") for group in groups)
        self.in_kernel = (
            fused and self.device.type in ("cpu", "cuda") and runs_torchs_step(optimizer)
        )
        fits = self.in_kernel and FusedKernel.fits(optimizer)
        self.kernel = FusedKernel(optimizer, self.device) if fits else None
        self.guard = config.guard
        self.clip_norm = config.clip_norm
        self.clip: Clip | None = None
        if config.clip_value or config.clip_adaptive or config.clip_per_group:
            from runner.optim.clip import Clip

            self.clip = Clip(config, model, self.groups)
        self.scale = LossScaler(loss_scale, self.device) if loss_scale else None
        self.lr, self.factors, self.backoff = lr, factors, 1.0
        self.scheduled = len(set(factors)) > 1
        several = len(set(self.rate_shares)) > 1 or self.rate_shares[0] != 1.0
        self.share_of_groups = (
            torch.tensor(self.rate_shares, device=self.device) if several else None
        )
        read = self.in_kernel or self.device.type == "cpu"  # no host sync to read the flag
        undone = not read and RevertibleStep.fits(optimizer, model, self.scheduled)
        self.undo = RevertibleStep(optimizer) if undone else None
        counted_at = "cpu" if self.host_waits else self.device  # one read a step is enough
        self.updates = torch.zeros((), dtype=torch.int64, device=counted_at)
        self.following = 1 - ema if ema else 0.0
        self.average = [p.detach().clone() for p in self.parameters] if ema else []
        self.buffers = Buffers(model, self.device)
        self.never = torch.zeros((), device=self.device)
        self.always = torch.ones((), device=self.device)
        self.limits = torch.full((2,), LARGEST, device=self.device)  # of the loss and of the norm
        self.loss_limit, self.norm_limit = self.limits.unbind()  # views
        self.begun = False
        self._set_schedule()

    @property
    def host_waits(self) -> bool:
        """Whether every step has a host sync, to read the flag on an accelerator."""
        return not self.in_kernel and self.undo is None and self.device.type != "cpu"

    def set_limits(self, loss: float, grad_norm: float) -> None:
        """Skip later steps above these limits; Inf is no limit. No host sync."""
        self.loss_limit.fill_(min(LARGEST, loss))
        self.norm_limit.fill_(min(LARGEST, grad_norm))

    def begin(self) -> None:
        """Begin a step, before forward: drop old gradients and save the buffers."""
        for parameter in self.parameters:
            parameter.grad = None
        if self.shards is not None:
            self.shards.forget_gradients()
        self.buffers.remember()
        self.begun = True

    def abandon(self) -> None:
        """Discard a step that was begun and not applied."""
        if self.begun:
            self.buffers.restore()
        self.begun = False

    def measure(self, loss: Tensor, norm: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the gradient norm before clipping, and 1.0 if the step must be skipped; both 0-d.

        `norm` is given, over all shards, if the weights are sharded.
        """
        norms = tensor_norms(gradient_values(self.parameters)) if norm is None else [norm]
        return self.judge(loss, norms)

    def local_part(self) -> tuple[Tensor, Tensor]:
        """Return 1.0 if this process's buffers are not finite, and its shard's squared norm."""
        watched = self.guard and self.buffers.watched
        spoiled = torch.where(self.buffers.are_finite(), 0.0, 1.0) if watched else self.never
        norms: list[Tensor] = []
        if self.shards is not None:
            self.shards.take_gradients()
            norms = tensor_norms(gradient_values(self.parameters))
        return spoiled, torch.stack(norms).square().sum() if norms else self.never

    def finite(self, tensors: Iterable[Tensor]) -> bool:
        """Whether the tensors are finite, in the shards of all processes. Host sync."""
        sound = finite(tensors)
        return sound if self.shards is None else self.shards.agree(sound)

    def judge(self, loss: Tensor, each: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return gradient norm and skip flag, from the loss and the norms of the gradients."""
        # 0, or NaN if the loss is not finite; a tensor costs a third of a Python number
        each = [*each, loss * self.never]
        norm = torch.linalg.vector_norm(torch.stack(each))
        if self.scale:
            norm = norm / self.scale.value
        if not self.guard:
            return norm, self.overflowed(norm) if self.scale else self.never
        good = (loss <= self.loss_limit).logical_and_(norm <= self.norm_limit)  # NaN: False
        if self.buffers.watched:
            good.logical_and_(self.buffers.are_finite())
        return norm, torch.where(good, self.never, self.always)

    def overflowed(self, norm: Tensor) -> Tensor:
        """Return 1.0 if the norm is not finite: then a loss scale is too large."""
        return (norm - norm).ne(0.0).to(torch.float32)  # NaN - NaN, Inf - Inf are NaN

    def apply(self, norm: Tensor, skipped: Tensor) -> None:
        """Make the update unless `skipped` is 1, and adapt the loss scale.

        A step may be skipped for several reasons; the loss scale depends on the norm alone.
        """
        self.check_step()
        if self.in_kernel:
            self._in_kernel(norm, skipped)
        elif self.undo is not None:
            self._undone(self.undo, norm, skipped)
        else:
            self._by_host(norm, skipped)
        if self.scale:
            self.scale.update(self.overflowed(norm))
        self.begun = False

    def check_step(self) -> None:
        """Switch to the host-side decision if step() was patched or hooked since."""
        if (self.in_kernel or self.undo is not None) and not runs_torchs_step(self.optimizer):
            if self.kernel is not None:
                self.kernel.write_counter()
            self.in_kernel, self.kernel, self.undo = False, None, None
            self._set_schedule()

    def _in_kernel(self, norm: Tensor, skipped: Tensor) -> None:
        self._look_up_rate()
        if self.kernel is not None and any(p.grad is None for p in self.parameters):
            self.kernel.write_counter()  # parameters now differ in their step count
            self.kernel = None
        divisors = self.divisors(norm)
        if self.kernel is not None:
            self.kernel.step(divisors, skipped)
        else:
            optimizer: Any = self.optimizer
            optimizer.grad_scale = divisors[0]
            if any(divisor is not divisors[0] for divisor in divisors):
                divide_gradients(self.groups, divisors)  # the kernel takes only one
                optimizer.grad_scale = None
            optimizer.found_inf = skipped
            try:
                optimizer.step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf
        self._settle(skipped)

    def _undone(self, undo: RevertibleStep, norm: Tensor, skipped: Tensor) -> None:
        self._look_up_rate()
        divide_gradients(self.groups, self.divisors(norm))
        undo.step([p for p in self.parameters if p.grad is not None], skipped)
        self._settle(skipped)

    def _settle(self, skipped: Tensor) -> None:
        """Update the counter and the average, and restore the buffers of a skipped step."""
        if self.scheduled:
            self.updates.add_(skipped == 0)
        if self.average:
            self._follow((1 - skipped) * self.following)
        self.buffers.restore(skipped)

    def _by_host(self, norm: Tensor, skipped: Tensor) -> None:
        if skipped.item():  # host sync on an accelerator
            self.buffers.restore()
            return
        divide_gradients(self.groups, self.divisors(norm))
        if self.scheduled:
            self._set_rate(self.lr_at(int(self.updates.item())))
        self.optimizer.step()
        if self.scheduled:
            self.updates += 1
        if self.average:
            self._follow(torch.full_like(norm, self.following))

    def divisors(self, norm: Tensor, given: Sequence[Tensor] | None = None) -> list[Tensor | None]:
        """Apply the other kinds of clipping; return each group's divisor for loss scale and norm.

        Gradients are in `.grad`, or `given`.
        """
        if self.clip is None:
            return [self.divisor(norm)] * len(self.groups)
        each = iter(coalesced_gradients(self.parameters) if given is None else given)
        pairs = [[(next(each), parameter) for parameter in group] for group in self.groups]
        with torch.no_grad():
            scale = self.scale.value if self.scale else None
            return self.clip.limit(pairs, self.clip_norm, scale)

    def divisor(self, norm: Tensor) -> Tensor | None:
        """Return the gradients' divisor: loss scale times excess over the clip norm, or None."""
        divisor = None
        if self.clip_norm is not None:
            excess = norm if self.clip_norm == 1.0 else norm / self.clip_norm
            divisor = torch.maximum(excess, self.always)
        if self.scale:
            divisor = self.scale.value if divisor is None else divisor * self.scale.value
        return divisor

    def _follow(self, weight: Tensor) -> None:
        steps = torch._foreach_sub([p.detach() for p in self.parameters], self.average)
        torch._foreach_mul_(steps, weight)
        torch._foreach_add_(self.average, steps)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the averaged weights, if there are any, into the model while entered."""
        if not self.average:
            yield
            return
        parameters = [p.detach() for p in self.parameters]
        live = [p.clone() for p in parameters]
        try:
            torch._foreach_copy_(parameters, self.average)
            yield
        finally:
            torch._foreach_copy_(parameters, live)

    # -- schedule ------------------------------------------------------------------------------

    def lr_at(self, updates: int) -> float:
        """Return the learning rate of the update that follows `updates` updates."""
        if self.lr is None:
            return float(self.optimizer.param_groups[0]["lr"])
        return self.lr * self.backoff * self.factors[min(updates, len(self.factors) - 1)]

    def set_backoff(self, share: float) -> None:
        """Scale the learning rates of later updates to `share` of the schedule."""
        if self.lr is None:
            for group in self.optimizer.param_groups:
                group["lr"] *= share / self.backoff
        self.backoff = share
        self._set_schedule()

    def schedule_on_device(self) -> None:
        """Read the learning rate from a table on the device, even if it is constant."""
        self.scheduled = True
        self._set_schedule()

    def _look_up_rate(self) -> None:
        if self.scheduled and self.lr is not None:
            at = self.updates.clamp(max=len(self.table) - 1)  # a benchmark may exceed the schedule
            torch.take(self.table, at, out=self.lr_now)
            if self.share_of_groups is not None:
                torch.mul(self.share_of_groups, self.lr_now, out=self.lr_each)

    def _set_schedule(self) -> None:
        if self.scheduled and (self.in_kernel or self.undo is not None):
            rates = [self.lr_at(u) for u in range(len(self.factors) + 1)]
            self.table = torch.tensor(rates, dtype=torch.float32, device=self.device)
            self.lr_now = torch.zeros((), dtype=torch.float32, device=self.device)
            if self.share_of_groups is None:
                self._set_rates([self.lr_now] * len(self.groups))
            else:
                self.lr_each = torch.zeros_like(self.share_of_groups)
                self._set_rates(self.lr_each.unbind())
        else:
            self._set_rate(self.lr_at(0))

    def _set_rate(self, rate: float) -> None:
        self._set_rates([rate * share for share in self.rate_shares])

    def _set_rates(self, rates: Iterable[float | Tensor]) -> None:
        if self.lr is not None:
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    @property
    def one_rate(self) -> bool:
        """Whether all groups follow one learning rate; an owner may set several."""
        groups = self.optimizer.param_groups
        return self.lr is not None or len({float(group["lr"]) for group in groups}) == 1

    def follow_owner(self) -> None:
        """Write the owner's current rate to the table that a whole step reads."""
        self.table.fill_(self.lr_at(0))
        self.updates.zero_()

    def align_state(self) -> None:
        """Convert optimizer state to the memory format of the weights, which has changed."""
        from runner.optim.optimizer_state import align_state

        if self.kernel is not None:
            self.kernel.write_counter()
        align_state(self.optimizer)
        if self.kernel is not None:
            self.kernel.take_over()

    # -- checkpoint ----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state that the next update depends on."""
        if self.kernel is not None:
            self.kernel.write_counter()
        with without_compiler():
            optimizer_state = self.optimizer.state_dict()
        return {
            "optimizer": optimizer_state,
            "updates": self.updates,
            "backoff": self.backoff,
            "average": self.average,
            "scale": [self.scale.value, self.scale.grown] if self.scale else [],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state; raise ValueError or KeyError if it does not fit."""
        if len(state["average"]) != len(self.average) or bool(state["scale"]) != bool(self.scale):
            raise ValueError("optimizer.ema or the loss scale was turned on or off")
        if any(a.shape != b.shape for a, b in zip(state["average"], self.average, strict=True)):
            raise ValueError("an average must have its weight's shape")
        from runner.optim.optimizer_state import align_state, compatible_state

        fits = compatible_state(self.optimizer, state["optimizer"])
        ours = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        with without_compiler():
            self.optimizer.load_state_dict(fits)
        for group, options in zip(self.optimizer.param_groups, ours, strict=True):
            group.update(options)  # the config has precedence over saved options
        align_state(self.optimizer)
        if self.kernel is not None and not self.kernel.take_over():
            self.kernel = None
        self.updates.copy_(state["updates"])
        self.backoff = state["backoff"]
        self._set_schedule()
        if self.average:
            torch._foreach_copy_(self.average, state["average"])
        if self.scale:
            self.scale.value.copy_(state["scale"][0])
            self.scale.grown.copy_(state["scale"][1])


class LossScaler:
    """Dynamic loss scale for fp16, on the device: halves on overflow, doubles after 2,000 steps.

    The rule is that of torch.amp.GradScaler, which reads the flag on the host.
    """

    def __init__(self, first: float, device: torch.device) -> None:
        self.value = torch.full((), first, device=device)
        self.grown = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, overflowed: Tensor) -> None:
        """Adapt to one step; the flag is 1.0 or 0.0."""
        torch._amp_update_scale_(self.value, self.grown, overflowed, 2.0, 0.5, 2000)

    def lower(self, factor: float) -> None:
        """Multiply the scale by `factor`, in addition to its own rule."""
        self.value.mul_(factor)
        self.grown.zero_()
