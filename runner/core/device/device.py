"""The device of a run: selection, capabilities and settings."""

from __future__ import annotations

import logging
import os
import random
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch import device as TorchDevice

from runner.core.device import capabilities
from runner.core.device.capabilities import Capabilities, allowed_cores, usable_cores
from runner.core.errors import ConfigError, DeviceError
from runner.core.format import size
from runner.core.schemas.device import DeviceConfig, DeviceKind

log = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class Device:
    """A selected and configured device."""

    kind: str  # cpu | cuda | mps
    torch: TorchDevice
    name: str  # of the CPU or GPU
    reason: str  # why this kind was selected
    capabilities: Capabilities
    memory_bytes: int  # in all; of a CPU, usable by this process
    cores: int  # CPU cores this process may use
    reseed: Callable[[int], object]
    """Seed the generators of kernels, 0 to 2**64-1. Called at each step: takes 1 µs on a CPU, where
    `torch.manual_seed` takes 75."""
    warnings: tuple[str, ...] = ()  # on settings not honoured, or slow
    memory_fraction: float | None = None  # as configured
    waits_for_steps: bool = False  # device.synchronize

    @property
    def reads_are_free(self) -> bool:
        """Whether reading a tensor needs no host sync."""
        return self.kind == "cpu"

    @property
    def threads(self) -> int:
        """The current number of intra-op threads on the CPU."""
        return torch.get_num_threads()

    @property
    def settings(self) -> dict[str, Any]:
        """The current settings, read back from the libraries."""
        settings: dict[str, Any] = {
            "threads": torch.get_num_threads(),
            "affinity": allowed_cores(),
            "priority": os.getpriority(os.PRIO_PROCESS, 0),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        if self.kind == "cuda":
            from runner.core.device import numerics

            precision = numerics.read_fp32_precision()
            settings |= {
                "cudnn_benchmark": torch.backends.cudnn.benchmark,
                "cudnn_deterministic": torch.backends.cudnn.deterministic,
                "tf32_matmul": precision["cuda.matmul"] == "tf32",
                "tf32_cudnn": "tf32" in (precision["cudnn.conv"], precision["cudnn.rnn"]),
                "memory_fraction": torch.cuda.get_per_process_memory_fraction(self.torch),
            }
        elif self.kind == "mps":
            settings["memory_fraction"] = self.memory_fraction  # cannot be read back
        return settings

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.torch)
        elif self.kind == "mps":
            torch.mps.synchronize()

    def clock(self) -> float:
        """Return the seconds of `perf_counter` once the device has done its work. Host sync."""
        self.synchronize()
        return perf_counter()

    def seconds_of(self, call: Callable[[], object]) -> float:
        """Return how long a call takes, until the device has done its work. Host sync."""
        start = self.clock()
        call()
        return self.clock() - start

    def describe(self) -> dict[str, Any]:
        """Return all properties as plain values, for the summary."""
        return {
            "kind": self.kind,
            "index": self.torch.index,
            "name": self.name,
            "reason": self.reason,
            "memory_bytes": self.memory_bytes,
            "cores": self.cores,
            "threads": self.threads,
            "capabilities": asdict(self.capabilities),
            "settings": self.settings,
            "warnings": list(self.warnings),
        }


def select(config: DeviceConfig, scope: ExitStack) -> Device:
    """Select and configure the device until `scope` ends. Raises DeviceError or ConfigError."""
    kind, reason = choose_device_kind(config.kind)
    index = config.index
    if isinstance(index, str):
        index, text = most_free_gpu() if kind == "cuda" else (None, "a single device")
        reason = f"{reason}; device.index=auto: {text}"
    torch_device, name, memory, supported = _open_device(kind, index, scope)
    _reject_unsupported(config, kind, supported, f"the run is on {kind}, {name}")
    notes = _set_process(config, scope)
    _set_numerics(config, kind, torch_device, scope)
    for note in notes:
        log.warning("%s", note)
    return Device(
        kind=kind,
        torch=torch_device,
        name=name,
        reason=reason,
        capabilities=supported,
        memory_bytes=memory,
        cores=usable_cores(),
        reseed=_reseeder(torch_device),
        warnings=tuple(notes),
        memory_fraction=config.memory_fraction,
        waits_for_steps=config.synchronize,
    )


