"""BatchNorm over several processes is BatchNorm over the whole batch. Each process is a thread."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from threading import Barrier, local
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from runner.scale.distributed.batchnorm import _forward, synchronise_batchnorm
from runner.scale.distributed.world import World

WAIT_S = 60
Together = Callable[[list[Callable[[], Any]]], list[Any]]


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Together:
    """Call each function in a thread of its own, as what one process of a group does."""
    mine, threads = local(), SimpleNamespace(size=0, barrier=Barrier(1), given={})

    def exchange(value: Tensor) -> list[Tensor]:
        threads.given[mine.rank] = value.clone()
        threads.barrier.wait(WAIT_S)
        every = [threads.given[rank] for rank in range(threads.size)]
        threads.barrier.wait(WAIT_S)
        return every

    def gather(every: list[Tensor], own: Tensor) -> None:
        for to, value in zip(every, exchange(own), strict=True):
            to.copy_(value)

    monkeypatch.setattr(dist, "all_gather", gather)
    monkeypatch.setattr(dist, "all_reduce", lambda own: own.copy_(sum(exchange(own))))
    monkeypatch.setattr(dist, "get_world_size", lambda: threads.size)

    def call(rank: int, function: Callable[[], Any]) -> Any:
        mine.rank = rank
        return function()

    def run(functions: list[Callable[[], Any]]) -> list[Any]:
        threads.size, threads.barrier = len(functions), Barrier(len(functions))
        with ThreadPoolExecutor(len(functions)) as pool:
            return list(pool.map(call, range(len(functions)), functions))

    return run


def synchronised(
    layer: nn.BatchNorm2d, is_stand_in: bool = False, samples: int = 2
) -> nn.BatchNorm2d:
    own = copy.deepcopy(layer)
    world = SimpleNamespace(is_stand_in=is_stand_in, count_samples=lambda: samples)
    own.forward = partial(_forward, own, world)  # type: ignore[method-assign, arg-type]
    return own


def twice(layer: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """What a forward that uses the layer twice, and its backward, leave behind."""
    x = x.detach().clone().requires_grad_()
    y = layer(layer(x))
    y.backward(dy)
    gradients = {name: weight.grad for name, weight in layer.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **gradients, **dict(layer.named_buffers())}  # type: ignore[dict-item]


def merged(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What is that of samples in a row, gradients of weights summed; buffers are the same."""
    whole = dict(parts[0])
    for name in ("y", "dx"):
        whole[name] = torch.cat([part[name] for part in parts])
    for name in whole.keys() & {"weight", "bias"}:
        whole[name] = torch.stack([part[name] for part in parts]).sum(0)
    for name in whole.keys() - {"y", "dx", "weight", "bias"}:
        assert all(torch.equal(part[name], whole[name]) for part in parts)
    return whole


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "how", [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}]
)
def test_uneven_parts_are_normalised_as_one_batch(
    together: Together, how: dict[str, Any], memory_format: torch.memory_format
) -> None:
    x, dy = (torch.randn(9, 6, 3, 3).to(memory_format=memory_format) for _ in "xd")
    for dtype, error in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, None)):
        layer = nn.BatchNorm2d(6, dtype=torch.promote_types(dtype, torch.float32), **how)
        if layer.affine:
            nn.init.normal_(layer.weight)
        cuts = [slice(0, 2), slice(2, 3), slice(3, 9)]
        low = [t.to(dtype) for t in (x, dy)]
        found = merged(
            together([partial(twice, synchronised(layer), *(t[c] for t in low)) for c in cuts])
        )
        exact = twice(copy.deepcopy(layer).double(), *(t.double() for t in low))
        due = twice(copy.deepcopy(layer), *low)
        assert found.keys() == due.keys()
        for name, value in due.items():
            assert found[name].dtype == value.dtype, name
            off = error or 2 * float((value - exact[name]).abs().max()) + 1e-6
            torch.testing.assert_close(found[name].double(), exact[name].double(), rtol=0, atol=off)


def test_a_mean_far_from_zero_costs_no_digits(together: Together) -> None:
    x = 1e4 + torch.randn(64, 2, 4, 4)
    layer = nn.BatchNorm2d(2, momentum=1.0)
    layers = [synchronised(layer) for _ in range(2)]
    together([partial(own, part) for own, part in zip(layers, x.chunk(2), strict=True)])
    due = x.double().var((0, 2, 3)).float()
    torch.testing.assert_close(layers[0].running_var, due, rtol=1e-4, atol=0)


