"""Copies of tensors for a checkpoint: bit for bit, and in pinned memory of their size."""

import gc
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from runner.core.checkpoint.checkpointer import Checkpointer
from runner.core.checkpoint.snapshot import pinned_tensor_like


@pytest.mark.parametrize("on_disk", [True, False])
def test_everything_comes_back_bit_for_bit(tmp_path, on_disk):
    torch.manual_seed(0)
    model = {
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(3.25),
        "empty": torch.empty(0, 3),
        "transposed": torch.randn(3, 4).t(),
        "expanded": torch.randn(1, 3).expand(4, 3),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "complex128": torch.randn(3, dtype=torch.complex128),
        "sparse": torch.eye(3).to_sparse(),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "extra": {"classes": ["a", "b"], "seen": 3},
        **{str(t): torch.randint(0, 2, (5,)).to(t) for t in DTYPES},
    }
    model["tied"] = model["parameter"]
    state = {"moments": [torch.randn(2, 2).t(), torch.tensor(7)], "lr": 0.1, "best": None}

    checkpointer = Checkpointer(tmp_path if on_disk else None, keep=1)
    checkpointer.save(12, model, state, False)
    restored = checkpointer.restore()

    assert restored is not None and restored.step == 12 and not restored.warnings
    assert restored.model.keys() == model.keys()
    for name, value in model.items():
        found = restored.model[name]
        if isinstance(value, torch.Tensor):
            assert found.dtype == value.dtype and found.shape == value.shape
            assert bits(found) == bits(value), name
        else:
            assert found == value
    assert restored.model["tied"] is restored.model["parameter"]
    assert restored.state["lr"] == 0.1 and restored.state["best"] is None
    assert torch.equal(restored.state["moments"][0], state["moments"][0])


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.uint16, torch.bool, torch.complex64,
]  # fmt: skip


def bits(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_the_model_file_is_one_that_other_tools_read(tmp_path):
    shared = torch.randn(2, 3)
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(1, {"b": torch.ones(3, dtype=torch.int8), "a": shared, "z": shared}, {}, True)
    checkpointer.close()
    with safe_open(tmp_path / "checkpoints/last/model.safetensors", "pt") as file:
        assert set(file.keys()) == {"a", "b"}
        assert torch.equal(file.get_tensor("a"), shared)
        assert file.metadata() == {"format": "pt", "tied": '{"z": "a"}'}


def test_views_that_only_overlap_are_kept_apart(tmp_path):
    whole = torch.arange(8.0)
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(1, {"whole": whole, "half": whole[:4], "square": whole.view(2, 4)}, {}, False)
    restored = checkpointer.restore()
    assert torch.equal(restored.model["half"], whole[:4])
    assert torch.equal(restored.model["square"], whole.view(2, 4))


@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_training_on_does_not_change_what_was_saved_or_restored(tmp_path, on_disk, device):
    weight, moment = torch.zeros(2, 1_000_000, device=device).unbind()
    checkpointer = Checkpointer(tmp_path if on_disk else None, keep=2)
    for step in (1, 2, 3):
        weight += 1
        moment += 10
        state = {"m": moment, "changes": torch.ones(step, 4).t()}
        checkpointer.save(step, {"w": weight}, state, False)
        weight += 0.5  # while the file may still be being written
        moment += 0.5
        restored = checkpointer.restore()
        assert restored.step == step
        assert restored.model["w"].device.type == "cpu"
        assert (restored.model["w"] == (weight - 0.5).cpu()).all()
        assert (restored.state["m"] == (moment - 0.5).cpu()).all()
        restored.model["w"].fill_(-1)
    assert (checkpointer.restore().model["w"] == (weight - 0.5).cpu()).all()


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
