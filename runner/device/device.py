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

from runner.device import capabilities
from runner.device.capabilities import Capabilities, allowed_cores, usable_cores
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
        settings: dict[str, Any] = {
            "threads": torch.get_num_threads(),
            "affinity": allowed_cores(),
            "priority": os.getpriority(os.PRIO_PROCESS, 0),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        if self.kind == "cuda":
            settings |= {
                "cudnn_benchmark": torch.backends.cudnn.benchmark,
                "cudnn_deterministic": torch.backends.cudnn.deterministic,
                "tf32_matmul": torch.backends.cuda.matmul.allow_tf32,
                "tf32_cudnn": torch.backends.cudnn.allow_tf32,
                "memory_fraction": torch.cuda.get_per_process_memory_fraction(self.torch),
            }
        elif self.kind == "mps":
            settings["memory_fraction"] = self.memory_fraction  # Metal does not tell
        return settings

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
    kind, reason = pick(config.kind)
    where, name, memory, able = _open(kind, config.index, scope)
    _refuse_misplaced(config, kind, able, f"the run is on {kind}, {name}")
    notes = _set_process(config, scope)
    _set_numerics(config, kind, where, scope)
    for note in notes:
        log.warning("%s", note)
    return Device(
        kind=kind,
        torch=where,
        name=name,
        reason=reason,
        capabilities=able,
        memory_bytes=memory,
        cores=usable_cores(),
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


def pick(asked: DeviceKind) -> tuple[str, str]:
    """The kind to use, and why; DeviceError when the one asked for is not there."""
    absent = {"cuda": _why_no_cuda(), "mps": _why_no_mps(), "cpu": None}
    kind = asked.value
    if asked is DeviceKind.auto:
        kind = next(kind for kind, why_not in absent.items() if why_not is None)
        others = "; ".join(f"{kind}: {why_not}" for kind, why_not in absent.items() if why_not)
        fastest = f"no accelerator is here ({others})" if kind == "cpu" else "the fastest here"
        return kind, f"auto: {fastest}"
    if absent[kind] is not None:
        raise DeviceError(
            f"device.kind={kind} is not here: {absent[kind]}; there is: {_present()}; "
            "use device=auto to take the fastest that is there"
        )
    return kind, "asked for"


def _why_no_cuda() -> str | None:
    """Why CUDA (or ROCm, which torch gives the same name) cannot be used, or None."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    with warnings.catch_warnings(record=True) as caught:  # a driver too old only warns
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every GPU"
    return str(caught[0].message).splitlines()[0] if caught else "no GPU or no driver"


def _why_no_mps() -> str | None:
    """Why Metal cannot be used, or None."""
    if not torch.backends.mps.is_built():
        return "torch is built without Metal"
    return None if torch.backends.mps.is_available() else "needs macOS 14 and an Apple GPU"


def _present() -> str:
    """Every device that is there, for an error."""
    devices = [f"cpu ({capabilities.cpu_name()}, {usable_cores()} cores)"]
    if _why_no_cuda() is None:
        count = torch.cuda.device_count()
        devices += [f"cuda {i} ({torch.cuda.get_device_name(i)})" for i in range(count)]
    if _why_no_mps() is None:
        devices.append("mps")
    return ", ".join(devices)


def _open(
    kind: str, index: int | None, scope: ExitStack
) -> tuple[TorchDevice, str, int, Capabilities]:
    """The device with its name, memory and capabilities; a GPU becomes the current one."""
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if index is not None and not 0 <= index < count:
        raise DeviceError(
            f"device.index: there is no {kind} device {index}; there is: {_present()}"
        )
    if kind == "cuda":
        before = torch.cuda.current_device()
        where = TorchDevice("cuda", before if index is None else index)
        scope.callback(torch.cuda.set_device, before)
        torch.cuda.set_device(where)
        gpu = torch.cuda.get_device_properties(where)
        able = capabilities.of_gpu(gpu.major, gpu.minor, nvidia=torch.version.hip is None)
        return where, gpu.name, gpu.total_memory, able
    name = capabilities.cpu_name()
    if kind == "mps":
        able = capabilities.of_mps(torch.backends.mps.is_macos_or_newer(14, 0))
        return TorchDevice("mps"), f"GPU of {name}", torch.mps.recommended_max_memory(), able
    able = capabilities.of_cpu(capabilities.cpu_flags())
    return TorchDevice("cpu"), name, capabilities.usable_memory(), able


def _refuse_misplaced(config: DeviceConfig, kind: str, able: Capabilities, here: str) -> None:
    """A knob that this device does not have is an error: it would silently do nothing."""
    misplaced = {
        "memory_fraction": (config.memory_fraction is not None and kind == "cpu", "an accelerator"),
        "cudnn_benchmark": (config.cudnn_benchmark and kind != "cuda", "an NVIDIA GPU"),
        # false is what such a device does anyway
        "tf32": (config.tf32 and not able.tf32, "an NVIDIA GPU of compute capability 8.0"),
    }
    for key, (wrong, needs) in misplaced.items():
        if wrong:
            raise ConfigError(f"device.{key}", f"needs {needs}, and {here}", "leave it out")


def _set_process(config: DeviceConfig, scope: ExitStack) -> list[str]:
    """Cores, priority, and threads inside one operator: as asked, else torch's choice.

    With more threads than cores they spin while they wait, and a step took four times as long.
    """
    if config.affinity is not None or config.priority is not None:
        from runner.device import process

        if config.affinity is not None:
            process.set_affinity(config.affinity, scope)
        if config.priority is not None:
            process.set_priority(config.priority, scope)
    # After affinity, so that threads started by this inherit it and are as many as its cores.
    threads, before, cores = config.threads, torch.get_num_threads(), usable_cores()
    notes = []
    if threads is None and config.affinity is not None and before > cores:
        threads = cores
        notes.append(f"threads: {cores}, one for each core of device.affinity")
    if threads is not None and threads != before:
        scope.callback(torch.set_num_threads, before)
        torch.set_num_threads(threads)
    if (threads or before) > cores:
        notes.append(
            f"{threads or before} threads on {cores} usable cores wait for each other; "
            f"set device.threads={cores}"
        )
    return notes


def _set_numerics(config: DeviceConfig, kind: str, where: TorchDevice, scope: ExitStack) -> None:
    if kind == "cpu" and not config.deterministic:
        return
    from runner.device import numerics

    if config.deterministic:
        numerics.set_deterministic(kind, scope)
    if kind == "cuda":
        numerics.set_cudnn_benchmark(config.cudnn_benchmark, scope)
        if config.tf32 is not None:
            numerics.set_tf32(config.tf32, scope)
    if config.memory_fraction is not None:
        numerics.set_memory_fraction(config.memory_fraction, where, scope)


def _reseeder(where: TorchDevice) -> Callable[[int], object]:
    """A function that seeds the generators of this device's kernels, and the host's."""
    host = torch.default_generator.manual_seed
    if where.type == "cpu":
        return host
    accelerator: Callable[[int], object] = torch.mps.manual_seed
    if where.type == "cuda":
        accelerator = torch.cuda.default_generators[where.index].manual_seed

    def reseed(seed: int) -> None:
        host(seed)
        accelerator(seed)

    return reseed
