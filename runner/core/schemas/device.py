"""The `device` and `distributed` config groups, and environment variables to set before torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from runner.core.bounds import Bounded, bounded
from runner.core.errors import ConfigError

# Spins of OpenMP's threads before they sleep. Beside one busy process, a step takes nine times as
# long with the default of 300,000, three times with this (1.3 times with one thread fewer). It
# costs nothing on an idle machine; fewer spins do. Measured by scripts/bench_neighbour.py.
SPIN_COUNT = "10000"
WAITING_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")

FSDP_UNSUPPORTED = {
    "channels_last": "fsdp shards weights that are contiguous",
    "chunked_loss": "fsdp gathers the output layer's weight only for its own forward",
    "cuda_graphs": "fsdp gathers weights and frees them in the middle of the step",
    "quantization": "with fsdp no process has the whole model",
}
"""Techniques that do not work with distributed=fsdp, with the reason."""


def omp_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables for OpenMP's waiting; {} if the user has set one."""
    is_set = any(key in environ for key in WAITING_VARIABLES)
    return {} if is_set else {"GOMP_SPINCOUNT": SPIN_COUNT}


class DeviceKind(Enum):
    """Kind of device of the run; `auto` is the fastest available."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    mps = "mps"


@dataclass
class DeviceConfig(Bounded, key="device"):
    """Device, process and determinism; null leaves a setting as the process has it."""

    kind: DeviceKind = DeviceKind.auto  # auto: CUDA, else MPS, else CPU
    # number of the CUDA device, or auto: the one with most free memory; null: the current one
    index: int | str | None = None
    # share of GPU memory that the process may use; null: all
    memory_fraction: float | None = bounded(None, above=0, max=1)
    # share of memory in use (of a GPU: by tensors) above which caches are freed; null: never
    clean_above: float | None = bounded(0.9, above=0, max=1)
    tf32: bool | None = None  # TF32 for fp32 operations; null: only by optimization.tf32
    cudnn_benchmark: bool = False  # CUDA: cuDNN times its kernels and uses the fastest
    deterministic: bool = False  # deterministic kernels only; an operator without one is an error
    # intra-op CPU threads; null: chosen by optimization.system if enabled, else torch's default
    threads: int | None = bounded(None, min=1)
    # threads that run operators side by side, set once a process; null: torch's default
    interop_threads: int | None = bounded(None, min=1)
    synchronize: bool = False  # wait for the device after each step: true step times, to debug
    affinity: list[int] | None = None  # CPU cores this process may use, Linux only; null: as is
    priority: int | None = bounded(None, min=-20, max=19)  # niceness; null: unchanged

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.index, str) and self.index != "auto":
            problem = f"must be a whole number, auto or null, got {self.index!r}"
            raise ConfigError("device.index", problem)
        if self.deterministic and self.cudnn_benchmark:
            problem = "conflicts with device.deterministic: it picks kernels by timing"
            raise ConfigError("device.cudnn_benchmark", problem, "turn one of the two off")


class DistributedKind(Enum):
    """How several processes train a model."""

    none = "none"
    ddp = "ddp"  # each process has the whole model; gradients are averaged
    fsdp = "fsdp"  # each process has a shard of every weight, gradient and optimizer state


class Backend(Enum):
    """The communication backend."""

    nccl = "nccl"
    gloo = "gloo"


class Compression(Enum):
    """The dtype in which gradients are sent."""

    none = "none"
    bf16 = "bf16"


@dataclass
class DistributedConfig(Bounded, key="distributed"):
    """How many processes train one model, and how they communicate."""

    # none: one process; ddp: a copy of the model in each; fsdp: shards of weights and states
    kind: DistributedKind = DistributedKind.none
    processes: int | None = bounded(None, min=1)  # per machine; null: one per GPU, 1 without GPUs
    backend: Backend | None = None  # null: nccl on CUDA, else gloo
    timeout_s: float = bounded(300.0, min=1)  # seconds until a silent process counts as hung
    # restarts of all processes, from the last checkpoint, after one is lost or hangs
    restarts: int = bounded(0, min=0)
    sync_batchnorm: bool = True  # BatchNorm over the whole batch; false: over each process's part
    no_sync: bool = True  # reduce gradients once per step; false: after each micro-batch
    unused_parameters: bool = False  # ddp: allow weights without a gradient, found each step
    bucket_mb: float = bounded(25.0, above=0)  # ddp: size of a gradient bucket in MiB
    compression: Compression = Compression.none  # ddp: send gradients in bf16; none: in their dtype

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind is DistributedKind.none and self.processes not in (None, 1):
            problem = f"is {self.processes}, but distributed=none trains in one process"
            raise ConfigError("distributed.processes", problem, "use distributed=ddp or fsdp")
        if self.kind is DistributedKind.fsdp and self.compression is not Compression.none:
            problem = "is for distributed=ddp"
            fix = "fsdp sends gradients in the type of the weights"
            raise ConfigError("distributed.compression", problem, fix)
