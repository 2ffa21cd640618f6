"""The optimizer step on a fake CUDA device: devices, dtypes, kernels' conditions, host reads.

`FakeTensorMode` computes shapes, dtypes and devices alone, so this needs no GPU. Fused kernels are
replaced by the conditions that torch checks in C++ (aten/src/ATen/native/cuda/Fused*.cu); a read by
the host, or a copy that it waits for, is an error unless its line says `# host sync: why`.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import runner
from runner.core.interfaces.batch import Batch
from runner.core.interfaces.processes import OneProcess
from runner.core.optim.buffers import BufferSnapshot
from runner.core.optim.optimizer import build_optimizer, find_optimizer
from runner.core.optim.optimizer_step import OptimizerStep
from runner.core.schemas.optimizer import OptimizerConfig
from runner.core.schemas.stability import StabilityConfig
from runner.core.techniques.fused_optimizer import fastest_implementation
from runner.core.train import step as training_step

CUDA = torch.device("cuda", 0)
FOLDER = str(Path(runner.__file__).parent)
OPTIMIZERS = [
    *["AdamW", "Adam", "SGD", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop"],
    *["Rprop", "Adafactor", "Muon"],
]
FUSED = ("AdamW", "Adam", "SGD", "Adagrad")
DTYPES = [
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.float16, 1024.0),
    (torch.float64, None),
]
CLIPS: list[dict[str, Any]] = [
    {"clip_norm": 1.0},
    {"clip_norm": 0.5, "clip_value": 0.1, "clip_adaptive": 0.1},
    {"clip_norm": 0.5, "clip_per_group": True},
    {"clip_norm": None},
]
# clip, average, micro-batches, schedule; each two successive ones have all of the last three
SETTINGS = [
    (0, None, 1, False),
    (3, 0.9, 1, True),
    (1, 0.9, 2, True),
    (2, None, 2, False),
]
READS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "is_nonzero")


class HostReads(TorchDispatchMode):
    """Raises at a read by the host, unless the line of runner that caused it is documented."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.documented, self.calls = 0, set[str](), list[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        self.calls.append(name)
        if name in READS:
            if args[0].device.type == "cpu":
                return 1  # such as a counter
            self.check(name)
            return 0  # such as a flag
        if name == "_to_copy" and not (kwargs or {}).get("non_blocking"):
            target = (kwargs or {}).get("device") or args[0].device
            if torch.device(target).type != args[0].device.type:
                self.check(name)
        return func(*args, **(kwargs or {}))

    def check(self, operation: str) -> None:
        """Raise unless the innermost line of runner documents the wait."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(FOLDER):
            frame = frame.f_back
        assert frame is not None, operation
        file, number = frame.f_code.co_filename, frame.f_lineno
        before, line = (linecache.getline(file, n).strip() for n in (number - 1, number))
        text = f"{before if before.startswith('#') else ''} {line}"
        _, _, reason = text.partition("# host sync: ")
        problem = f"{operation} waits for the device at step {self.step}: {file}:{number} {line}"
        assert reason and not reason.startswith("none"), problem
        if "at the start" in reason or "first save" in reason:
            assert self.step == 0, problem
        if "first update" in reason:
            assert self.step == 1, problem
        self.documented.add(reason)


class Net(nn.Module):
    """Two matrices, and with `plain` a vector and the buffers of a normalisation."""

    def __init__(self, dtype: torch.dtype, plain: bool) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(16, 8, device=CUDA, dtype=dtype))
        self.last = nn.Parameter(torch.empty(4, 16, device=CUDA, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(16, device=CUDA, dtype=dtype)) if plain else None
        self.register_buffer("running_mean", torch.zeros(16, device=CUDA, dtype=dtype))
        self.register_buffer("count", torch.zeros((), device=CUDA, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x @ self.first.T
        hidden = hidden if self.bias is None else hidden + self.bias
        self.running_mean.lerp_(hidden.detach().mean(0), 0.1)  # type: ignore[operator]
        self.count.add_(1)  # type: ignore[operator]
        return hidden @ self.last.T


class Objective:
    """A loss with the mean over counted targets, as of masked tokens."""

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    def weight(self, target: Tensor) -> Tensor:
        return (target > 0).sum()


def make_run(net: Net, update: OptimizerStep, parts: int) -> Any:
    """The attributes of a run that an eager step reads."""
    return SimpleNamespace(
        model=net,
        forward=net,
        update=update,
        objective=Objective(),
        micro_batch=8 // parts,
        progress=SimpleNamespace(step=0),
        recorder=SimpleNamespace(end_copy=lambda: None),
        device=SimpleNamespace(reseed=lambda seed: None, torch=CUDA),
        stopwatch=SimpleNamespace(split=lambda phase: None),
        train=SimpleNamespace(samples=lambda step: 8),
        seed=0,
        contexts=[],
        world=OneProcess(),
        is_shared=False,
        batch_validator=None,
        compilation=None,
        uninspected=False,
        bad_samples=None,
    )


def strides(tensor: Tensor) -> list[int]:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in pairs if size != 1]


def kernel_conditions(name: str, lists: tuple[int, ...], steps: int | None) -> Callable[..., None]:
    """A stand-in for a fused CUDA kernel, which raises where the kernel does."""

    def check(*args: Any, **options: Any) -> None:
        tensors = [args[i] for i in lists if args[i]]
        first = tensors[0][0]
        for column in zip(*tensors, strict=True):
            for tensor in column:
                if (tensor.dtype, tensor.device) != (first.dtype, first.device):
                    raise RuntimeError(f"{name}: {tensor.dtype} and {first.dtype}")
                if strides(tensor) != strides(column[0]):
                    raise RuntimeError(f"{name}: strides {tensor.stride()}")
        for key in ("grad_scale", "found_inf", "lr"):
            value = options.get(key)
            if isinstance(value, Tensor):
                if value.dtype is not torch.float32:
                    raise RuntimeError(f"{key}: expected scalar type Float, found {value.dtype}")
                if value.device != first.device or value.numel() != 1:
                    raise RuntimeError(f"{key} must be on the device of the weights")
        for step in args[steps] if steps is not None else ():
            if step.dtype is not torch.float32 or step.device != first.device:
                raise RuntimeError(f"{name}: step is {step.dtype} on {step.device}")

    return check


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostReads]:
    """A fake CUDA device whose reads are checked, with its kernels' conditions."""
    for name, *places in (
        ("_fused_adamw_", (0, 1, 2, 3), 5),
        ("_fused_adam_", (0, 1, 2, 3), 5),
        ("_fused_sgd_", (0, 1, 2), None),
        ("_fused_adagrad_", (0, 1, 2), 3),
    ):
        monkeypatch.setattr(torch, name, kernel_conditions(name, *places))  # type: ignore[arg-type]
    reads = HostReads()
    copy = Tensor.copy_

    def copy_(self: Tensor, other: Tensor, non_blocking: bool = False) -> Tensor:
        # a build for CPUs has no device guard, which the C++ of copy_ needs
        devices = {self.device.type, other.device.type}
        if "cuda" not in devices:
            return copy(self, other, non_blocking)
        if len(devices) > 1 and not non_blocking:
            reads.check("copy_")
        torch.broadcast_shapes(self.shape, other.shape)
        reads.calls.append("copy_")
        return self

    def backward(self: Tensor) -> None:  # autograd's thread of a device needs the device
        for parameter in PARAMETERS:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            else:
                parameter.grad.add_(torch.empty_like(parameter))

    def slice_rows(batch: Batch, rows: slice) -> Batch:  # indexing needs the guard, too
        first, count = rows.start, rows.stop - rows.start
        return tuple(tensor.narrow(0, first, count) for tensor in batch)  # type: ignore[return-value]

    monkeypatch.setattr(training_step, "slice_rows", slice_rows)
    monkeypatch.setattr(Tensor, "copy_", copy_)
    monkeypatch.setattr(Tensor, "backward", backward)
    with FakeTensorMode():
        yield reads
    PARAMETERS.clear()


