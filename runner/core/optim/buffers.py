"""Buffers that a forward changes, such as BatchNorm's statistics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from runner.core.checkpoint.finite_checks import is_statistic

WATCHED_STEPS = 2  # in which all frozen parameters are watched by value
MAX_COPIED_BYTES = 2**28
LARGEST = torch.finfo(torch.float32).max
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by their bytes."""
OBJECTIVE = "objective:"  # begins the names of an objective's modules
Slot = tuple[dict[str, Tensor | None], str]


@final
class BufferSnapshot:
    """Saves a model's buffers, restores them after a skipped step, and checks that they are finite.

    A model may replace a buffer, also by another shape, create one in its first forward or drop
    one. Such changes are noticed by identity, which costs 30 ns per buffer.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, frozen: bool = True, objective: object = None
    ) -> None:
        """`frozen` covers also frozen parameters, which a forward may move."""
        self.device, self.model, self.objective = device, model, objective
        self.frozen = FrozenParameters(model if frozen else None)
        self.initial = {
            name: (buffer.shape, None if persistent else buffer.detach().clone())
            for name, buffer, persistent in self._named_buffers()
            if buffer is not None
        }
        parts = [*named_modules(model, objective)]
        own = [b for path, m in parts if path.startswith(OBJECTIVE) for b in m.buffers(False)]
        if sum(b.numel() * b.element_size() for b in own) > MAX_COPIED_BYTES // 16:
            parts = [*model.named_modules()]  # others are saved, but not copied in each step
        # a scripted module returns a view, not a dict; its buffers are not replaced
        self.buffer_dicts = [
            dict(m._buffers.items()) if isinstance(m, torch.jit.ScriptModule) else m._buffers
            for _, m in parts
        ]
        self._save_all()

    def current(self) -> list[Tensor]:
        """Return the current tensors: some models replace them, also by ones with gradients."""
        found = [buffers.get(name) for buffers, name in self.slots]
        return [buffer for buffer in found if buffer is not None and _is_writable(buffer)]

    def changing(self) -> list[Tensor]:
        """Return the current buffers, and the frozen parameters that a forward moves."""
        return self.current() + self.frozen.current()

    def save(self) -> None:
        """Save the buffers, before forward."""
        self.frozen.save()
        current = self._current_by_slot()
        if current is None or not self._matches_saved(current):
            self._save_all()
            return
        if not all(map(is_, current, self.last_tensors)):
            self._record_tensors()
        if self.groups:
            with torch.no_grad():
                for buffers, saved in self.groups:
                    torch._foreach_copy_(saved, buffers)

    def restore(self, skipped: Tensor | None = None) -> None:
        """Restore the saved buffers; with a flag only if it is 1, without a host sync.

        After a step that changed a buffer's shape, dtype or device the host reads the flag.
        """
        self.frozen.restore(skipped)
        current = self._current_by_slot()
        if current is None or not self._matches_saved(current):
            if skipped is None or skipped.item():  # host sync: a forward changed a buffer's shape
                self._reassign_saved()
            return
        if not self.saved:
            return
        usual = all(map(is_, current, self.last_tensors))
        groups = self.groups if usual else _group_by_type(current, self.saved)
        with torch.no_grad():
            for buffers, saved in groups:
                if skipped is None:
                    torch._foreach_copy_(buffers, saved)
                else:
                    restore_where(skipped, buffers, saved, lists=skipped.device.type != "cpu")

    def _named_buffers(self) -> Iterator[tuple[str, Tensor | None, bool]]:
        """Yield name, tensor and whether the model's state has it, of all but scripted ones."""
        for path, module in named_modules(self.model, self.objective):
            in_model = not path.startswith(OBJECTIVE)
            if not isinstance(module, torch.jit.ScriptModule):
                for name, buffer in module._buffers.items():
                    saved = in_model and name not in module._non_persistent_buffers_set
                    yield f"{path}.{name}" if path else name, buffer, saved

    def statistics(self) -> list[Tensor]:
        """Return the current statistics of those that were finite at first."""
        buffers = [buffers.get(name) for buffers, name in self.statistic_slots]
        return [buffer for buffer in buffers if buffer is not None]

    def are_finite(self) -> Tensor:
        """Return a 0-d bool on the device: statistics that were finite at first are so now.

        Gradients do not show it: a batch of 1e20 has a variance of Inf and normalises to small
        values. Other buffers may be Inf by design, as masks are. 20 layers of BatchNorm take 21 to
        200 µs: 0.1 % of a step on a CPU.
        """
        with torch.no_grad():
            flat = [buffer.reshape(-1) for buffer in self.statistics()]
            if not flat:  # the model dropped all of them
                return torch.ones((), dtype=torch.bool, device=self.device)
            # concatenated, since there is no fast kernel for the maximum of each; cat promotes to
            # the widest dtype, where finite values stay finite
            largest: Tensor = torch.linalg.vector_norm(torch.cat(flat), math.inf)
            return largest < math.inf  # NaN: False

    def _current_by_slot(self) -> list[Any] | None:
        """Return the buffers by slot, or None if one was registered or deleted since."""
        if sum(map(len, self.buffer_dicts)) != len(self.slots):
            return None
        return [buffers.get(name) for buffers, name in self.slots]

    def _matches_saved(self, current: list[Tensor | None]) -> bool:
        """Whether all buffers have the shape, dtype and device of their saved copies."""
        count = len(self.saved)
        if all(map(is_, current, self.last_tensors)):  # usual case; `resize_` keeps the identity
            return [buffer.shape for buffer in current[:count] if buffer is not None] == self.shapes
        return all(map(is_, current[count:], self.last_tensors[count:])) and all(
            new is not None and _signature(new) == _signature(old)
            for new, old in zip(current[:count], self.saved, strict=False)
        )

    def _save_all(self) -> None:
        """Save all buffers anew, as after a change of their number, dtype or shape."""
        slots = [(buffers, name) for buffers in self.buffer_dicts for name in buffers]
        writable = [slot for slot in slots if _is_writable(slot[0][slot[1]])]
        # the others are None or not writable, and can only be replaced
        self.slots: list[Slot] = writable + [s for s in slots if not _is_writable(s[0][s[1]])]
        self.saved = [buffer.detach().clone() for buffer in self.current()]
        self.shapes = [saved.shape for saved in self.saved]
        self._record_tensors()
        self.statistic_slots: list[Slot] = [
            slot
            for slot, saved in zip(writable, self.saved, strict=True)
            if is_statistic(slot[1]) and saved.device == self.device and _is_finite(saved)
        ]

    def _record_tensors(self) -> None:
        """Record the tensors in the slots, except those that keep activations alive."""
        self.last_tensors = [
            None if i < len(self.saved) and buffer is not None and buffer.requires_grad else buffer
            for i, buffer in enumerate(buffers[name] for buffers, name in self.slots)
        ]
        current = [buffers[name] for buffers, name in self.slots[: len(self.saved)]]
        self.groups = _group_by_type(current, self.saved)

    def changed(self) -> dict[str, Any]:
        """Return new shapes, new and dropped buffers, and non-persistent values: for a state."""
        changed: dict[str, Any] = {}
        now = {n: (b, persistent) for n, b, persistent in self._named_buffers()}
        for name in self.initial.keys() | now.keys():
            shape, value = self.initial.get(name, (None, None))
            buffer, persistent = now.get(name, (None, True))
            new_shape = None if buffer is None else buffer.shape
            shapes = ("was", shape), ("shape", new_shape)
            entry: dict[str, Any] = {k: None if s is None else [*s] for k, s in shapes}
            if buffer is not None and not persistent:
                if value is None or shape != new_shape or not same_values(value, buffer):
                    changed[name] = {**entry, "value": buffer}
            elif shape != new_shape:
                changed[name] = {**entry, "value": None}
        return changed

    def _reassign_saved(self) -> None:
        """Replace buffers that changed by copies of the saved ones, and delete new ones."""
        known_slots = {(id(buffers), name) for buffers, name in self.slots}
        for buffers in self.buffer_dicts:
            for name in [name for name in buffers if (id(buffers), name) not in known_slots]:
                del buffers[name]
        originals = [*self.saved, *self.last_tensors[len(self.saved) :]]
        with torch.no_grad():
            pairs = zip(self.slots, originals, strict=True)
            for i, ((buffers, name), original) in enumerate(pairs):
                current = buffers.get(name)
                if i >= len(self.saved) or original is None:
                    buffers[name] = original
                elif current is not None and _signature(current) == _signature(original):
                    current.copy_(original)
                else:
                    buffers[name] = original.clone()


