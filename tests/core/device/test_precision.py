"""Precision of fp32 operations: read, set and restored under torch's older and newer switches."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner.core.device import allocator, numerics
from runner.core.device.device import Device, select
from runner.core.schemas.device import DeviceConfig, DeviceKind
from runner.core.schemas.optimization import Tf32
from runner.core.techniques import tf32
from runner.measure.parity.numerics import apply_numerics, read_numerics
from tests import runs

BACKENDS: Any = torch.backends
GPU = ("cuda.matmul", "cudnn.conv", "cudnn.rnn")
USER_SETTINGS = [
    ("cuda.matmul.fp32_precision", "tf32"),
    ("cuda.matmul.fp32_precision", "ieee"),
    ("cudnn.fp32_precision", "ieee"),
    ("cudnn.conv.fp32_precision", "ieee"),
    ("cudnn.rnn.fp32_precision", "ieee"),
    ("fp32_precision", "tf32"),
    ("mkldnn.matmul.fp32_precision", "bf16"),
    ("mkldnn.fp32_precision", "bf16"),
    ("cuda.matmul.allow_tf32", True),
]


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    """Restore all switches, also those that a test sets like a user's module."""
    with ExitStack() as scope:
        numerics.set_fp32_precision({}, scope)
        wide = (torch.backends, torch.backends.cudnn, torch.backends.mkldnn)
        for owner in wide:
            scope.callback(setattr, owner, "fp32_precision", "none")
        yield


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `select` find an Ampere GPU."""
    properties = SimpleNamespace(major=8, minor=0, name="NVIDIA A100-SXM4-80GB", total_memory=80)
    patches = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_properties": lambda device: properties,
        "default_generators": [torch.default_generator],
        "get_per_process_memory_fraction": lambda device: 1.0,
    }
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in patches.items():
        monkeypatch.setattr(torch.cuda, name, value)


def select_gpu(scope: ExitStack, **settings: bool) -> Device:
    return select(DeviceConfig(kind=DeviceKind.cuda, **settings), scope)  # type: ignore[arg-type]


def values() -> list[str]:
    return [numerics.read_fp32_precision()[name] for name in GPU]


def set_as_a_user(setting: tuple[str, Any]) -> None:
    owner, _, name = setting[0].rpartition(".")
    setattr(attrgetter(owner)(torch.backends) if owner else torch.backends, name, setting[1])


def test_fp32_on_a_gpu_is_fp32_unless_tf32_is_requested_and_is_restored(gpu: None) -> None:
    torch.backends.cudnn.allow_tf32 = True  # torch's default
    before = numerics.read_fp32_precision()
    for requested, expected in ((None, "ieee"), (False, "ieee"), (True, "tf32")):
        with ExitStack() as scope:
            device = select_gpu(scope, **({} if requested is None else {"tf32": requested}))
            assert values() == [expected] * 3
            flags = [device.settings["tf32_matmul"], device.settings["tf32_cudnn"]]
            assert flags == [bool(requested)] * 2
            old = [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32]
            assert old == flags
        assert numerics.read_fp32_precision() == before
    assert torch.backends.cudnn.allow_tf32


def test_the_technique_switches_products_and_convolutions_to_tf32_and_back(gpu: None) -> None:
    with ExitStack() as scope:
        select_gpu(scope)
        with ExitStack() as run_scope:
            builder = SimpleNamespace(requested_tf32=None, scope=run_scope)
            assert tf32.apply(Tf32(True), builder) is None  # type: ignore[arg-type]
            assert values() == ["tf32"] * 3
        assert values() == ["ieee"] * 3
        decided = tf32.apply(Tf32(True), SimpleNamespace(requested_tf32=False))  # type: ignore[arg-type]
        assert decided == "device.tf32=false decides" and values() == ["ieee"] * 3


@pytest.mark.parametrize("setting", USER_SETTINGS)
def test_any_setting_by_a_users_module_is_read_overridden_and_restored(
    setting: tuple[str, Any], gpu: None
) -> None:
    set_as_a_user(setting)
    before = numerics.read_fp32_precision()
    for requested, expected in ((False, "ieee"), (True, "tf32")):
        with ExitStack() as scope:
            device = select_gpu(scope, tf32=requested)
            assert device.describe()["settings"]["tf32_matmul"] is requested
            assert values() == [expected] * 3
            # torch's compiler reads the older flags, which raise where they differ
            assert torch.backends.cuda.matmul.allow_tf32 is requested
            assert torch.backends.cudnn.allow_tf32 is requested
            set_as_a_user(setting)  # in the model's constructor
            device.describe()
        assert numerics.read_fp32_precision() == before


def test_a_switch_that_followed_a_wider_one_follows_it_after_the_run(gpu: None) -> None:
    BACKENDS.fp32_precision = "tf32"
    with ExitStack() as scope:
        select_gpu(scope)
        assert values() == ["ieee"] * 3
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    BACKENDS.fp32_precision = "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"


@pytest.mark.parametrize("setting", [USER_SETTINGS[0], USER_SETTINGS[6]])
def test_numerics_name_reduced_precision_and_apply_to_another_run(setting: tuple[str, Any]) -> None:
    with runs.opened("optimization=none", "model=mlp", "data=digits") as run:
        plain = read_numerics(run)
        assert plain.name == "fp32"
        set_as_a_user(setting)
        on_gpu = setting[0].startswith("cuda")
        if on_gpu:
            run.device = replace(run.device, kind="cuda")
        reduced = read_numerics(run)
        switch, name = ("cuda.matmul", "TF32") if on_gpu else ("mkldnn.matmul", "BF16")
        assert switch in reduced.name and reduced.name.endswith(f"in {name}")
        assert not reduced.rounds_like(plain)
        before = numerics.read_fp32_precision()
        unset = tuple((name, "ieee") for name, _ in reduced.fp32_precision)
        with apply_numerics(replace(reduced, fp32_precision=unset), run):
            assert read_numerics(run).name == "fp32"
        assert numerics.read_fp32_precision() == before


def test_segments_expand_without_a_deprecated_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(key, raising=False)
    settings: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    with warnings.catch_warnings(), ExitStack() as scope:
        warnings.simplefilter("error")
        assert allocator.expand_segments(scope) is None
        assert settings == ["expandable_segments:True"]
    assert settings[-1] == "expandable_segments:False"


def test_no_precision_switch_warns(gpu: None) -> None:
    code = (
        "from contextlib import ExitStack; from runner.core.device import numerics\n"
        "with ExitStack() as scope: numerics.set_tf32(True, scope)\n"
        "numerics.read_fp32_precision()"
    )
    result = runs.python("-W", "error", "-c", code)
    assert result.returncode == 0 and "Warning" not in result.stderr, result.stderr