PARAMETERS: list[nn.Parameter] = []


def make_steps(
    name: str, dtype: torch.dtype, scale: float | None, settings: Any, reads: HostReads
) -> OptimizerStep:
    """Two steps of the optimizer, as a run makes them."""
    clip, ema, parts, scheduled = settings
    config = OptimizerConfig(name=name, lr=0.05)
    if name == "SGD" and scheduled:
        config.options = {"momentum": 0.9}
    if CLIPS[clip].get("clip_per_group"):
        config.groups = [{"match": "last", "lr": 0.1}]
    with reads, torch.no_grad():  # a graph of a device needs the device
        reads.step = 0
        net = Net(dtype, name != "Muon")
        PARAMETERS[:] = net.parameters()
        cls = find_optimizer(name)
        how, reason = fastest_implementation(cls, net)
        assert how == {"fused": True} if name in FUSED else "fused" not in how, reason
        update = OptimizerStep(
            *(net, build_optimizer(config, cls, net, how), StabilityConfig(**CLIPS[clip]), 0.05),
            [1.0, 0.5, 0.2] if scheduled else [1.0],
            loss_scale=scale,
            ema=ema,
        )
        run = make_run(net, update, parts)
        batch = (torch.empty(8, 8, device=CUDA, dtype=dtype), torch.empty(8, 4, device=CUDA))
        for reads.step in (1, 2):
            step = training_step.forward_backward(run, batch)
            assert step.skipped.dtype is torch.float32
            update.apply(step.grad_norm, step.skipped)
            run.progress.step = reads.step
    return update


