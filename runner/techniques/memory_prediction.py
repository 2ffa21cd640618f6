"""How much memory a step will take, from tracing one over tensors that have no data.

Forward, loss, backward and update run once on fake tensors, which know their sizes and hold
nothing, while every storage is followed from its making to its end. A tenth of a second or less,
whatever the size, and it sees what eager execution allocates but not what kernels use inside.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from runner.data.batch import Batch, call, count
from runner.device import memory
from runner.models.preserved_state import preserve_state
from runner.techniques.base import RunBuilder

if TYPE_CHECKING:
    from runner.device.device import Device

log = logging.getLogger("runner")

SMALL = (2, 4)  # samples of the real steps that stand in for fake ones; BatchNorm refuses one
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
    extrapolated: bool = False  # from small real steps: the model refuses fake tensors

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


def predict(draft: RunBuilder, samples: int | None = None, *, live: bool = False) -> Prediction:
    """The memory of a step with `samples` (None: `draft.micro_batch`) per backward.

    Nothing of the model, its gradients or any generator changes. What the model itself raises
    passes through; of a `live` model, which is in training, so does what it raises of fake tensors:
    no real step is made with it.
    """
    samples = min(samples or draft.micro_batch, draft.batch_size)
    batch: Batch = draft.sample(min(draft.batch_size, MOST_SAMPLED))
    for place in draft.placements:
        batch = place(batch)
    try:
        # of what a model keeps elsewhere, the fake mode changes real numbers if all in it are real
        with _as_it_was(draft, safe=[*draft.model.parameters(), *draft.model.buffers()]):
            trace, state = _fake(draft, batch, samples)
        extrapolated = False
    except Exception as error:
        if live:
            raise
        log.debug("fake tensors are refused, small real steps instead: %s", error)
        with _as_it_was(draft):
            (few, a), (more, b) = ((n, _real(draft, batch, n)) for n in SMALL)
        trace = a.towards(b, (samples - few) / (more - few))
        state, extrapolated = _guess(draft), True
    trainable = [p for p in draft.model.parameters() if p.requires_grad]
    gradients, buffers = _bytes(trainable), _bytes(draft.model.buffers())
    optimizer = state + (gradients if draft.ema else 0)
    copies = buffers
    if draft.device.kind == "cpu":  # elsewhere checkpoints are copied off the device
        copies += _bytes(draft.model.parameters()) + buffers + optimizer
    held = _bytes(_tensors(batch)) * draft.batch_size // count(batch[1])
    return Prediction(
        samples=samples,
        parameters=_bytes(draft.model.parameters()) + buffers,
        gradients=gradients,
        optimizer=optimizer,
        copies=copies,
        activations=max(0, trace.peak - gradients) + held,
        saved=trace.saved,
        extrapolated=extrapolated,
    )


@dataclass(frozen=True)
class Trace:
    """Bytes allocated in a forward and backward."""

    peak: int
    saved: int  # after the forward

    def towards(self, other: Trace, times: float) -> Trace:
        """So many times the way to `other`; a little too much rather than too little.

        What is saved grows in a straight line. The peak does so too once that is most of it, and
        of a few samples the gradients may be.
        """
        more = other.saved - self.saved
        return Trace(
            round(self.peak + times * max(more, other.peak - self.peak)),
            round(self.saved + times * more),
        )


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

            def gone(_: object) -> None:
                self.now -= size
                self._seen.pop(key, None)

            self._seen[key] = weakref.ref(storage, gone)
            self.now += size
            self.peak = max(self.peak, self.now)
        return tensor

    def leave_out(self, tensors: Iterator[Tensor]) -> None:
        """Not count these: they were there before."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._seen[id(storage)] = weakref.ref(storage)


def _fake(draft: RunBuilder, batch: Batch, samples: int) -> tuple[Trace, int]:
    """The trace over fake tensors, and the bytes of the optimizer's state."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    parts = -(-draft.batch_size // samples)
    with mode:
        _swap(draft.model, mode)
        few = _map(batch, lambda t: _resized(mode.from_tensor(t), samples))
        trace = _trace(draft, few, min(parts, 2))  # from the second on, gradients are there
        optimizer = draft.make_optimizer(draft.model)
        with suppress(Exception):  # some read a number that is not there; the state is, by then
            optimizer.step()
        state = _bytes(v for s in optimizer.state.values() for v in s.values())
    return trace, state


def _swap(model: nn.Module, mode: FakeTensorMode) -> None:
    """Fake parameters and buffers; `_as_it_was` puts the real ones back.

    Each module once, whatever names it goes by; tied weights stay one.
    """
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


def _real(draft: RunBuilder, batch: Batch, samples: int) -> Trace:
    """The trace over real tensors; `_as_it_was` puts back what it changes."""
    for parameter in draft.model.parameters():
        parameter.grad = None
    repeated = _map(batch, lambda t: _resized(t, samples))
    return _trace(draft, repeated, min(2, -(-draft.batch_size // samples)))


def _trace(draft: RunBuilder, batch: Batch, passes: int) -> Trace:
    live, saved = Live(), 0
    live.leave_out(draft.model.parameters())
    live.leave_out(draft.model.buffers())
    live.leave_out(iter(_tensors(batch)))
    with live:
        for _ in range(passes):
            loss = draft.objective(call(draft.forward, batch[0]), batch[1])
            saved = saved or live.now
            torch.autograd.backward(loss)
            del loss
    return Trace(live.peak, saved)


@contextmanager
def _as_it_was(draft: RunBuilder, safe: Iterable[Tensor] = ()) -> Iterator[None]:
    """As in a training step; puts back all that it changes, but for the numbers in `safe`."""
    with (
        preserve_state(
            draft.model,
            draft.forward,
            draft.objective,
            device=draft.device.torch,
            safe=safe,
            complete=True,
        ),
        torch.autograd.set_detect_anomaly(False),  # it would read every number
        torch.enable_grad(),
        ExitStack() as stack,
    ):
        for context in draft.contexts:
            stack.enter_context(context())
        draft.model.train()
        yield


def _guess(draft: RunBuilder) -> int:
    """Two numbers for each weight, as Adam keeps."""
    return 2 * _bytes(p for p in draft.model.parameters() if p.requires_grad)


def _resized(tensor: Tensor, samples: int) -> Tensor:
    """As many samples, in the same memory order; of real ones the values are repeated."""
    if tensor.ndim == 0:
        return tensor
    if type(tensor) is Tensor:
        return tensor[torch.arange(samples, device=tensor.device) % len(tensor)]
    size = (samples, *tensor.shape[1:])
    return torch.empty_strided(size, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, dict):
        return {key: _map(item, change) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_map(item, change) for item in value)
    return change(value) if isinstance(value, Tensor) else value


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _map(value, lambda t: found.append(t) or t)  # type: ignore[func-returns-value]
    return found


def _bytes(tensors: Any) -> int:
    """Of distinct storages; tied weights count once."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())
