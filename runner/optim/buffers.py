"""What a forward changes besides gradients, such as BatchNorm's statistics."""

from __future__ import annotations

import math
from operator import is_
from typing import Any, final

import torch
from torch import Tensor, nn

from runner.checkpoint.sound import is_statistic

LARGEST = torch.finfo(torch.float32).max
Slot = tuple[dict[str, Tensor | None], str]


@final
class Buffers:
    """A model's buffers, which go back with a skipped step, and whether a step has spoiled them.

    A model may put new tensors in a buffer's place, of another shape too, make one in its first
    forward or drop one. What has changed its kind is noticed by identity, which costs 30 ns each.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        # a scripted module has a view in place of a dict; what it holds stays where it is
        self.dicts = [
            dict(module._buffers.items())
            if isinstance(module, torch.jit.ScriptModule)
            else module._buffers
            for module in model.modules()
        ]
        self._scan()

    def now(self) -> list[Tensor]:
        """As they are now: some models put new tensors in their place, which may need gradients."""
        return _writable([buffers.get(name) for buffers, name in self.slots])

    def remember(self) -> None:
        """Before forward."""
        now = self._all()
        if now is None or not self._fits(now):
            self._scan()
            return
        if self.saved:
            with torch.no_grad():
                torch._foreach_copy_(self.saved, now[: len(self.saved)])
        if not all(map(is_, now, self.seen)):
            self._see()

    def restore(self, skipped: Tensor | None = None) -> None:
        """To what they were before forward; with a flag where it is 1, which the host never reads.

        But for a step that changed a buffer's kind: there it waits for the device.
        """
        now = self._all()
        if now is None or not self._fits(now):
            if skipped is None or skipped.item():
                self._reassign()
            return
        with torch.no_grad():
            if skipped is not None:
                skip = skipped.bool()
                for buffer, saved in zip(now, self.saved, strict=False):
                    torch.where(skip, saved, buffer, out=buffer)
            elif self.saved:
                torch._foreach_copy_(now[: len(self.saved)], self.saved)

    def are_finite(self) -> Tensor:
        """Whether the statistics that were finite at first are so now; a flag on the device.

        Finite gradients do not vouch for them: a batch of 1e20 has a variance of Inf, and is as
        small as any other once it is normalised. Other buffers may be Inf by design, as masks are.
        20 layers of BatchNorm take 21 to 200 us: 0.1 % of a step on a CPU.
        """
        with torch.no_grad():
            each = [buffers.get(name) for buffers, name in self.watched]
            flat = [buffer.reshape(-1) for buffer in each if buffer is not None]
            if not flat:  # all were dropped
                return torch.ones((), dtype=torch.bool, device=self.device)
            # end to end, since there is no fast kernel for the maximum of each; in the widest of
            # their types, where all that is finite stays so
            largest: Tensor = torch.linalg.vector_norm(torch.cat(flat), math.inf)
            return largest < math.inf  # NaN is not

    def _all(self) -> list[Any] | None:
        """What each slot holds; None for all where a buffer was registered or deleted since."""
        if sum(map(len, self.dicts)) != len(self.slots):
            return None
        return [buffers.get(name) for buffers, name in self.slots]

    def _fits(self, now: list[Tensor | None]) -> bool:
        """Whether each is as what was saved of it: in shape, type and place, or None."""
        if all(map(is_, now, self.seen)):
            return True  # as nearly always
        count = len(self.saved)
        return all(map(is_, now[count:], self.seen[count:])) and all(
            new is not None and _kind(new) == _kind(old)
            for new, old in zip(now[:count], self.saved, strict=False)
        )

    def _scan(self) -> None:
        """Save all buffers, also those whose dtype or shape has changed."""
        slots = [(buffers, name) for buffers in self.dicts for name in buffers]
        held = [slot for slot in slots if _is_writable(slot[0][slot[1]])]
        # the others are None, or cannot be written into: they can but be replaced
        self.slots: list[Slot] = held + [s for s in slots if not _is_writable(s[0][s[1]])]
        self.saved = [buffer.detach().clone() for buffer in self.now()]
        self._see()
        self.watched: list[Slot] = [
            slot
            for slot, saved in zip(held, self.saved, strict=True)
            if is_statistic(slot[1]) and saved.device == self.device and _is_sound(saved)
        ]

    def _see(self) -> None:
        """Remember which tensors are in the slots, but for those that hold on to activations."""
        self.seen = [
            None if i < len(self.saved) and buffer is not None and buffer.requires_grad else buffer
            for i, buffer in enumerate(buffers[name] for buffers, name in self.slots)
        ]

    def _reassign(self) -> None:
        """Copies take the places of those that do not fit, and what is new goes."""
        known = {(id(buffers), name) for buffers, name in self.slots}
        for buffers in self.dicts:
            for name in [name for name in buffers if (id(buffers), name) not in known]:
                del buffers[name]
        before = [*self.saved, *self.seen[len(self.saved) :]]
        with torch.no_grad():
            for i, ((buffers, name), old) in enumerate(zip(self.slots, before, strict=True)):
                now = buffers.get(name)
                if i >= len(self.saved) or old is None:
                    buffers[name] = old
                elif now is not None and _kind(now) == _kind(old):
                    now.copy_(old)
                else:
                    buffers[name] = old.clone()


def _writable(buffers: list[Tensor | None]) -> list[Tensor]:
    return [buffer for buffer in buffers if buffer is not None and _is_writable(buffer)]


def _is_writable(buffer: Tensor | None) -> bool:
    """Whether there is something, and each of its elements has a place of its own."""
    if buffer is None:
        return False
    return buffer.layout is not torch.strided or not any(
        step == 0 and size > 1 for step, size in zip(buffer.stride(), buffer.shape, strict=True)
    )


def _kind(buffer: Tensor) -> tuple[torch.Size, torch.dtype, torch.device, bool]:
    return buffer.shape, buffer.dtype, buffer.device, _is_writable(buffer)


def _is_sound(buffer: Tensor) -> bool:
    """Whether it holds finite numbers; waits for the device."""
    known = buffer.is_floating_point() and buffer.itemsize > 1 and buffer.numel() > 0
    return known and bool(buffer.isfinite().all())
