"""Pinned memory of snapshots has the size of its tensors."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from runner.core.checkpoint.snapshot import pinned_tensor_like

SHAPE = (3, 2**18 + 25)  # of fp32: a little more than 3 MiB


class FakeDriver:
    """Records what is registered and not yet unregistered."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.registered = status, dict[int, int]()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self.status:
            self.registered[address] = nbytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def cuda_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    with FakeTensorMode():
        return torch.empty(*shape, dtype=dtype, device="cuda")


def host_tensor(tensor: Tensor, memory_format: Any = torch.contiguous_format) -> Tensor:
    return pinned_tensor_like(tensor, memory_format)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_large_tensor_gets_pinned_memory_of_its_size_until_it_is_freed(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    source = cuda_tensor(8 * SHAPE[0], SHAPE[1], dtype=dtype)
    copy = host_tensor(source)
    assert list(driver.registered.items()) == [(copy.data_ptr(), source.nbytes)]
    assert copy.untyped_storage().nbytes() == source.nbytes
    assert (copy.dtype, copy.shape, copy.device.type) == (dtype, source.shape, "cpu")
    copy.fill_(1)
    view = copy[1:]
    del copy
    gc.collect()
    assert driver.registered, "a view still uses it"
    assert (view == 1).all()
    del view
    gc.collect()
    assert not driver.registered


def test_a_copy_keeps_the_strides_of_its_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", FakeDriver)
    source = cuda_tensor(64, 96, 16, 16).to(memory_format=torch.channels_last)
    assert host_tensor(source, torch.preserve_format).stride() == source.stride()
    assert host_tensor(source).is_contiguous()


def test_memory_that_the_driver_cannot_pin_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, requests = FakeDriver(status=801), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    real = torch.empty_like

    def empty_like(tensor: Tensor, pin_memory: bool = False, **options: Any) -> Tensor:
        requests.append((str(options["device"]), pin_memory))
        return real(tensor, **options)

    monkeypatch.setattr(torch, "empty_like", empty_like)
    large, small = host_tensor(cuda_tensor(*SHAPE)), host_tensor(cuda_tensor(7))
    assert (large.shape, small.shape) == (SHAPE, (7,))
    assert requests == [("meta", False), ("cpu", True), ("cpu", True)]