@final
class FrozenParameters:
    """Frozen parameters that a forward moves, as that of an EMA teacher does.

    In the first steps all are saved, if they are small, later those that moved. A move is noticed
    by the tensor's version or memory, and in the first steps also by its values.
    """

    def __init__(self, model: nn.Module | None) -> None:
        modules = [] if model is None else [*model.modules()]
        slots = {
            id(parameter): (module._parameters, name)
            for module in modules
            if not isinstance(module, torch.jit.ScriptModule)
            for name, parameter in module._parameters.items()
            if parameter is not None and not parameter.requires_grad and _is_plain(parameter)
        }
        self.slots = list(slots.values())
        self.saved: dict[int, Tensor] = {}  # by the slot's number
        self.moved: set[int] = set()
        self.last: list[tuple[Tensor, int, int]] = []
        size = sum(p.nbytes for p in self._tensors())
        self.saves = 0
        self.watched_steps = WATCHED_STEPS if size <= MAX_COPIED_BYTES else 0

    @property
    def undecided(self) -> bool:
        """Whether it is not yet known which of them move."""
        return len(self.slots) > 0 and self.saves <= self.watched_steps

    def current(self) -> list[Tensor]:
        """Return those that move."""
        tensors = self._tensors()
        return [tensors[number] for number in sorted(self.moved)]

    def save(self) -> None:
        """Save those that move, before forward."""
        if not self.slots:
            return
        tensors = self._tensors()
        now = [(p, p._version, p.data_ptr()) for p in tensors]
        for number, (new, old) in enumerate(zip(now, self.last, strict=False)):
            if number in self.moved:
                continue
            same = new[0] is old[0] and new[1:] == old[1:]
            if same and number in self.saved:  # `.data` changed in place has the same version
                same = torch.equal(new[0], self.saved[number])  # host sync: in the first steps
            if not same:
                self.moved.add(number)
        self.last = now
        numbers = self.moved if self.saves >= self.watched_steps else range(len(tensors))
        self.saved = {number: tensors[number].detach().clone() for number in numbers}
        self.saves += 1

    def restore(self, skipped: Tensor | None) -> None:
        """Restore the saved ones; with a flag only if it is 1, without a host sync."""
        tensors = self._tensors()
        with torch.no_grad():
            for number, saved in self.saved.items():
                # `.data` keeps the version, by which the next save notices a move
                data = tensors[number].data
                if skipped is None:
                    data.copy_(saved)
                else:
                    torch.where(skipped.bool(), saved, data, out=data)

    def forget_versions(self) -> None:
        """Do not take the loading of weights for a move."""
        self.last = []

    def _tensors(self) -> list[Tensor]:
        found = [(slot, slot[0].get(slot[1])) for slot in self.slots]
        tensors: list[Tensor] = [parameter for _, parameter in found if parameter is not None]
        if len(tensors) < len(found):  # the model dropped one; take the others for moved
            self.slots = [slot for slot, parameter in found if parameter is not None]
            self.saved, self.last, self.moved = {}, [], set(range(len(tensors)))
        return tensors


