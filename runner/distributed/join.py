"""How one of several processes joins the others of its run."""

from __future__ import annotations

import os
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from runner.config import RunConfig, config_hash
from runner.device.capabilities import usable_cores
from runner.device.config import DeviceKind
from runner.distributed.place import Place, find_place
from runner.distributed.world import World
from runner.errors import DeviceError, UsageError


def join(config: RunConfig, place: Place, scope: ExitStack) -> World:
    """Meet the others; the world ends with `scope`. Raises UsageError where they differ."""
    world = World(place, config.distributed, _device(config))
    scope.push(lambda kind, error, trace: world.close(error))
    own = {"config": config_hash(config)[:12], "torch": torch.__version__}
    others = world.gather(own)
    for rank, other in enumerate(others):  # processes that differ would not agree
        for key in own:
            if other[key] != others[0][key]:
                problem = f"process {rank} has {key} {other[key]}, process 0 {others[0][key]}"
                raise UsageError(f"distributed: {problem}; start the same command on each machine")
    return world


def find_others(
    config: RunConfig, folder: Path | None, scope: ExitStack
) -> tuple[World, Path | None]:
    """For a program of the user's that builds the run: the folder is the one that rank 0 names.

    Raises UsageError where this is not one of several processes.
    """
    place = find_place()
    if place is None:
        kind = config.distributed.kind.value
        raise UsageError(
            f"distributed={kind}: this is not one of several processes; start the program by "
            "`torchrun --nproc-per-node 2 program.py` (or srun), or leave distributed out"
        )
    place.check(config.distributed.processes, config.distributed.nodes)
    world = join(config, place, scope)
    return world, world.choose(lambda: folder)


def for_place(config: RunConfig, place: Place) -> RunConfig:
    """The config on this process's device, with its share of the machine's cores.

    One process shows the progress of all.
    """
    device = config.device
    if device.threads is None and device.kind is not DeviceKind.cuda and place.local_size > 1:
        device = replace(device, threads=_threads(place))
    if _device(config).type == "cuda":
        device = replace(device, index=place.local_rank)
    config = copy(config)  # not checked again: its techniques may be those of the caller
    config.device = device
    if place.rank:
        config.monitoring = replace(config.monitoring, progress=False)
    return config


def _threads(place: Place) -> int:
    """Of the cores: SLURM may have given each process its own, a sweep each job its share."""
    own = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if place.by == "slurm" and own.isdigit():
        return int(own)
    cores, share = usable_cores(), os.environ.get("OMP_NUM_THREADS", "")
    if place.by == "runner" and share.isdigit():
        cores = min(cores, int(share))
    return max(1, cores // place.local_size)


def _device(config: RunConfig) -> Any:
    """The kind of device that the run will select, without selecting it."""
    kind = config.device.kind
    cuda = kind is DeviceKind.cuda or (kind is DeviceKind.auto and torch.cuda.is_available())
    if kind is DeviceKind.mps:
        raise DeviceError("device.kind=mps: distributed needs cpu or cuda; use device=cpu")
    return torch.device("cuda" if cuda else "cpu")
