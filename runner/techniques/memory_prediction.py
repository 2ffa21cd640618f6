"""How much memory a step will take, from tracing one over tensors that have no data.

Forward, loss, backward and update run once on fake tensors, which know their sizes and hold
nothing, while every storage is followed from its making to its end. A tenth of a second or less,
whatever the size, and it sees what eager execution allocates but not what kernels use inside.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from runner.data.batch import Batch, call, count
from runner.data.nested import tensors, tree_map
from runner.device import memory
from runner.models.preserved_state import preserve_state
from runner.techniques.base import RunBuilder

if TYPE_CHECKING:
    from runner.device.device import Device

MIB = 2**20
HOLES = 2.0  # times its tensors that a process was seen to hold at worst: the heap's holes
MOST_SAMPLED = 8  # samples that are fetched, to see what one is like


@dataclass(frozen=True)
class Prediction:
    """Bytes that a step holds at its peak, by what they are for."""

    samples: int  # per backward
    parameters: int  # and buffers; they are there already
    gradients: int
    optimizer: int  # its state and the running average of the weights
    copies: int  # what a skipped step and a roll-back go back to
    activations: int  # batch, activations and temporaries: what the peak is beyond the rest
    saved: int  # of these, what is held from forward to backward

    @property
    def peak(self) -> int:
        """All of it."""
        return self.parameters + self.needed

    @property
    def needed(self) -> int:
        """What has to be allocated on top of a model that is built."""
        return self.gradients + self.optimizer + self.copies + self.activations

    def fits(self, device: Device, free: int, share: float) -> bool:
        """Whether a share of what is free is enough; a CPU's heap wants a reserve."""
        return self.needed * (HOLES if device.kind == "cpu" else 1) <= share * free

    def beside(self, free: int) -> str:
        """What has to be allocated and what is free, for a person."""
        return f"{self.needed / MIB:,.0f} MiB predicted, {free / MIB:,.0f} MiB free"

    def peak_on(self, device: Device) -> int:
        """What the process (on a CPU) or the device will hold at most, all else included."""
        held = memory.process_bytes() if device.kind == "cpu" else memory.peak_device_bytes(device)
        return held + self.needed


def predict(draft: RunBuilder, samples: int | None = None) -> Prediction:
    """The memory of a step with `samples` (None: `draft.micro_batch`) per backward.

    Nothing of the model, its gradients or any generator changes. What the model raises, of fake
    tensors too, passes through.
    """
    samples = min(samples or draft.micro_batch, draft.batch_size)
    batch: Batch = draft.sample(min(draft.batch_size, MOST_SAMPLED))
    for place in draft.placements:
        batch = place(batch)
    with _training_step(draft):
        peak, saved, state = _trace(draft, batch, samples)
    model = draft.model
    gradients = _bytes(p for p in model.parameters() if p.requires_grad)
    parameters, buffers = _bytes(model.parameters()), _bytes(model.buffers())
    optimizer = state + (gradients if draft.ema else 0)
    copies = buffers
    if draft.device.kind == "cpu":  # elsewhere checkpoints are copied off the device
        copies += parameters + buffers + optimizer
    held = _bytes(tensors(batch)) * draft.batch_size // count(batch[1])
    return Prediction(
        samples=samples,
        parameters=parameters + buffers,
        gradients=gradients,
        optimizer=optimizer,
        copies=copies,
        activations=max(0, peak - gradients) + held,
        saved=saved,
    )


@contextmanager
def _training_step(draft: RunBuilder) -> Iterator[None]:
    """As in a training step; restores the model, but for the numbers that are replaced by fakes."""
    model = draft.model
    with (
        preserve_state(
            model,
            draft.forward,
            draft.objective,
            device=draft.device.torch,
            safe=[*model.parameters(), *model.buffers()],
            complete=True,
        ),
        torch.autograd.set_detect_anomaly(False),  # it would read every number
        torch.enable_grad(),
        ExitStack() as stack,
    ):
        for context in draft.contexts:
            stack.enter_context(context())
        model.train()
        yield


def _trace(draft: RunBuilder, batch: Batch, samples: int) -> tuple[int, int, int]:
    """Bytes at the peak, held after the forward, and of the optimizer's state; all fake."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        _replace_by_fakes(draft.model, mode)
        few = tree_map(batch, lambda t: _resized(mode.from_tensor(t), samples))
        live, saved = Live(), 0
        live.leave_out([*draft.model.parameters(), *draft.model.buffers(), *tensors(few)])
        with live:
            for _ in range(1 if samples == draft.batch_size else 2):  # then gradients are there
                loss = draft.objective(call(draft.forward, few[0]), few[1])
                saved = saved or live.now
                torch.autograd.backward(loss)
                del loss
        optimizer = draft.make_optimizer(draft.model)
        with suppress(Exception):  # some read a number that is not there; the state is, by then
            optimizer.step()
        state = _bytes(v for entries in optimizer.state.values() for v in entries.values())
    return live.peak, saved, state


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the bytes of all storages that operators make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """The operator's own result, its storages noted."""
        out = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self.note, out)
        return out

    def note(self, tensor: Tensor) -> Tensor:
        """Count the tensor's storage from now until it is gone."""
        if tensor.layout is not torch.strided:  # sparse: its values were seen when made
            return tensor
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        known = self._seen.get(key)
        if known is None or known() is not storage:

            def release(_: object) -> None:
                self.now -= size
                self._seen.pop(key, None)

            self._seen[key] = weakref.ref(storage, release)
            self.now += size
            self.peak = max(self.peak, self.now)
        return tensor

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Not count these: they were there before."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._seen[id(storage)] = weakref.ref(storage)


def _replace_by_fakes(model: nn.Module, mode: FakeTensorMode) -> None:
    """Fake parameters and buffers; tied weights stay one."""
    fakes: dict[Tensor, Tensor] = {}
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError("a TorchScript module takes no fake tensors")
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is not None:
                    if tensor not in fakes:
                        fakes[tensor] = mode.from_tensor(tensor)
                    slots[name] = fakes[tensor]  # type: ignore[assignment]


def _resized(tensor: Tensor, samples: int) -> Tensor:
    """As many samples, in the same memory order."""
    if tensor.ndim == 0:
        return tensor
    size = (samples, *tensor.shape[1:])
    return torch.empty_strided(size, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _bytes(tensors: Iterable[Any]) -> int:
    """Of distinct storages; tied weights count once."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())
