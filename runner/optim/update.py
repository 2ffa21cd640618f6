"""Between backward and the next batch: norm, guard, clipping, update, schedule, average."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from runner.optim.kernel import FusedKernel
from runner.optim.optimizer import Optimizer
from runner.stability.config import StabilityConfig


class LossScale:
    """A dynamic loss scale for fp16, on the device: halves on overflow, doubles after 2,000 steps.

    The rule is that of torch.amp.GradScaler; its own object reads the flag on the host.
    """

    def __init__(self, first: float, device: torch.device) -> None:
        self.value = torch.full((), first, device=device)
        self.grown = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, skipped: Tensor) -> None:
        """Learn from one step; `skipped` is 1.0 when it overflowed."""
        torch._amp_update_scale_(self.value, self.grown, skipped, 2.0, 0.5, 2000)


class Update:
    """One optimizer update, made or skipped without the host knowing which.

    A fused optimizer takes the flag (`found_inf`) and the clipping (`grad_scale`) into its kernel,
    so nothing waits. Any other optimizer needs the host to read the flag, once a step; on a CPU
    that costs nothing. After a skipped step parameters, buffers, optimizer state, schedule and
    average are what they were before it.

    The gradient norm is over the whole model: a NaN or an Inf anywhere, in a gradient or in the
    loss, makes it non-finite, so one number is both the norm and the flag.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: StabilityConfig,
        lr: float | None,  # None: the rates that the optimizer's owner sets, at any time
        factors: list[float],
        *,
        loss_scale: float | None = None,
        ema: float | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.device = self.parameters[0].device
        # the fused kernels of MPS take the flag and the scale, and look at neither (torch 2.13)
        fused = all(group.get("fused") for group in optimizer.param_groups)
        self.in_kernel = fused and self.device.type in ("cpu", "cuda")
        fits = self.in_kernel and FusedKernel.fits(optimizer)
        self.kernel = FusedKernel(optimizer, self.device) if fits else None
        self.guard = config.guard
        self.clip_norm = config.clip_norm
        self.scale = LossScale(loss_scale, self.device) if loss_scale else None
        self.lr, self.factors, self.backoff = lr, factors, 1.0
        self.scheduled = len(set(factors)) > 1
        self.updates = torch.zeros((), dtype=torch.int64, device=self.device)
        self.following = 1 - ema if ema else 0.0
        self.average = [p.detach().clone() for p in self.parameters] if ema else []
        # what a forward changes, such as BatchNorm's statistics, goes back with a skipped step
        self.owners = [
            (module._buffers, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.saved = [buffer.clone() for buffer in self.buffers()]
        self.never = torch.zeros((), device=self.device)
        self.begun = False
        self._set_schedule()

    @property
    def host_waits(self) -> bool:
        """Whether the host reads the flag at every step, and so waits on an accelerator."""
        return not self.in_kernel and self.device.type != "cpu"

    def begin(self) -> None:
        """Before forward: drop the old gradients, remember the buffers."""
        for parameter in self.parameters:
            parameter.grad = None
        if self.saved:
            torch._foreach_copy_(self.saved, self.buffers())
        self.begun = True

    def abandon(self) -> None:
        """Forget a step that was begun and not applied."""
        if self.begun and self.saved:
            torch._foreach_copy_(self.buffers(), self.saved)
        self.begun = False

    def measure(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient norm before clipping, and 1.0 if the step must be skipped; both 0-d."""
        return self.judge(loss, list(torch._foreach_norm(self._gradients())))

    def judge(self, loss: Tensor, norms: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The same from the norm of each gradient."""
        norms = [*norms, loss * 0.0]  # NaN if the loss is not finite, else nothing
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if self.scale:
            norm = norm / self.scale.value
        if not self.guard and not self.scale:
            return norm, self.never
        return norm, (norm - norm).ne(0.0).to(torch.float32)  # NaN - NaN, Inf - Inf are NaN

    def apply(self, norm: Tensor, skipped: Tensor, overflow: Tensor | None = None) -> None:
        """Make the update that `measure` looked at, unless it is to be skipped.

        `overflow` is the flag as it was measured, where a hook skips what is finite.
        """
        if self.in_kernel:
            self._in_kernel(norm, skipped)
        else:
            self._by_host(norm, skipped)
        if self.scale:
            self.scale.update(skipped if overflow is None else overflow)
        self.begun = False

    def _in_kernel(self, norm: Tensor, skipped: Tensor) -> None:
        if self.scheduled and self.lr is not None:
            torch.take(self.table, self.updates, out=self.lr_now)
        if self.kernel is not None and any(p.grad is None for p in self.parameters):
            self.kernel.hand_back()  # parameters now differ in their number of updates
            self.kernel = None
        if self.kernel is not None:
            self.kernel.step(self.divisor(norm), skipped)
        else:
            optimizer: Any = self.optimizer
            optimizer.grad_scale = self.divisor(norm)
            optimizer.found_inf = skipped
            optimizer.step()
        if self.scheduled:
            self.updates.add_(skipped == 0)
        if self.average:
            self._follow((1 - skipped) * self.following)
        if self.saved:
            skip = skipped.bool()
            with torch.no_grad():
                for buffer, saved in zip(self.buffers(), self.saved, strict=True):
                    buffer.copy_(torch.where(skip, saved, buffer))

    def _by_host(self, norm: Tensor, skipped: Tensor) -> None:
        if skipped.item():  # waits for the device
            if self.saved:
                torch._foreach_copy_(self.buffers(), self.saved)
            return
        divisor = self.divisor(norm)
        if divisor is not None:
            torch._foreach_div_(self._gradients(), divisor)
        if self.scheduled:
            self._set_rate(self.lr_at(int(self.updates.item())))
        self.optimizer.step()
        if self.scheduled:
            self.updates += 1
        if self.average:
            self._follow(torch.full_like(norm, self.following))

    def divisor(self, norm: Tensor) -> Tensor | None:
        """What the gradients are divided by: the loss scale, and the excess over the clip norm."""
        divisor = None
        if self.clip_norm is not None:
            excess = norm if self.clip_norm == 1.0 else norm / self.clip_norm
            divisor = excess.clamp(min=1.0)
        if self.scale:
            divisor = self.scale.value if divisor is None else divisor * self.scale.value
        return divisor

    def buffers(self) -> list[Tensor]:
        """The buffers as they are now: some models put new tensors in their place."""
        return [buffers[name].detach() for buffers, name in self.owners]  # type: ignore[union-attr]

    def _gradients(self) -> list[Tensor]:
        """The gradients there are; of sparse ones (embeddings) the values."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        for i, gradient in enumerate(gradients):
            if gradient.is_sparse:
                gradients[i] = _coalesced(self.parameters, gradient).values()
        return gradients

    def _follow(self, weight: Tensor) -> None:
        steps = torch._foreach_sub([p.detach() for p in self.parameters], self.average)
        torch._foreach_mul_(steps, weight)
        torch._foreach_add_(self.average, steps)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model with its averaged weights, where there is an average."""
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
        """The learning rate of the update that follows `updates` of them."""
        if self.lr is None:
            return float(self.optimizer.param_groups[0]["lr"])
        return self.lr * self.backoff * self.factors[min(updates, len(self.factors) - 1)]

    def back_off(self, factor: float) -> None:
        """Multiply the learning rate by `factor` from here on."""
        self.backoff *= factor
        if self.lr is None:
            for group in self.optimizer.param_groups:
                group["lr"] *= factor
        self._set_schedule()

    def schedule_on_device(self) -> None:
        """Look the learning rate up on the device also where it never changes."""
        self.scheduled = True
        self._set_schedule()

    def _set_schedule(self) -> None:
        if self.scheduled and self.in_kernel:
            rates = [self.lr_at(u) for u in range(len(self.factors) + 1)]
            self.table = torch.tensor(rates, dtype=torch.float32, device=self.device)
            self.lr_now = torch.zeros((), dtype=torch.float32, device=self.device)
            rate: float | Tensor = self.lr_now
        else:
            rate = self.lr_at(0)
        self._set_rate(rate)

    def _set_rate(self, rate: float | Tensor) -> None:
        if self.lr is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = rate

    @property
    def one_rate(self) -> bool:
        """Whether all groups have the same learning rate; an owner may give each its own."""
        groups = self.optimizer.param_groups
        return self.lr is not None or len({float(group["lr"]) for group in groups}) == 1

    def follow_owner(self) -> None:
        """Bring the owner's rate of now to where a whole step looks it up; before each of them."""
        self.table.fill_(self.lr_at(0))
        self.updates.zero_()

    # -- checkpoint ----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that the next update depends on."""
        if self.kernel is not None:
            self.kernel.hand_back()
        return {
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
            "backoff": self.backoff,
            "average": self.average,
            "scale": [self.scale.value, self.scale.grown] if self.scale else [],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state; raises ValueError or KeyError where it does not fit."""
        ours = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, options in zip(self.optimizer.param_groups, ours, strict=True):
            group.update(options)  # the config decides, not what the state was saved under
        self.match_layout()
        if self.kernel is not None and not self.kernel.take_over():
            self.kernel = None
        self.updates.copy_(state["updates"])
        self.backoff = state["backoff"]
        self._set_schedule()
        if len(state["average"]) != len(self.average) or bool(state["scale"]) != bool(self.scale):
            raise ValueError("optimizer.ema or the loss scale was switched since")
        if self.average:
            torch._foreach_copy_(self.average, state["average"])
        if self.scale:
            self.scale.value.copy_(state["scale"][0])
            self.scale.grown.copy_(state["scale"][1])

    def match_layout(self) -> None:
        """Bring moments into their weights' memory order, which fused kernels take for granted."""
        for parameter in self.parameters:
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor) or value.shape != parameter.shape:
                    continue
                if value.stride() != parameter.stride():
                    like = torch.empty_like(parameter, dtype=value.dtype)
                    self.optimizer.state[parameter][key] = like.copy_(value)


def _coalesced(parameters: list[Tensor], gradient: Tensor) -> Tensor:
    """A sparse gradient with each index once, put back in its place so that edits reach it."""
    owner = next(p for p in parameters if p.grad is gradient)
    owner.grad = gradient.coalesce()
    return owner.grad
