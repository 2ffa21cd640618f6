"""The device a run computes on: which one and why, what it can do, and how it is set."""

from __future__ import annotations

import logging
import os
import random
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np
import torch
from torch import device as TorchDevice

from runner.device import capabilities, numerics, process
from runner.device.capabilities import Capabilities
from runner.device.config import DeviceConfig, DeviceKind
from runner.errors import ConfigError, DeviceError

__all__ = ["Capabilities", "Device", "seed_everything", "select"]

log = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class Device:
    """One device, ready to compute."""

    kind: str  # cpu | cuda | mps
    torch: TorchDevice
    name: str  # of the CPU or GPU
    reason: str  # what was picked and why
    capabilities: Capabilities
    memory_bytes: int  # in all; of a CPU, what this process may use
    cores: int  # CPU cores this process may use
    reseed: Callable[[int], object]
    """Seed the generators that kernels draw from, 0 to 2**64-1; on each step, so it is bare: 1 µs
    on a CPU, where `torch.manual_seed` takes 75."""
    warnings: tuple[str, ...] = ()  # what could not be had as asked, or will be slow
    memory_fraction: float | None = None  # as asked

    @property
    def reads_are_free(self) -> bool:
        """Reading a tensor never makes the host wait."""
        return self.kind == "cpu"

    @property
    def threads(self) -> int:
        """Threads inside one operator on the CPU, now."""
        return torch.get_num_threads()

    @property
    def settings(self) -> dict[str, Any]:
        """The knobs as they stand now, read back from where they act."""
        found: dict[str, Any] = {
            "threads": torch.get_num_threads(),
            "interop_threads": torch.get_num_interop_threads(),
            "affinity": process.affinity(),
            "priority": os.getpriority(os.PRIO_PROCESS, 0),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        if self.kind == "cuda":
            found |= {
                "cudnn_benchmark": torch.backends.cudnn.benchmark,
                "cudnn_deterministic": torch.backends.cudnn.deterministic,
                "tf32_matmul": torch.backends.cuda.matmul.allow_tf32,
                "tf32_cudnn": torch.backends.cudnn.allow_tf32,
                "memory_fraction": torch.cuda.get_per_process_memory_fraction(self.torch),
            }
        elif self.kind == "mps":
            found["memory_fraction"] = self.memory_fraction  # Metal does not tell
        return found

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.torch)
        elif self.kind == "mps":
            torch.mps.synchronize()

    def describe(self) -> dict[str, Any]:
        """All of it in plain values, for the summary."""
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
    """The device asked for, set as asked; `scope` undoes every switch that can be undone.

    Raises DeviceError when it is not there, ConfigError for a knob that it does not have.
    """
    kind, reason = _pick(config.kind)
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if config.index is not None and not 0 <= config.index < count:
        raise DeviceError(
            f"device.index: there is no {kind} device {config.index}; there is: {_present()}"
        )
    if kind == "cuda":
        before = torch.cuda.current_device()
        where = TorchDevice("cuda", before if config.index is None else config.index)
        scope.callback(torch.cuda.set_device, before)
        torch.cuda.set_device(where)
        properties = torch.cuda.get_device_properties(where)
        name, memory, can = properties.name, properties.total_memory, _of_cuda(properties)
    elif kind == "mps":
        where = TorchDevice("mps")
        name, memory = f"GPU of {capabilities.cpu_name()}", torch.mps.recommended_max_memory()
        can = capabilities.of_mps(torch.backends.mps.is_macos_or_newer(14, 0))
    else:
        where = TorchDevice("cpu")
        name, memory = capabilities.cpu_name(), capabilities.usable_memory()
        can = capabilities.of_cpu(capabilities.cpu_flags())

    _refuse_misplaced(config, kind, can, f"the run is on {kind}, {name}")
    notes = _set_process(config, scope)
    if config.deterministic:
        numerics.set_deterministic(kind, scope)
    if kind == "cuda":
        numerics.set_cudnn_benchmark(config.cudnn_benchmark, scope)
        if config.tf32 is not None:
            numerics.set_tf32(config.tf32, scope)
    if config.memory_fraction is not None:
        numerics.set_memory_fraction(config.memory_fraction, where, scope)
    for note in notes:
        log.warning("%s", note)
    return Device(
        kind=kind,
        torch=where,
        name=name,
        reason=reason,
        capabilities=can,
        memory_bytes=memory,
        cores=capabilities.usable_cores(),
        reseed=_reseeder(where),
        warnings=tuple(notes),
        memory_fraction=config.memory_fraction,
    )


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch on every device; `seed` is 0 to 2**64-1."""
    if not 0 <= seed < 2**64:
        raise ConfigError("seed", f"{seed} is out of range", "use 0 to 2**64-1")
    random.seed(seed)
    np.random.seed(seed % 2**32)  # all that numpy's global generator takes
    torch.manual_seed(seed)


def _pick(asked: DeviceKind) -> tuple[str, str]:
    """The kind to use, and why; DeviceError when the one asked for is not there."""
    no_cuda, no_mps = _why_no_cuda(), _why_no_mps()
    if asked is DeviceKind.auto:
        if no_cuda is None:
            return "cuda", "auto: a CUDA GPU is the fastest that is here"
        if no_mps is None:
            return "mps", f"auto: an Apple GPU is here, CUDA is not ({no_cuda})"
        return "cpu", f"auto: no accelerator is here (cuda: {no_cuda}; mps: {no_mps})"
    why_not = {DeviceKind.cuda: no_cuda, DeviceKind.mps: no_mps}.get(asked)
    if why_not is not None:
        raise DeviceError(
            f"device.kind={asked.value} is not here: {why_not}; there is: {_present()}; "
            "use device=auto to take the fastest that is there"
        )
    return asked.value, "asked for"


def _why_no_cuda() -> str | None:
    """Why CUDA (or ROCm, which torch gives the same name) cannot be used, or None."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    with warnings.catch_warnings(record=True) as caught:  # a driver too old only warns
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None
    if caught:
        return str(caught[0].message).splitlines()[0]
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every GPU"
    return "no GPU or no driver"


