"""The optimizer step: gradient norm, guard, clipping, update, schedule, weight average."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.core.checkpoint.finite_checks import all_finite
from runner.core.optim.buffers import LARGEST, BufferSnapshot
from runner.core.optim.fused_kernel import FusedKernel, RevertibleStep
from runner.core.optim.gradients import (
    GradientClipper,
    coalesced_gradients,
    divide_gradients,
    gradient_values,
    tensor_norms,
)
from runner.core.optim.optimizer import (
    constructor_options,
    group_lr_shares,
    is_torch_class,
    parameter_names,
    skip_compiler_import,
    uses_torch_step,
)
from runner.core.schemas.stability import StabilityConfig

if TYPE_CHECKING:
    from runner.core.interfaces.shards import ShardsProtocol


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
        ema_warmup: bool | None = None,  # None: as in the loaded state; on without one
        shards: ShardsProtocol | None = None,  # this process's shard of every weight
        shortcuts: bool = True,  # whether an update may be skipped or reverted on the device
        objective: object = None,  # whose modules' buffers are saved and restored with the model's
    ) -> None:
        self.optimizer, self.shards = optimizer, shards
        self.groups: list[list[Tensor]] = [group["params"] for group in optimizer.param_groups]
        # each group's multiple of the scheduled rate; 1 if an owner sets the rates
        self.lr_shares = group_lr_shares(optimizer, lr)
        self.constructed_options = constructor_options(optimizer)
        self.parameters = [parameter for group in self.groups for parameter in group]
        # of the base class: a model's own may take no arguments
        named: Any = nn.Module.named_parameters(model, remove_duplicate=False)
        if shards is not None:
            named = shards.by_name(remove_duplicate=False)
        self.names = parameter_names(dict(named), self.parameters)
        self.device = self.parameters[0].device
        # fused kernels of MPS accept the flag and the scale, and ignore both (torch 2.13)
        groups = optimizer.param_groups
        fused = all(group.get("fused") and not group.get("dampening") for group in groups)
        takes_flag = fused and self.device.type in ("cpu", "cuda")
        self.in_kernel = takes_flag and shortcuts and uses_torch_step(optimizer)
        supported = self.in_kernel and FusedKernel.supports(optimizer)
        self.kernel = FusedKernel(optimizer, self.device) if supported else None
        self.guard = config.guard
        self.clip_norm = config.clip_norm
        clips = config.clip_value or config.clip_adaptive or config.clip_per_group
        self.clip = GradientClipper(config, model, self.groups) if clips else None
        self.scale = LossScaler(loss_scale, self.device) if loss_scale else None
        self.lr, self.factors, self.backoff = lr, factors, 1.0
        self.scheduled = len(set(factors)) > 1
        self.lr_share_tensor: Tensor | None = None
        if {*self.lr_shares} != {1.0}:
            # host sync: at the start
            shares = torch.tensor(self.lr_shares, dtype=self.rate_dtype, device=self.device)
            self.lr_share_tensor = shares
        sync_free = self.in_kernel or self.device.type == "cpu"  # no host sync to read the flag
        is_revertible = shortcuts and not sync_free
        is_revertible &= RevertibleStep.supports(optimizer, model, self.scheduled)
        self.revertible = RevertibleStep(optimizer) if is_revertible else None
        counter_device = "cpu" if self.host_waits else self.device  # one read a step is enough
        self.updates = torch.zeros((), dtype=torch.int64, device=counter_device)
        self.ema_weight = 1 - ema if ema else 0.0
        self.average = [p.detach().clone() for p in self.parameters] if ema else []
        self.requested_ema_warmup = ema_warmup
        self.ema_warmup = ema is not None and ema_warmup is not False
        self.ema_updates = torch.zeros((), dtype=torch.int64, device=self.device)  # with warm-up
        self.has_modes = all(callable(getattr(optimizer, n, None)) for n in ("train", "eval"))
        self.training_weights: list[Tensor] = []  # in the optimizer's evaluation mode
        self.buffers = BufferSnapshot(model, self.device, shards is None, objective)
        self.zero = torch.zeros((), dtype=torch.float32, device=self.device)
        self.one = torch.ones((), dtype=torch.float32, device=self.device)
        # of the loss and of the norm
        self.limits = torch.full((2,), LARGEST, dtype=torch.float32, device=self.device)
        self.loss_limit, self.norm_limit = self.limits.unbind()  # views
        self.in_progress = False
        self._set_schedule()

    @property
    def host_waits(self) -> bool:
        """Whether every step has a host sync, to read the flag on an accelerator."""
        return not self.in_kernel and self.revertible is None and self.device.type != "cpu"

    def set_limits(self, loss: float, grad_norm: float) -> None:
        """Skip later steps above these limits; Inf is no limit. No host sync."""
        self.loss_limit.fill_(min(LARGEST, loss))
        self.norm_limit.fill_(min(LARGEST, grad_norm))

    def begin(self) -> None:
        """Begin a step, before forward: drop old gradients and save the buffers."""
        for parameter in self.parameters:
            parameter.grad = None
        if self.shards is not None:
            self.shards.clear_gradients()
        self.buffers.save()
        self.in_progress = True

    def abandon(self) -> None:
        """Discard a step that was begun and not applied."""
        if self.in_progress:
            self.buffers.restore()
        self.in_progress = False

    def measure(self, loss: Tensor, norm: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the norm before clipping (`norm`, if sharded), and 1.0 for a skipped step: 0-d."""
        norms = tensor_norms(gradient_values(self.parameters)) if norm is None else [norm]
        return self.norm_and_skip(loss, norms)

    def local_part(self) -> tuple[Tensor, Tensor]:
        """Return 1.0 if this process's buffers are not finite, and its shard's squared norm."""
        checks_buffers = self.guard and self.buffers.statistic_slots
        skipped = self.zero
        if checks_buffers:
            skipped = torch.where(self.buffers.are_finite(), self.zero, self.one)
        norms: list[Tensor] = []
        if self.shards is not None:
            self.shards.set_local_gradients()
            norms = tensor_norms(gradient_values(self.parameters))
        return skipped, torch.stack(norms).square().sum() if norms else self.zero

    def finite(self, tensors: Iterable[Tensor]) -> bool:
        """Whether the tensors are finite, in the shards of all processes. Host sync."""
        is_finite = all_finite(tensors)
        return is_finite if self.shards is None else self.shards.all_agree(is_finite)

    def norm_and_skip(self, loss: Tensor, norms: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return gradient norm and skip flag, from the loss and the norms of the gradients."""
        # 0, or NaN if the loss is not finite; a tensor costs a third of a Python number
        norms = [*norms, loss * self.zero]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if self.scale:
            norm = norm / self.scale.value
        if not self.guard:
            return norm, self.overflowed(norm) if self.scale else self.zero
        good = (loss <= self.loss_limit).logical_and_(norm <= self.norm_limit)  # NaN: False
        if self.buffers.statistic_slots:
            good.logical_and_(self.buffers.are_finite())
        return norm, torch.where(good, self.zero, self.one)

    def overflowed(self, norm: Tensor) -> Tensor:
        """Return 1.0 if the norm is not finite: then a loss scale is too large."""
        return (norm - norm).ne(0.0).to(torch.float32)  # NaN - NaN, Inf - Inf are NaN

    def apply(self, norm: Tensor, skipped: Tensor) -> None:
        """Make the update unless `skipped` is 1, and adapt the loss scale, by the norm alone."""
        self.recheck_step()
        if self.in_kernel:
            self._apply_in_kernel(norm, skipped)
        elif self.revertible is not None:
            self._apply_revertible(self.revertible, norm, skipped)
        else:
            self._apply_on_host(norm, skipped)
        if self.scale:
            self.scale.update(self.overflowed(norm))
        self.in_progress = False

    def recheck_step(self) -> None:
        """Switch to the host-side decision if step() was patched or hooked since."""
        if (self.in_kernel or self.revertible is not None) and not uses_torch_step(self.optimizer):
            if self.kernel is not None:
                self.kernel.write_counter()
            self.in_kernel, self.kernel, self.revertible = False, None, None
            self._set_schedule()

    def _apply_in_kernel(self, norm: Tensor, skipped: Tensor) -> None:
        self._read_lr_table()
        if self.kernel is not None and any(p.grad is None for p in self.parameters):
            self.kernel.write_counter()  # parameters now differ in their step count
            self.kernel = None
        divisors = self.divisors(norm)
        if norm.dtype is torch.float64:  # kernels take a divisor in float32 only
            divide_gradients(self.groups, divisors)
            divisors = [None] * len(divisors)
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
        self._finish_update(skipped)

    def _apply_revertible(self, revertible: RevertibleStep, norm: Tensor, skipped: Tensor) -> None:
        self._read_lr_table()
        divide_gradients(self.groups, self.divisors(norm))
        revertible.step([p for p in self.parameters if p.grad is not None], skipped)
        self._finish_update(skipped)

    def _finish_update(self, skipped: Tensor) -> None:
        """Update the counter and the average, and restore the buffers of a skipped step."""
        if self.scheduled:
            self.updates.add_(skipped == 0)
        if self.average:
            self._update_average(self.average_weight(skipped))
        self.buffers.restore(skipped)

    def _apply_on_host(self, norm: Tensor, skipped: Tensor) -> None:
        if skipped.item():  # host sync: an update that no kernel skips and that cannot be reverted
            self.buffers.restore()
            return
        divide_gradients(self.groups, self.divisors(norm))
        if self.scheduled:
            updates = int(self.updates.item())  # host sync: none, its counter is on the host
            self._set_lr(self.lr_at(updates))
        self.optimizer.step()  # host sync: Adafactor reads a norm for each weight
        if self.scheduled:
            self.updates += 1
        if self.average:
            self._update_average(self.average_weight(torch.zeros_like(norm)))

    def divisors(
        self, norm: Tensor, gradients: Sequence[Tensor] | None = None
    ) -> list[Tensor | None]:
        """Clip in other ways, `gradients` or `.grad`; return each group's divisor."""
        if self.clip is None:
            return [self.divisor(norm)] * len(self.groups)
        iterator = iter(coalesced_gradients(self.parameters) if gradients is None else gradients)
        pairs = [[(next(iterator), parameter) for parameter in group] for group in self.groups]
        with torch.no_grad():
            scale = self.scale.value if self.scale else None
            return self.clip.clip_gradients(pairs, self.clip_norm, scale)

    def divisor(self, norm: Tensor) -> Tensor | None:
        """Return the gradients' divisor: loss scale times excess over the clip norm, or None."""
        divisor = None
        if self.clip_norm is not None:
            excess = norm if self.clip_norm == 1.0 else norm / self.clip_norm
            divisor = torch.maximum(excess, self.one)
        if self.scale:
            divisor = self.scale.value if divisor is None else divisor * self.scale.value
        return divisor

    def average_weight(self, skipped: Tensor) -> Tensor:
        """Return the weight of the new weights in the average, and count the update.

        With warm-up the decay after n updates is min(ema, (1 + n) / (10 + n)), as in TensorFlow's
        ExponentialMovingAverage; one minus it is max(1 - ema, 9 / (10 + n)).
        """
        if not self.ema_warmup:
            return (1 - skipped) * self.ema_weight
        self.ema_updates.add_(skipped == 0)
        weight = 9 / (10 + self.ema_updates.to(self.rate_dtype))
        return weight.clamp(min=self.ema_weight) * (1 - skipped)

    def _update_average(self, weight: Tensor) -> None:
        differences = torch._foreach_sub([p.detach() for p in self.parameters], self.average)
        torch._foreach_mul_(differences, weight)
        torch._foreach_add_(self.average, differences)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the averaged weights, if there are any, into the model while entered."""
        if not self.average:
            with self.evaluation_mode():
                yield
            return
        parameters = [p.detach() for p in self.parameters]
        current = [p.clone() for p in parameters]
        try:
            torch._foreach_copy_(parameters, self.average)
            yield
        finally:
            torch._foreach_copy_(parameters, current)

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Enter the optimizer's own evaluation mode, if any; exact weights are restored on exit."""
        if not self.has_modes or self.training_weights:
            yield
            return
        optimizer: Any = self.optimizer
        parameters = [p.detach() for p in self.parameters]
        self.training_weights = [p.clone() for p in parameters]
        try:
            optimizer.eval()
            yield
        finally:
            optimizer.train()
            torch._foreach_copy_(parameters, self.training_weights)
            self.training_weights = []

    # -- schedule ------------------------------------------------------------------------------

    def lr_at(self, updates: int) -> float:
        """Return the learning rate of the update that follows `updates` updates."""
        if self.lr is None:
            rate = self.optimizer.param_groups[0]["lr"]
            return float(rate)  # host sync: an owner's rate as a tensor, when it is reported
        return self.lr * self.backoff * self.factors[min(updates, len(self.factors) - 1)]

    def set_backoff(self, share: float) -> None:
        """Scale the learning rates of later updates to `share` of the schedule."""
        if self.lr is None:
            for group in self.optimizer.param_groups:
                group["lr"] *= share / self.backoff
        self.backoff = share
        self._set_schedule()

    def set_factors(self, factors: list[float]) -> None:
        """Follow another schedule from the next update on."""
        self.factors, self.scheduled = factors, self.scheduled or len(set(factors)) > 1
        self._set_schedule()

    def schedule_on_device(self) -> None:
        """Read the learning rate from a table on the device, even if it is constant."""
        self.scheduled = True
        self._set_schedule()

    @property
    def rate_dtype(self) -> torch.dtype:
        """The dtype of rates on the device: as precise as the weights, where kernels take it."""
        is_double = any(parameter.dtype is torch.float64 for parameter in self.parameters)
        only_single = self.in_kernel and self.device.type != "cpu"
        return torch.float64 if is_double and not only_single else torch.float32

    def _read_lr_table(self) -> None:
        if self.scheduled and self.lr is not None:
            # a benchmark may exceed the schedule
            index = self.updates.clamp(max=len(self.lr_table) - 1)
            torch.take(self.lr_table, index, out=self.current_lr)
            if self.lr_share_tensor is not None:
                torch.mul(self.lr_share_tensor, self.current_lr, out=self.group_lrs)

    def _set_schedule(self) -> None:
        if self.scheduled and (self.in_kernel or self.revertible is not None):
            lrs = [self.lr_at(u) for u in range(len(self.factors) + 1)]
            # host sync: the table of rates, at the start and after a rollback
            self.lr_table = torch.tensor(lrs, dtype=self.rate_dtype, device=self.device)
            self.current_lr = torch.zeros((), dtype=self.rate_dtype, device=self.device)
            if self.lr_share_tensor is None:
                self._set_lrs([self.current_lr] * len(self.groups))
            else:
                self.group_lrs = torch.zeros_like(self.lr_share_tensor)
                self._set_lrs(self.group_lrs.unbind())
        elif self.lr is not None:
            self._set_lr(self.lr_at(0))

    def _set_lr(self, lr: float) -> None:
        self._set_lrs([lr * share for share in self.lr_shares])

    def _set_lrs(self, lrs: Iterable[float | Tensor]) -> None:
        if self.lr is not None:
            for group, lr in zip(self.optimizer.param_groups, lrs, strict=True):
                group["lr"] = lr

    @property
    def has_single_lr(self) -> bool:
        """Whether all groups follow one learning rate; an owner may set several."""
        if self.lr is not None:
            return True
        first, *rest = [group["lr"] for group in self.optimizer.param_groups]
        # host sync: an owner's rates as tensors
        return all(rate is first or float(rate) == float(first) for rate in rest)

    def write_owner_lr(self) -> None:
        """Write the owner's current rate to the table that a whole step reads."""
        rate = self.optimizer.param_groups[0]["lr"]
        self.lr_table.fill_(rate.reshape(()) if isinstance(rate, Tensor) else rate)
        self.updates.zero_()

    def align_state(self) -> None:
        """Convert optimizer state to the memory format of the weights, which has changed."""
        from runner.core.optim.optimizer_state import align_state

        if self.kernel is not None:
            self.kernel.write_counter()
        align_state(self.optimizer)
        if self.kernel is not None:
            self.kernel.load_state()

    # -- checkpoint ----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state that the next update depends on."""
        if self.kernel is not None:
            self.kernel.write_counter()
        with skip_compiler_import():
            optimizer_state = self.optimizer.state_dict()
        if not is_torch_class(type(self.optimizer)):
            from runner.core.optim.optimizer_state import check_saved_state

            check_saved_state(self.optimizer, optimizer_state)
        return {
            "optimizer": optimizer_state,
            "names": self.names,
            "options": self.constructed_options,
            "updates": self.updates,
            "backoff": self.backoff,
            "average": self.average,
            "ema_updates": self.ema_updates if self.ema_warmup else None,
            "training_weights": self.training_weights,
            "buffers": self.buffers.changed(),
            "scale": [self.scale.value, self.scale.growth_tracker] if self.scale else [],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state by parameter names; raise ValueError or KeyError if it does not fit."""
        from runner.core.optim.optimizer_state import (
            align_state,
            check_optimizer_state,
            compatible_state,
            reorder_state,
            restore_options,
        )

        own_keys = frozenset({"lr", "initial_lr"} if self.lr is not None else ())
        constructed = self.constructed_options
        state = reorder_state(state, self.names, self.optimizer, constructed, own_keys)
        if self.shards is not None:
            state = self.shards.select_update_rows(state, self.parameters)
        # host sync: none, whether there is a loss scale
        if len(state["average"]) != len(self.average) or bool(state["scale"]) != bool(self.scale):
            raise ValueError("optimizer.ema or the loss scale was turned on or off")
        if any(a.shape != b.shape for a, b in zip(state["average"], self.average, strict=True)):
            raise ValueError("an average must have its weight's shape")
        compatible = compatible_state(self.optimizer, state["optimizer"])
        current_groups = [dict(group) for group in self.optimizer.param_groups]
        with skip_compiler_import():
            self.optimizer.load_state_dict(compatible)
        if not is_torch_class(type(self.optimizer)):
            check_optimizer_state(self.optimizer)
        groups, saved_options = self.optimizer.param_groups, state.get("options")
        restore_options(groups, current_groups, constructed, saved_options)
        align_state(self.optimizer)
        if self.has_modes:
            optimizer: Any = self.optimizer
            optimizer.train()
            if weights := state.get("training_weights"):
                torch._foreach_copy_([p.detach() for p in self.parameters], weights)
        if self.kernel is not None and not self.kernel.load_state():
            self.kernel = None
        self.updates.copy_(state["updates"])
        self.backoff = state["backoff"]
        self.buffers.frozen.forget_versions()
        self._set_schedule()
        if self.average:
            torch._foreach_copy_(self.average, state["average"])
            self._load_ema_updates(state.get("ema_updates"))
        if self.scale:
            self.scale.value.copy_(state["scale"][0])
            self.scale.growth_tracker.copy_(state["scale"][1])

    def _load_ema_updates(self, saved: Tensor | None) -> None:
        """Continue the warm-up of the average; without a count it is as requested, from 0."""
        if self.requested_ema_warmup is None:
            self.ema_warmup = saved is not None
        self.ema_updates.zero_()
        if saved is not None:
            self.ema_updates.copy_(saved)


class LossScaler:
    """Dynamic loss scale for fp16, on the device, by the rule of torch.amp.GradScaler."""

    def __init__(self, initial_scale: float, device: torch.device) -> None:
        self.value = torch.full((), initial_scale, dtype=torch.float32, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, overflowed: Tensor) -> None:
        """Adapt to one step; the flag is 1.0 or 0.0."""
        torch._amp_update_scale_(self.value, self.growth_tracker, overflowed, 2.0, 0.5, 2000)

    def values_before(self, overflowed: Sequence[bool]) -> list[float]:
        """Return the scale in each of the last steps, given which of them overflowed. Host sync.

        It did not grow between two overflows that are less than 2,000 steps apart.
        """
        values = list[float]()
        value = float(self.value)  # host sync: once a report with an overflow of the loss scale
        for overflow in reversed(overflowed):
            value = value * 2 if overflow else value
            values.append(value)
        return values[::-1]

    def lower(self, factor: float) -> None:
        """Multiply the scale by `factor`, in addition to its own rule."""
        self.value.mul_(factor)
        self.growth_tracker.zero_()
