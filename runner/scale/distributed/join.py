"""Join the other processes of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from runner.core.config.run_config import RunConfig, config_hash
from runner.core.device.capabilities import usable_cores
from runner.core.errors import ConfigError, DeviceError, UsageError
from runner.core.schemas.device import DeviceKind
from runner.scale.distributed.rank_info import RankInfo, detect_rank
from runner.scale.distributed.world import World


def join_world(config: RunConfig, place: RankInfo, scope: ExitStack) -> World:
    """Join the others; the world ends with `scope`. UsageError if config or torch differ.

    ConfigError if two processes have one GPU, unless the backend is gloo.
    """
    world = World(place, config.distributed, device_type(config))
    scope.push(lambda kind, error, trace: world.close(error))
    identity = {"config": config_hash(config)[:12], "torch": torch.__version__}
    identities = world.all_gather(identity)
    for rank, other in enumerate(identities):  # different processes would not work together
        for key in identity:
            if other[key] != identities[0][key]:
                problem = f"process {rank} has {key} {other[key]}, process 0 {identities[0][key]}"
                raise UsageError(f"distributed: {problem}; start the same command on each machine")
    if world.backend == "nccl":
        _check_own_gpus(world.all_gather(gpu_uuid(gpu_index(config, place))), config.device.index)
    return world


def gpu_index(config: RunConfig, place: RankInfo) -> int | None:
    """Return the index of this process's GPU among those that it sees; None on a CPU.

    It is `device.index` or the local rank; that of the one that it sees under `--gpus-per-task=1`.
    """
    if device_type(config).type != "cuda":
        return None
    index = config.device.index
    count = max(1, torch.cuda.device_count())
    return index if isinstance(index, int) else place.local_rank % count


def gpu_uuid(index: int | None) -> str:
    """Return the identity of the GPU with this index; "" if there is none."""
    if index is None or not 0 <= index < torch.cuda.device_count():
        return ""
    return str(torch.cuda.get_device_properties(index).uuid)


def _check_own_gpus(gpus: Sequence[str], typed_index: int | str | None) -> None:
    """Raise ConfigError if two processes have one GPU, which NCCL cannot use."""
    for rank, gpu in enumerate(gpus):
        first = gpus.index(gpu)
        if not gpu or first == rank:
            continue
        key, value, fix = "distributed.processes", "", "start fewer processes"
        if isinstance(typed_index, int):
            key, value, fix = "device.index", f"is {typed_index}: ", "leave it out"
        problem = f"processes {first} and {rank} would share GPU {gpu}, and nccl needs one for each"
        raise ConfigError(key, value + problem, f"{fix}, or use distributed.backend=gloo")


def join_from_program(
    config: RunConfig, folder: Path | None, scope: ExitStack
) -> tuple[World, Path | None]:
    """Join the others from a user's program; the folder is that of rank 0.

    Raises UsageError if this is not one of several processes.
    """
    place = detect_rank()
    if place is None:
        problem = "this process was not launched as one of several"
        fix = "start with `torchrun --nproc-per-node 2 program.py` (or srun), or leave it out"
        raise UsageError(f"distributed={config.distributed.kind.value}: {problem}; {fix}")
    place.check(config.distributed.processes)
    world = join_world(config, place, scope)
    return world, world.broadcast_choice(lambda: folder)


def config_for_rank(config: RunConfig, place: RankInfo) -> RunConfig:
    """Return the config with this process's device and share of the machine's cores.

    Only rank 0 shows progress.
    """
    device = config.device
    if device.threads is None and place.local_size > 1:
        device = replace(device, threads=_thread_count(place))
    if (index := gpu_index(config, place)) is not None:
        device = replace(device, index=index)
    config = copy(config)  # not validated again: its techniques may be the caller's
    config.device = device
    if place.rank:
        config.monitoring = replace(config.monitoring, progress=False)
    return config


def _thread_count(place: RankInfo) -> int:
    """Return the threads of this process: SLURM's allocation, or a share of the cores."""
    allocated = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if place.by == "slurm" and allocated.isdigit():
        return int(allocated)
    cores, omp_threads = usable_cores(), os.environ.get("OMP_NUM_THREADS", "")
    if place.by == "runner" and omp_threads.isdigit():
        cores = min(cores, int(omp_threads))
    return max(1, cores // place.local_size)


def device_type(config: RunConfig) -> Any:
    """Return the type of device that the run will select, without selecting it."""
    kind = config.device.kind
    cuda = kind is DeviceKind.cuda or (kind is DeviceKind.auto and torch.cuda.is_available())
    if kind is DeviceKind.mps:
        raise DeviceError("device.kind=mps: distributed needs cpu or cuda; use device=cpu")
    return torch.device("cuda" if cuda else "cpu")
