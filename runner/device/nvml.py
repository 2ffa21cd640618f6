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
# reasons for low clocks, as nvml.h numbers them: power brake or heat, and heat by software or ours
SLOWED = 0x08 | 0x20 | 0x40


@dataclass(frozen=True)
class GpuReading:
    """A GPU's state; None where it does not tell."""

    utilization: float | None  # percent of the time that a kernel was running, lately
    memory_bytes: int | None  # in use, by every process
    temperature: float | None  # °C
    clock_mhz: float | None  # of the multiprocessors
    power_w: float | None
    slowed: bool = False  # its clocks are low because it is too hot, or lacks power

    def row(self) -> dict[str, float]:
        """Names and values for TensorBoard's `usage`."""
        values = {
            "gpu_percent": self.utilization,
            "gpu_gib": None if self.memory_bytes is None else self.memory_bytes / 2**30,
            "gpu_celsius": self.temperature,
            "gpu_mhz": self.clock_mhz,
            "gpu_watt": self.power_w,
        }
        return {name: value for name, value in values.items() if value is not None}


class Gpu:
    """An NVIDIA GPU, by NVML's handle; a reading takes some 100 µs and no wait for the device."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml, self.handle = nvml, handle

    def read(self) -> GpuReading:
        """Its state now."""
        nvml = self.nvml
        used = self._ask(nvml.nvmlDeviceGetUtilizationRates)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo)
        power = self._ask(nvml.nvmlDeviceGetPowerUsage)
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0
        return GpuReading(
            utilization=None if used is None else float(used.gpu),
            memory_bytes=None if memory is None else int(memory.used),
            temperature=self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            power_w=None if power is None else power / 1e3,
            slowed=bool(reasons & SLOWED),
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
    if asked is False or (device.kind != "cuda" and not asked):
        return None
    if device.kind != "cuda":
        raise ConfigError(KEY, f"a {device.kind} device has no NVML", f"set {KEY}=null")
    try:
        import pynvml

        pynvml.nvmlInit()
        # by its id: NVML counts all GPUs, torch those that CUDA_VISIBLE_DEVICES leaves it
        uuid = str(torch.cuda.get_device_properties(device.torch).uuid)
        return Gpu(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except Exception as error:  # nvidia-ml-py is not installed, or NVML does not answer
        if asked:
            fix = f"pip install nvidia-ml-py, or set {KEY}=null"
            raise ConfigError(KEY, f"NVML cannot be used: {error}", fix) from None
        log.debug("no readings of the GPU: %s", error)
        return None
