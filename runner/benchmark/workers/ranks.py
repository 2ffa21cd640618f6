"""The other ranks of an arm that several processes train; the worker itself is rank 0.

While the worker waits for its turn they wait in the collective verdict that ends each step.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import torch
from torch._C._distributed_c10d import TCPStore

from runner.benchmark.workers.process import ENDING_S, worker_environment
from runner.benchmark.workers.worker import WorkerSpec, continue_without_end
from runner.build import Components, build
from runner.config import RunConfig
from runner.device.config import DeviceKind
from runner.distributed.config import DistributedConfig
from runner.distributed.join import join
from runner.distributed.outcome import RANKS
from runner.distributed.place import Place
from runner.distributed.world import World
from runner.errors import ConfigError, ProcessLost
from runner.record.console import set_up_logging
from runner.security.pickle_transfer import opened
from runner.security.secrets import adopt_state
from runner.training.loop import train

HERE = "127.0.0.1"
SAFE = "PYTHONSAFEPATH"
WAIT_S = 86_400.0  # longer than other arms' turns; the pool detects a process that hangs


@contextmanager
def together(
    config: RunConfig, spec: WorkerSpec, parcel: bytes
) -> Iterator[tuple[RunConfig, World | None]]:
    """Start the other ranks, join them, and yield the shared config and world (None if alone)."""
    size = _processes(config)
    if size == 1:
        yield replace(config, distributed=DistributedConfig()), None
        return
    config = replace(config, distributed=replace(config.distributed, timeout_s=WAIT_S))
    store = TCPStore(HERE, 0, size, True, wait_for_workers=False)
    places = [Place(i, size, i, size, HERE, store.port, True, by="runner") for i in range(size)]
    spec, safe = replace(spec, config=config), SAFE in os.environ
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=_follow, args=(spec, parcel, place, safe)) for place in places[1:]
    ]
    try:
        with worker_environment():
            for process in others:
                process.start()
        os.environ.update(places[0].environ())
        with ExitStack() as scope:
            yield config, join(config, places[0], scope)
    finally:
        for process in others:
            if process.pid is not None:
                process.join(ENDING_S)
                process.kill()


def _processes(config: RunConfig) -> int:
    """Return how many processes train the arm's model. Raises ConfigError for several nodes."""
    if config.distributed.nodes > 1:
        raise ConfigError("distributed.nodes", "job=benchmark uses one machine", "remove it")
    gpus = 0 if config.device.kind is DeviceKind.cpu else torch.cuda.device_count()
    return config.distributed.processes or max(1, gpus)


def _follow(spec: WorkerSpec, parcel: bytes, place: Place, safe: bool) -> None:
    """Train as one of the other ranks; its output is in the worker's log."""
    if not safe:
        os.environ.pop(SAFE, None)  # needed only during the start
    adopt_state(spec.secrets)
    os.environ.update(place.environ())
    own = None if spec.folder is None else spec.folder / RANKS / str(place.rank)
    if own is not None:
        own.mkdir(parents=True, exist_ok=True)
    set_up_logging(spec.config.monitoring.log_level, own, screen=False)
    parts = opened(parcel)
    del parts["metrics"]
    with suppress(ProcessLost), ExitStack() as scope:  # rank 0 reports the error
        parts["world"] = join(spec.config, place, scope)
        run = scope.enter_context(build(spec.config, spec.folder, Components(**parts)))
        continue_without_end(run)
        train(run)