@pytest.mark.parametrize(("dtype", "scale"), DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_on_cuda_has_no_host_read_that_its_line_does_not_document(
    name: str, dtype: torch.dtype, scale: float | None, fake_cuda: HostReads
) -> None:
    first = {torch.float64: 0, torch.bfloat16: 1, torch.float16: 1}.get(dtype)
    for settings in SETTINGS if first is None else SETTINGS[first::2]:
        update = make_steps(name, dtype, scale, settings, fake_cuda)
        assert update.in_kernel == (name in FUSED)
        # the documented waits of a whole run: at each step, or at the first update
        waits_each_step = name == "Adafactor" or (name == "Muon" and settings[3])
        assert update.host_waits == waits_each_step


def test_the_check_of_host_reads_sees_reads_and_copies(fake_cuda: HostReads) -> None:
    net = Net(torch.float32, plain=True)
    cases: list[Callable[[], object]] = [
        lambda: net.count.item(),
        lambda: bool(net.running_mean.sum()),  # type: ignore[operator]
        lambda: net.running_mean.cpu(),  # type: ignore[operator]
        lambda: torch.ops.aten.nonzero.default(net.running_mean),
        lambda: torch.zeros(3).to(CUDA),
    ]
    with fake_cuda, torch.no_grad():
        for case in cases:
            with pytest.raises(AssertionError):
                case()


def test_a_skipped_step_restores_100_buffers_with_as_many_launches_as_two(
    fake_cuda: HostReads,
) -> None:
    counts = []
    for layers in (1, 50):
        with fake_cuda, torch.no_grad():
            net = nn.ModuleList(Net(torch.float32, plain=True) for _ in range(layers))
            buffers = BufferSnapshot(net, CUDA)
            skipped = torch.zeros((), device=CUDA)
            fake_cuda.calls.clear()
            buffers.save()
            buffers.restore(skipped)
        launches = [name for name in fake_cuda.calls if name != "detach"]
        counts.append(len(launches))
    assert counts[0] == counts[1] <= 10
