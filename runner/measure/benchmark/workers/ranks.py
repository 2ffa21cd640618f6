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

from runner.core.build.build import Components, build
from runner.core.checkpoint.ownership import folder_is_checked
from runner.core.config.run_config import RunConfig
from runner.core.errors import ConfigError, ProcessLost
from runner.core.record.console import set_up_logging
from runner.core.record.storage import guard_folder, make_folder
from runner.core.schemas.device import DeviceKind
from runner.core.schemas.distributed import DistributedConfig
from runner.core.security.child_process import EXIT_TIMEOUT_S, worker_environment
from runner.core.security.masked_process import MaskingState, run_masked
from runner.core.security.pickle_transfer import unpickle_parts
from runner.core.train.loop import train
from runner.measure.benchmark.workers.worker import WorkerSpec, remove_limits
from runner.scale.distributed.join import join_world
from runner.scale.distributed.outcome import RANKS_FOLDER
from runner.scale.distributed.rank_info import LOOPBACK, RankInfo
from runner.scale.distributed.world import World, host_local_store

SAFE_PATH = "PYTHONSAFEPATH"
# longer than other arms' turns; the pool detects a process that hangs
COLLECTIVE_TIMEOUT_S = 86_400.0


@contextmanager
def join_ranks(
    config: RunConfig, spec: WorkerSpec, payload: bytes
) -> Iterator[tuple[RunConfig, World | None]]:
    """Start the other ranks, join them, and yield the shared config and world (None if alone)."""
    size = _count_processes(config)
    if size == 1:
        yield replace(config, distributed=DistributedConfig()), None
        return
    distributed = replace(config.distributed, timeout_s=COLLECTIVE_TIMEOUT_S)
    config, store = replace(config, distributed=distributed), host_local_store()
    host, port = LOOPBACK, store.port
    places = [RankInfo(i, size, i, size, host, port, True, by="runner") for i in range(size)]
    spec, safe_path = replace(spec, config=config), SAFE_PATH in os.environ
    context = multiprocessing.get_context("spawn")
    arguments = [(MaskingState(), _train_rank, spec, payload, p, safe_path) for p in places[1:]]
    other_ranks = [context.Process(target=run_masked, args=args) for args in arguments]
    try:
        with worker_environment():
            for process in other_ranks:
                process.start()
        os.environ.update(places[0].environ())
        with ExitStack() as scope:
            yield config, join_world(config, places[0], scope)
    finally:
        for process in other_ranks:
            if process.pid is not None:
                process.join(EXIT_TIMEOUT_S)
                process.kill()


def _count_processes(config: RunConfig) -> int:
    """Return how many processes train the arm's model. Raises ConfigError for several nodes."""
    if config.distributed.nodes > 1:
        raise ConfigError("distributed.nodes", "job=benchmark uses one machine", "remove it")
    gpus = 0 if config.device.kind is DeviceKind.cpu else torch.cuda.device_count()
    return config.distributed.processes or max(1, gpus)


def _train_rank(spec: WorkerSpec, payload: bytes, place: RankInfo, safe_path: bool) -> None:
    """Train as one of the other ranks; its output is in the worker's log."""
    if not safe_path:
        os.environ.pop(SAFE_PATH, None)  # needed only during the start
    os.environ.update(place.environ())
    folder = None if spec.folder is None else spec.folder / RANKS_FOLDER / str(place.rank)
    if spec.folder is not None and folder is not None:
        guard_folder(spec.folder)
        make_folder(folder)
    set_up_logging(spec.config.monitoring.log_level, folder, screen=False)
    parts = unpickle_parts(payload)
    del parts["metrics"]
    with suppress(ProcessLost), ExitStack() as scope:  # rank 0 reports the error
        parts["world"] = join_world(spec.config, place, scope)
        scope.enter_context(folder_is_checked())  # the benchmark's own folder
        run = scope.enter_context(build(spec.config, spec.folder, Components(**parts)))
        remove_limits(run)
        train(run)
