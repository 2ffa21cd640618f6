"""The `distributed` config group."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from runner.core.bounds import bounded, check_bounds
from runner.core.errors import ConfigError


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
class DistributedConfig:
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
        check_bounds(self, "distributed")
        if self.kind is DistributedKind.none and self.processes not in (None, 1):
            problem = f"is {self.processes}, but distributed=none trains in one process"
            raise ConfigError("distributed.processes", problem, "use distributed=ddp or fsdp")
        if self.kind is DistributedKind.fsdp and self.compression is not Compression.none:
            problem = "is for distributed=ddp"
            fix = "fsdp sends gradients in the type of the weights"
            raise ConfigError("distributed.compression", problem, fix)