def test_samples_that_stand_in_for_none_do_not_count(together: Together) -> None:
    layer = nn.BatchNorm2d(6).double()
    x, dy = torch.randn(4, 6, 2, 2).double(), torch.randn(4, 6, 2, 2).double()
    parts = [partial(twice, synchronised(layer), x[:3], dy[:3])]
    parts.append(partial(twice, synchronised(layer, True), x[3:], torch.zeros_like(dy[3:])))
    first, other = together(parts)
    torch.testing.assert_close(first, twice(copy.deepcopy(layer), x[:3], dy[:3]))
    assert not other["dx"].any() and torch.equal(other["running_var"], first["running_var"])


def test_the_gradient_is_the_derivative(together: Together) -> None:
    layer = synchronised(nn.BatchNorm2d(3).double())
    x = torch.randn(4, 3, 2, 2).double().requires_grad_()
    assert together([lambda: torch.autograd.gradcheck(layer, (x,))]) == [True]


def test_one_value_per_channel_and_evaluation_are_torchs(together: Together) -> None:
    layer, x = nn.BatchNorm2d(3), torch.randn(1, 3, 1, 1)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        together([partial(synchronised(layer, samples=1), x)])
    assert torch.equal(synchronised(layer.eval())(x), layer(x))


def test_a_micro_batch_of_one_value_per_channel_is_refused_by_all_processes(
    together: Together,
) -> None:
    layer, x = nn.BatchNorm2d(3), torch.randn(1, 3, 1, 1)

    def train(is_stand_in: bool) -> None:
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            synchronised(layer, is_stand_in, samples=1)(x)

    together([partial(train, False), partial(train, True)])
    # one sample in each of two processes, and one sample of four values
    together([partial(synchronised(layer), x), partial(synchronised(layer), x)])
    one = synchronised(layer, samples=1)
    together([partial(one, torch.randn(1, 3, 2, 2))])
    assert bool(one.running_var.isfinite().all())


@pytest.mark.parametrize("usable", [None, [1, 0, 0], [2, 1, 1]])
def test_a_process_knows_the_samples_of_each_micro_batch_of_all(usable: list[int] | None) -> None:
    worlds = [World.__new__(World) for _ in range(3)]
    for rank, world in enumerate(worlds):
        world.rank, world.size, world.usable_samples = rank, 3, usable
    for samples, micro_batch in product(range(3, 12), range(1, 5)):
        own = [samples] * 3 if usable is None else usable
        parts = [
            world.micro_batch_slices(samples, micro_batch, count)
            for world, count in zip(worlds, own, strict=True)
        ]
        for number, part in enumerate(zip(*parts, strict=True)):
            for world in worlds:
                world.begin_micro_batch(samples, micro_batch, number, is_stand_in=False)
                assert world.count_samples() == sum(each.stop - each.start for each in part)


def test_on_a_gpu_each_layer_is_normalised_by_the_same_code() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    device = SimpleNamespace(kind="cuda")
    builder: Any = SimpleNamespace(model=model, forward=model, device=device, world=World)
    synchronise_batchnorm(builder)
    assert builder.model is model and type(model[1]) is nn.BatchNorm2d
    forward: Any = model[1].forward
    assert forward.func is _forward


class _CheckBackwardArguments(TorchDispatchMode):
    """What CUDA's kernel asserts: the statistics of the forward, saved by the caller."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.native_batch_norm_backward.default:
            self.calls += 1
            mean, variance, saved_mean, saved_inverse_std = args[3:7]
            torch.testing.assert_close(saved_mean, mean)
            torch.testing.assert_close(saved_inverse_std, (variance + args[8]).rsqrt())
        return func(*args, **(kwargs or {}))


def test_the_kernel_of_the_backward_gets_the_saved_statistics_that_cuda_requires(
    together: Together,
) -> None:
    layer, mode = synchronised(nn.BatchNorm2d(3)), _CheckBackwardArguments()

    def train() -> None:
        y = layer(torch.randn(4, 3, 2, 2, requires_grad=True))
        with torch.autograd.set_multithreading_enabled(False), mode:
            y.sum().backward()

    together([train])
    assert mode.calls == 1


class _RefuseReads(TorchDispatchMode):
    """Raises where a number of a tensor comes to the host, which on a GPU waits."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_no_number_is_read_by_the_host(together: Together, momentum: float | None) -> None:
    def train(is_stand_in: bool) -> None:
        layer = synchronised(nn.BatchNorm2d(3, momentum=momentum), is_stand_in, samples=2)
        x = torch.randn(1, 3, 1, 2, requires_grad=True)
        with torch.autograd.set_multithreading_enabled(False), _RefuseReads():
            layer(x).sum().backward()

    together([partial(train, False), partial(train, True)])