def copy_to_host(values: Tensor) -> tuple[Tensor, torch.Event | None]:
    """Start a copy to pinned memory, complete at the event; values on the host have none."""
    if values.device.type == "cpu":
        return values, None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.device.type == "cuda")
    host.copy_(values, non_blocking=True)
    ready = torch.Event(values.device)
    ready.record()
    return host, ready


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch on every device; `seed` is 0 to 2**64-1."""
    if not 0 <= seed < 2**64:
        raise ConfigError("seed", f"{seed} is out of range", "use 0 to 2**64-1")
    random.seed(seed)
    np.random.seed(seed % 2**32)  # the largest seed of NumPy's global generator
    torch.manual_seed(seed)


def choose_device_kind(requested: DeviceKind) -> tuple[str, str]:
    """Return the device kind and the reason; DeviceError if it is not available."""
    reasons = {"cuda": _why_no_cuda(), "mps": _why_no_mps(), "cpu": None}
    kind = requested.value
    if requested is DeviceKind.auto:
        kind = next(kind for kind, reason in reasons.items() if reason is None)
        others = "; ".join(f"{kind}: {reason}" for kind, reason in reasons.items() if reason)
        none_available = f"no accelerator available ({others})"
        return kind, f"auto: {none_available if kind == 'cpu' else 'the fastest available'}"
    if reasons[kind] is not None:
        others = f"available: {_list_devices()}; use device=auto for the fastest"
        raise DeviceError(f"device.kind={kind} is not available: {reasons[kind]}; {others}")
    return kind, "requested"


def _why_no_cuda() -> str | None:
    """Return why CUDA (or ROCm, which torch names the same) cannot be used, or None."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    with warnings.catch_warnings(record=True) as caught:  # too old a driver only warns
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every GPU"
    return str(caught[0].message).splitlines()[0] if caught else "no GPU or no driver"


def _why_no_mps() -> str | None:
    if not torch.backends.mps.is_built():
        return "torch is built without Metal"
    return None if torch.backends.mps.is_available() else "needs macOS 14 and an Apple GPU"


def _list_devices() -> str:
    devices = [f"cpu ({capabilities.cpu_name()}, {usable_cores()} cores)"]
    if _why_no_cuda() is None:
        count = torch.cuda.device_count()
        devices += [f"cuda {i} ({torch.cuda.get_device_name(i)})" for i in range(count)]
    if _why_no_mps() is None:
        devices.append("mps")
    return ", ".join(devices)


def most_free_gpu() -> tuple[int, str]:
    """Return its index, and a text with its free memory; of equal ones the first."""
    free = [_free_bytes(index) for index in range(torch.cuda.device_count())]
    best = free.index(max(free))
    return best, f"GPU {best} of {len(free)} has most free memory, {size(free[best])}"


def _free_bytes(index: int) -> int:
    """Return free bytes by NVML; without it by CUDA, which opens a context on the GPU."""
    try:
        used = torch.cuda.device_memory_used(index)
    except Exception:  # pynvml is missing, or fails in many ways
        return torch.cuda.mem_get_info(index)[0]
    return torch.cuda.get_device_properties(index).total_memory - used


