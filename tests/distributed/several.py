"""Several processes that make one run after another, in one start of all."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from runner import RunConfig, build, train
from runner.build import Components
from runner.distributed.place import Place
from runner.distributed.world import World
from runner.errors import RunnerError
from runner.parity.numerics import double
from runner.techniques.base import Evidence, RunBuilder, Technique
from runner.training.run import Run

LIMIT_S = 240
Case = tuple[RunConfig, Path]
Look = Callable[[Run], Any]


class Double(Technique):
    """Everything in fp64, by which rounding is told from an error."""

    def apply(self, draft: RunBuilder) -> str | None:
        draft.model.double()
        draft.placements.append(double)
        return None

    def engaged(self, run: Run) -> Evidence:
        return Evidence(run.update.parameters[0].dtype is torch.float64, "")


def make(config: RunConfig, folder: Path | None, world: World | None, look: Look | None) -> Any:
    """What `look` sees of a run that was trained, or the error it ended with."""
    given = Components(world=world, techniques={"double": Double(True)})
    try:
        with build(config, folder, given=given) as run:
            train(run)
            run.checkpointer.wait()
            return None if look is None else look(run)
    except RunnerError as error:
        return f"{type(error).__name__}: {error}"


def together(
    processes: int, cases: Mapping[str, Case], look: Look | None = None
) -> list[dict[str, Any]]:
    """What each process has of each run, by rank."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["runner.distributed.rank"])
    pipes = [context.Pipe(False) for _ in range(processes)]
    parts = [
        context.Process(target=_rank, args=(rank, processes, port, dict(cases), look, pipe[1]))
        for rank, pipe in enumerate(pipes)
    ]
    for part in parts:
        part.start()
    try:
        for receiver, sender in pipes:
            sender.close()
            if not receiver.poll(LIMIT_S):
                raise TimeoutError(f"{processes} processes did not end in {LIMIT_S} s")
        return [receiver.recv() for receiver, _ in pipes]
    finally:
        for part in parts:
            part.join(10)
            part.kill()
            part.join()


def _rank(
    rank: int, size: int, port: int, cases: dict[str, Case], look: Look | None, sender: Any
) -> None:
    torch.set_num_threads(1)
    place = Place(rank, size, rank, size, "127.0.0.1", port, hosted=False, by="test")
    first = next(iter(cases.values()))[0].distributed
    world = World(place, replace(first, timeout_s=15), torch.device("cpu"))
    found = {}
    try:
        for name, (config, folder) in cases.items():
            world.config, world.kind = config.distributed, config.distributed.kind.value
            world.shards, world.alone, world.no_sync = None, None, nullcontext
            found[name] = make(config, folder, world, look)
            world.barrier()
        sender.send(found)
    finally:
        world.close()