def named_modules(model: nn.Module, objective: object) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model, and others that an objective is or keeps, once and by name."""
    seen = set[nn.Module]()
    yield from model.named_modules(seen)
    own = getattr(objective, "__dict__", {})
    parts = {"": objective} if isinstance(objective, nn.Module) else own
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            yield from part.named_modules(seen, f"{OBJECTIVE}{name}")


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether shapes and all bits are equal, so that NaN equals itself. Host sync."""
    if a.dtype != b.dtype or a.shape != b.shape or a.layout is not torch.strided:
        return False
    pair = [x.detach().to(b.device).contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return torch.equal(*pair)  # host sync: where a checkpoint is saved


def restore_where(skipped: Tensor, buffers: list[Tensor], saved: list[Tensor], lists: bool) -> None:
    """Copy `saved` to `buffers` if the flag is 1, bit by bit; all are of one dtype. No host sync.

    `lists` takes three passes in a few kernels, else one kernel each, which is faster on a CPU.
    Integers wrap around, so that their difference restores any bits; floats with a NaN would not.
    """
    if not lists or saved[0].dtype not in INTEGERS.values():
        for buffer, old in zip(buffers, saved, strict=True):
            torch.where(skipped.bool(), old, buffer, out=buffer)
        return
    differences = torch._foreach_sub(saved, buffers)
    torch._foreach_mul_(differences, skipped.to(saved[0].dtype))
    torch._foreach_add_(buffers, differences)


def _group_by_type(
    buffers: Sequence[Tensor | None], saved: list[Tensor]
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Return buffers and their saved copies by dtype and device, as integers where possible.

    Kernels for lists are fast only if all have one dtype. The views share the buffers' memory.
    """
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for buffer, old in zip(buffers, saved, strict=False):
        if buffer is None:
            continue
        pair = [buffer.detach(), old]
        if old.itemsize in INTEGERS and all(map(_is_plain, pair)):
            pair = [tensor.view(INTEGERS[old.itemsize]) for tensor in pair]
        group = groups.setdefault((pair[1].dtype, old.device), ([], []))
        group[0].append(pair[0])
        group[1].append(pair[1])
    return list(groups.values())


def _is_plain(tensor: Tensor) -> bool:
    """Whether its memory can be viewed as integers."""
    is_lazy = tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    is_plain = tensor.layout is torch.strided and not is_lazy
    return is_plain and not is_traceable_wrapper_subclass(tensor)


def _is_writable(buffer: Tensor | None) -> bool:
    """Whether the buffer is dense, and no two of its elements share memory."""
    if buffer is None:
        return False
    return buffer.layout is torch.strided and not any(
        stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)
    )


def _signature(buffer: Tensor) -> tuple[torch.Size, torch.dtype, torch.device, bool]:
    return buffer.shape, buffer.dtype, buffer.device, _is_writable(buffer)


def _is_finite(buffer: Tensor) -> bool:
    is_checkable = buffer.is_floating_point() and buffer.itemsize > 1 and buffer.numel() > 0
    return is_checkable and bool(buffer.isfinite().all())  # host sync: a buffer's first save