def _why_no_mps() -> str | None:
    """Why Metal cannot be used, or None."""
    if not torch.backends.mps.is_built():
        return "torch is built without Metal"
    return None if torch.backends.mps.is_available() else "needs macOS 14 and an Apple GPU"


def _present() -> str:
    """Every device that is there, for an error."""
    found = [f"cpu ({capabilities.cpu_name()}, {capabilities.usable_cores()} cores)"]
    if _why_no_cuda() is None:
        count = torch.cuda.device_count()
        found += [f"cuda {i} ({torch.cuda.get_device_name(i)})" for i in range(count)]
    if _why_no_mps() is None:
        found.append("mps")
    return ", ".join(found)


def _of_cuda(properties: Any) -> Capabilities:
    if torch.version.hip is not None:
        return capabilities.of_amd(properties.gcnArchName)
    return capabilities.of_nvidia(properties.major, properties.minor)


def _refuse_misplaced(config: DeviceConfig, kind: str, can: Capabilities, here: str) -> None:
    """A knob that this device does not have is an error: it would silently do nothing."""
    if config.memory_fraction is not None and kind == "cpu":
        raise ConfigError(
            "device.memory_fraction",
            f"is a share of an accelerator's memory, and {here}",
            "leave it out (null), or ask for a GPU with device=cuda",
        )
    if config.cudnn_benchmark and kind != "cuda":
        raise ConfigError(
            "device.cudnn_benchmark",
            f"is for NVIDIA GPUs, and {here}",
            "leave it out (false), or ask for a GPU with device=cuda",
        )
    if config.tf32 and not can.tf32:  # false is what such a device does anyway
        raise ConfigError(
            "device.tf32",
            f"needs an NVIDIA GPU of compute capability 8.0, and {here}",
            "leave it out (null)",
        )


def _set_process(config: DeviceConfig, scope: ExitStack) -> list[str]:
    if config.affinity is not None:
        process.set_affinity(config.affinity, scope)
    if config.priority is not None:
        process.set_priority(config.priority, scope)
    # After affinity, so that threads started by this inherit it and are as many as its cores.
    notes = process.set_threads(config.threads, config.affinity is not None, scope)
    if config.interop_threads is not None:
        notes += process.set_interop_threads(config.interop_threads)
    return notes


def _reseeder(where: TorchDevice) -> Callable[[int], object]:
    """What seeds the generators that this device's kernels draw from, and the host's."""
    host = torch.default_generator.manual_seed
    if where.type == "cpu":
        return host
    if where.type == "cuda":
        accelerator: Callable[[int], object] = torch.cuda.default_generators[
            where.index
        ].manual_seed
    else:
        accelerator = torch.mps.manual_seed

    def reseed(seed: int) -> None:
        host(seed)
        accelerator(seed)

    return reseed
