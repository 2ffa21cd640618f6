"""What an NVIDIA GPU says of itself through NVML: `pip install nvidia-ml-py`, the extra `gpu`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from runner.device.device import Device
from runner.errors import ConfigError

log = logging.getLogger("runner")

KEY = "stability.watch.gpu"
TOO_HOT = 0x20 | 0x40  # reasons for low clocks, as nvml.h numbers them: thermal, software's, ours
SLOWED_BY_HARDWARE = 0x08


@dataclass(frozen=True)
class GpuReading:
    """One look at a GPU; None where it does not tell."""

    utilization: float | None  # percent of the time that a kernel was running, lately
    memory_bytes: int | None  # in use, by every process
    memory_total: int | None
    temperature: float | None  # °C
    clock_mhz: float | None  # of the multiprocessors
    memory_clock_mhz: float | None
    power_w: float | None
    slowed: bool = False  # its clocks are low because it is too hot, or lacks power

    def row(self) -> dict[str, float]:
        """Names and values for TensorBoard's `usage`."""
        values = {
            "gpu_percent": self.utilization,
            "gpu_gib": None if self.memory_bytes is None else self.memory_bytes / 2**30,
            "gpu_celsius": self.temperature,
            "gpu_mhz": self.clock_mhz,
            "gpu_memory_mhz": self.memory_clock_mhz,
            "gpu_watt": self.power_w,
        }
        return {name: value for name, value in values.items() if value is not None}


class Gpu:
    """An NVIDIA GPU, by NVML's handle; a reading takes some 100 µs and no wait for the device."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml, self.handle = nvml, handle

    def read(self) -> GpuReading:
        """One look."""
        nvml = self.nvml
        used = self._ask(nvml.nvmlDeviceGetUtilizationRates)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo)
        power = self._ask(nvml.nvmlDeviceGetPowerUsage)
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0
        return GpuReading(
            utilization=None if used is None else float(used.gpu),
            memory_bytes=None if memory is None else int(memory.used),
            memory_total=None if memory is None else int(memory.total),
            temperature=self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
            power_w=None if power is None else power / 1e3,
            slowed=bool(reasons & (TOO_HOT | SLOWED_BY_HARDWARE)),
        )

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """The answer, None where this GPU, or one of its MIG slices, has none."""
        try:
            return question(self.handle, *arguments)
        except self.nvml.NVMLError:
            return None


def find(device: Device, asked: bool | None) -> Gpu | None:
    """The GPU that `device` is; None where there is none, NVML is missing, or it is not wanted.

    Raises ConfigError where it is asked for (`asked` True) and cannot be had.
    """
    if asked is False:
        return None
    try:
        return _open(device)
    except _Absent as absent:
        if asked:
            raise ConfigError(KEY, absent.why, absent.fix) from None
        log.debug("no readings of the GPU: %s", absent.why)
        return None


class _Absent(Exception):
    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why)
        self.why, self.fix = why, fix


def _open(device: Device) -> Gpu:
    leave = f"set {KEY}=null to take readings only where they can be had"
    if device.kind != "cuda":
        raise _Absent(f"a {device.kind} device has no NVML", leave)
    try:
        import pynvml
    except ImportError:
        raise _Absent("nvidia-ml-py is not installed", "pip install nvidia-ml-py") from None
    try:
        pynvml.nvmlInit()
        # by its id: NVML counts all GPUs, torch those that CUDA_VISIBLE_DEVICES leaves it
        uuid = str(torch.cuda.get_device_properties(device.torch).uuid)
        return Gpu(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except (pynvml.NVMLError, AttributeError) as error:
        raise _Absent(f"NVML does not answer: {error}", leave) from None
