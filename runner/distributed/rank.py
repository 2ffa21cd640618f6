"""One process of a distributed run, from its start to its outcome."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from traceback import format_exception
from typing import Any

from runner.build import Components
from runner.config import RunConfig
from runner.device.capabilities import usable_cores
from runner.device.config import DeviceKind
from runner.distributed.agent import accept_signals, refuse_signals
from runner.distributed.outcome import RankOutcome
from runner.distributed.place import Place
from runner.distributed.world import RANKS, World, as_lost, is_lost
from runner.errors import DeviceError, UsageError
from runner.jobs import train
from runner.masking import masked
from runner.record.console import close_logging, set_up_logging
from runner.security.secrets import redact_errors
from runner.training.signals import interruption_before_run, signals_unwind
from runner.training.summary import Summary

log = logging.getLogger("runner")
STACKS = "debug/ranks"  # where each thread of each process stood when it waited for too long


def start(config: RunConfig, folder: Path, given: Components, place: Place) -> None:
    """What a new process does: its part of the run. Its outcome is a file for the agent."""
    os.setpgid(0, 0)  # a terminal's Ctrl-C comes by the process that started this one, once
    os.environ.pop("PYTHONSAFEPATH", None)  # it was the fork server's
    os.environ.update(place.environ())
    multiprocessing.set_start_method(None, force=True)  # the usual one: a fork inherits its data
    _end_with_parent()
    outcome = RankOutcome(place.rank)
    try:
        with signals_unwind(), redact_errors():
            try:
                accept_signals()
                run_rank(config, folder, given, place)
            finally:
                refuse_signals()  # until the outcome is written
    except KeyboardInterrupt as error:
        outcome = RankOutcome.of(
            place.rank, interruption_before_run(error, " before the first step")
        )
    except BaseException as error:
        outcome = RankOutcome.of(place.rank, as_lost(error) if is_lost(error) else error)
        if outcome.kind == "error" and outcome.exit_code == 1:
            for line in masked("".join(format_exception(error))).splitlines():
                log.error("  %s", line, extra={"live": True})  # not on the screen
    outcome.message = masked(outcome.message)
    if place.meeting is not None:
        outcome.write(place.meeting)
    close_logging()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if outcome.exit_code:
        os._exit(outcome.exit_code)  # the group's threads would end it by SIGABRT


def run_rank(config: RunConfig, folder: Path, given: Components, place: Place) -> Summary:
    """Train as one of several processes; `folder` is the run's, the same for all of them."""
    own = folder if place.rank == 0 else folder / RANKS / str(place.rank)
    own.mkdir(parents=True, exist_ok=True)
    set_up_logging(config.monitoring.log_level, own, screen=place.rank == 0)
    config = _for_place(config, place)
    with ExitStack() as stack:
        world = World(place, config.distributed, _device(config))
        stack.callback(world.close)
        world.watch(folder / STACKS / f"{place.rank}.txt")
        _check_same(world, config)
        return train.main(config, folder, replace(given, world=world))


def _for_place(config: RunConfig, place: Place) -> RunConfig:
    """The config on this process's device, with its share of the machine's cores."""
    device = config.device
    if device.threads is None and device.kind is not DeviceKind.cuda and place.local_size > 1:
        device = replace(device, threads=max(1, usable_cores() // place.local_size))
    if _device(config).type == "cuda":
        device = replace(device, index=place.local_rank)
    return replace(config, device=device)


def _device(config: RunConfig) -> Any:
    """The kind of device that the run will select, without selecting it."""
    import torch

    kind = config.device.kind
    cuda = kind is DeviceKind.cuda or (kind is DeviceKind.auto and torch.cuda.is_available())
    if kind is DeviceKind.mps:
        raise DeviceError("device.kind=mps: distributed needs cpu or cuda; use device=cpu")
    return torch.device("cuda" if cuda else "cpu")


def _check_same(world: World, config: RunConfig) -> None:
    """Raise UsageError where processes have other configs or versions: they would not agree."""
    import torch

    from runner.config import config_hash

    own = {"config": config_hash(config)[:12], "torch": torch.__version__}
    others = world.gather(own)
    for rank, other in enumerate(others):
        differing = [key for key in own if other[key] != others[0][key]]
        if differing:
            key = differing[0]
            problem = f"process {rank} has {key} {other[key]}, process 0 {others[0][key]}"
            raise UsageError(f"distributed: {problem}; start the same command on each machine")


def _end_with_parent() -> None:
    """No process trains on when the one that started it is killed, and another may continue.

    The kernel's own signal would be that of the fork server's death, which lives as long as this.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        Thread(target=_kill_self_after, args=(parent.sentinel,), daemon=True).start()


def _kill_self_after(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