def _open_device(
    kind: str, index: int | None, scope: ExitStack
) -> tuple[TorchDevice, str, int, Capabilities]:
    """Return device, name, memory and capabilities; a GPU becomes the current device."""
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if index is not None and not 0 <= index < count:
        raise DeviceError(f"device.index: no {kind} device {index}; available: {_list_devices()}")
    if kind == "cuda":
        before = torch.cuda.current_device()
        torch_device = TorchDevice("cuda", before if index is None else index)
        scope.callback(torch.cuda.set_device, before)
        torch.cuda.set_device(torch_device)
        gpu = torch.cuda.get_device_properties(torch_device)
        supported = capabilities.of_gpu(gpu.major, gpu.minor, nvidia=torch.version.hip is None)
        return torch_device, gpu.name, gpu.total_memory, supported
    name = capabilities.cpu_name()
    if kind == "mps":
        supported = capabilities.of_mps(torch.backends.mps.is_macos_or_newer(14, 0))
        return TorchDevice("mps"), f"GPU of {name}", torch.mps.recommended_max_memory(), supported
    supported = capabilities.of_cpu(capabilities.cpu_flags())
    return TorchDevice("cpu"), name, capabilities.usable_memory(), supported


def _reject_unsupported(
    config: DeviceConfig, kind: str, supported: Capabilities, device_text: str
) -> None:
    """Raise ConfigError for a setting that this device would silently ignore."""
    requirements = {
        "memory_fraction": (config.memory_fraction is not None and kind == "cpu", "an accelerator"),
        "cudnn_benchmark": (config.cudnn_benchmark and kind != "cuda", "an NVIDIA GPU"),
        # false is valid on any device
        "tf32": (config.tf32 and not supported.tf32, "an NVIDIA GPU of compute capability 8.0"),
    }
    for key, (unsupported, needs) in requirements.items():
        if unsupported:
            raise ConfigError(f"device.{key}", f"needs {needs}, and {device_text}", "leave it out")


def _set_process(config: DeviceConfig, scope: ExitStack) -> list[str]:
    """Set affinity, priority and intra-op threads, where configured; return notes.

    With more threads than cores, threads spin while they wait: a step took four times as long.
    """
    if config.affinity is not None or config.priority is not None:
        from runner.core.device import process

        if config.affinity is not None:
            process.set_affinity(config.affinity, scope)
        if config.priority is not None:
            process.set_priority(config.priority, scope)
    # after affinity, so that new threads inherit it and match its cores
    threads, before, cores = config.threads, torch.get_num_threads(), usable_cores()
    notes = []
    if threads is None and config.affinity is not None and before > cores:
        threads = cores
        notes.append(f"threads: {cores}, one for each core of device.affinity")
    if threads is not None and threads != before:
        scope.callback(torch.set_num_threads, before)
        torch.set_num_threads(threads)
    wanted = config.interop_threads
    if wanted is not None and wanted != torch.get_num_interop_threads():
        try:
            torch.set_num_interop_threads(wanted)
        except RuntimeError:  # torch allows it once, before operators run in parallel
            why = f"this one has used {torch.get_num_interop_threads()}"
            notes.append(f"device.interop_threads={wanted} needs a new process: {why}")
    if (used := threads or before) > cores:
        wait = f"{used} threads on {cores} usable cores wait for each other"
        notes.append(f"{wait}; set device.threads={cores}")
    return notes


def _set_numerics(
    config: DeviceConfig, kind: str, torch_device: TorchDevice, scope: ExitStack
) -> None:
    if kind == "cpu" and not config.deterministic:
        return
    from runner.core.device import numerics

    if config.deterministic:
        numerics.set_deterministic(kind, scope)
    if kind == "cuda":
        numerics.set_cudnn_benchmark(config.cudnn_benchmark, scope)
        # null is off: torch's default would convolve in TF32; the technique tf32 switches it on
        numerics.set_tf32(bool(config.tf32), scope)
    if config.memory_fraction is not None:
        numerics.set_memory_fraction(config.memory_fraction, torch_device, scope)


def _reseeder(torch_device: TorchDevice) -> Callable[[int], object]:
    host = torch.default_generator.manual_seed
    if torch_device.type == "cpu":
        return host
    accelerator: Callable[[int], object] = torch.mps.manual_seed
    if torch_device.type == "cuda":
        accelerator = torch.cuda.default_generators[torch_device.index].manual_seed

    def reseed(seed: int) -> None:
        host(seed)
        accelerator(seed)

    return reseed
