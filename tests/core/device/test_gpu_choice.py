"""`device.index=auto`, and the readings of a GPU's allocator. The GPUs are simulated."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner import compose
from runner.core.device import resources
from runner.core.device.device import most_free_gpu, select
from runner.core.device.resources import SystemMonitor
from runner.core.errors import ConfigError

GIB = 2**30
TOTAL, USED = 80 * GIB, [70 * GIB, 10 * GIB, 30 * GIB]


def simulate(monkeypatch: pytest.MonkeyPatch, nvml: bool) -> None:
    def used(index: int) -> int:
        if not nvml:
            raise ModuleNotFoundError("pynvml")
        return USED[index]

    total = SimpleNamespace(total_memory=TOTAL)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(USED))
    monkeypatch.setattr(torch.cuda, "device_memory_used", used)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: total)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (TOTAL - USED[index], TOTAL))


@pytest.mark.parametrize("nvml", [True, False])
def test_auto_takes_the_gpu_with_most_free_memory(
    nvml: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(monkeypatch, nvml)
    index, text = most_free_gpu()
    assert index == 1 and text == "GPU 1 of 3 has most free memory, 70.00 GiB"


def test_auto_on_a_cpu_is_the_cpu() -> None:
    with ExitStack() as scope:
        device = select(compose(["device=cpu", "device.index=auto"]).device, scope)
    assert device.torch == torch.device("cpu") and "device.index=auto" in device.reason


@pytest.mark.parametrize("typed", ["gpu1", "best", "1.5", "[0]", "true"])
def test_another_word_for_an_index_is_refused(typed: str) -> None:
    with pytest.raises(ConfigError, match=r"^device\.index: must be "):
        compose([f"device.index={typed}"])


def test_readings_of_a_gpu_count_retries_and_failures_of_the_allocator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stats = {"num_alloc_retries": 3, "num_ooms": 2, "num_device_alloc": 9}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(resources, "gpu_readings", lambda device: {"gpu_percent": 50.0})
    monitor, device = SystemMonitor(), SimpleNamespace(kind="cuda", torch=torch.device("cuda", 0))
    monitor.device = cast_device(device)
    row = monitor.sample().row()
    assert {k: x for k, x in row.items() if k.startswith("gpu_")} == {
        "gpu_percent": 50.0, "gpu_alloc_retries": 3.0, "gpu_ooms": 2.0,
    }  # fmt: skip
    without = SystemMonitor(gpu=False)
    without.device = cast_device(device)
    assert without.sample().gpu == {"gpu_alloc_retries": 3.0, "gpu_ooms": 2.0}


def cast_device(device: Any) -> Any:
    return device
