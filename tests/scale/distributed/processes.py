"""The same runs made by one process and by several, which are started once for all of them."""

from __future__ import annotations

import multiprocessing
import pickle
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from runner import Hook, RunConfig, build, train
from runner.core.build.setup import Components
from runner.core.errors import RunnerError
from runner.core.interfaces.hook import Step
from runner.core.interfaces.run import Run
from runner.core.schemas.device import DistributedConfig
from runner.measure.verify.processes import ReferencePrecision
from runner.scale.distributed.rank_info import RankInfo
from runner.scale.distributed.world import World
from tests import runs

DOUBLE = "double"  # in place of an override: the run is in fp64, by which rounding is told apart
LIMIT_S = 900
Case = tuple[RunConfig, Path | None]  # a run and its folder


@dataclass
class Outcome:
    """What a run came to, as one of its processes has it."""

    error: str = ""
    weights: dict[str, Tensor] = field(default_factory=dict)  # whole ones
    average: list[Tensor] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    skipped: int = 0
    moved: int = 0  # shards that are not in the memory that is updated
    techniques: dict[str, tuple[bool, str]] = field(default_factory=dict)  # engaged, reason
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)  # of techniques
    same: bool = True  # all processes have these weights, in their bits
    seeds: list[int] = field(default_factory=list)  # of the last step's random numbers, by process


class _Watch(Hook):
    def __init__(self, outcome: Outcome) -> None:
        self.outcome, self.seed = outcome, 0

    def on_step(self, run: Run, step: Step) -> None:
        self.outcome.losses.append(float(step.loss.nan_to_num()))  # of a step that was not made
        self.outcome.norms.append(float(step.grad_norm))
        self.seed = torch.initial_seed()


def compose_cases(
    cases: Mapping[str, Sequence[str]], processes: int, kind: str = "ddp"
) -> dict[str, Case]:
    """The config of each, for so many processes, without a folder."""
    several = [f"distributed={kind}", f"distributed.processes={processes}"]
    configs: dict[str, Case] = {}
    for name, overrides in cases.items():
        typed = ["optimization=none"] * (DOUBLE in overrides)
        typed += [text for text in overrides if text != DOUBLE] + several * (processes > 1)
        config = runs.config("checkpoint=off", "device.threads=1", *typed)
        config.optimization.extra = [DOUBLE] * (DOUBLE in overrides)
        configs[name] = config, None
    return configs


def run_one(config: RunConfig, folder: Path | None = None, world: World | None = None) -> Outcome:
    """Train as the config says; an error on purpose is an outcome."""
    watch = _Watch(outcome := Outcome())
    try:
        double = ReferencePrecision(True, fp64=True)
        given = Components(world=world, techniques={"double": double})
        with build(config, folder, given=given) as run:
            run.hooks.append(watch)
            summary = train(run)
            run.checkpointer.wait()
            outcome.weights = {k: _whole(v) for k, v in run.model.state_dict().items()}
            outcome.average = [_average(run, a) for a in run.update.average]
            outcome.moved = 0 if run.shards is None else run.shards.count_moved()
    except RunnerError as error:
        outcome.error = str(error)
        return outcome
    outcome.metrics, outcome.skipped = dict(summary.metrics), summary.skipped_steps
    outcome.techniques = {row.name: (row.engaged, row.reason) for row in summary.techniques}
    outcome.facts = {row.name: row.evidence for row in summary.techniques}
    if world is not None:
        each = world.all_gather([t.double().sum().item() for t in outcome.weights.values()])
        outcome.same = all(other == each[0] for other in each)
        outcome.seeds = world.all_gather(watch.seed)
    return outcome


def _whole(value: Any) -> Tensor:
    return (value.detach().full_tensor() if isinstance(value, DTensor) else value).clone()


def _average(run: Run, own: Tensor) -> Tensor:
    return torch.cat(run.world.all_gather(own)) if run.world and run.shards else own.clone()


@contextmanager
def world_of_one(config: DistributedConfig | None = None) -> Iterator[World]:
    place = RankInfo(0, 1, 0, 1, "127.0.0.1", 0, hosted=False)
    world = World(place, config or DistributedConfig(), torch.device("cpu"))
    try:
        yield world
    finally:
        world.close()
        if torch.distributed.is_initialized():  # a world under nccl leaves its group as it is
            torch.distributed.destroy_process_group()


@contextmanager
def alone(config: RunConfig, folder: Path | None = None, **given: Any) -> Iterator[Run]:
    """A distributed run of this process alone."""
    with world_of_one(config.distributed) as world:
        with build(config, folder, Components(world=world, **given)) as run:
            yield run


def run_together(processes: int, cases: Mapping[str, Case]) -> list[dict[str, Outcome]]:
    """The outcome of each run, by rank, from so many processes, which make one after another."""
    if processes == 1:
        threads = torch.get_num_threads()
        try:
            return [{name: run_one(*case) for name, case in cases.items()}]
        finally:
            torch.set_num_threads(threads)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["runner.scale.distributed.rank"])
    pipes = [context.Pipe(False) for _ in range(processes)]
    parts = [
        context.Process(target=_rank, args=(rank, processes, port, dict(cases), pipe[1]))
        for rank, pipe in enumerate(pipes)
    ]
    for part in parts:
        part.start()
    outcomes = []
    try:
        for receiver, sender in pipes:
            sender.close()
            if not receiver.poll(LIMIT_S):
                raise TimeoutError(f"{processes} processes did not end in {LIMIT_S} s")
            outcomes.append(pickle.loads(receiver.recv_bytes()))  # noqa: S301  # our own
        return outcomes
    finally:
        for part in parts:
            part.join(10)
            part.kill()
            part.join()


def _rank(rank: int, size: int, port: int, cases: dict[str, Case], sender: Any) -> None:
    multiprocessing.set_start_method(None, force=True)  # data workers are forks, as in a run
    torch.set_num_threads(1)
    place = RankInfo(rank, size, rank, size, "127.0.0.1", port, hosted=False, by="test")
    first = next(iter(cases.values()))[0].distributed
    world = World(place, replace(first, timeout_s=300), torch.device("cpu"))
    outcomes = {}
    try:
        for name, (config, folder) in cases.items():
            world.config = config.distributed
            try:
                outcomes[name] = run_one(config, folder, world)
            except Exception as error:
                error.add_note(f"in {name}, process {rank}")
                raise
            world.barrier()
        sender.send_bytes(pickle.dumps(outcomes))
        world.barrier()
    finally:
        sender.close()
        world.close()


def distances(ours: Outcome, theirs: Outcome) -> dict[str, float]:
    """Of the weights and buffers, their averages, the losses and the norms of gradients."""
    values = {"loss": (ours.losses, theirs.losses), "norm": (ours.norms, theirs.norms)}
    found = {
        name: relative(*(torch.tensor(each, dtype=torch.float64) for each in pair))
        for name, pair in values.items()
    }
    found |= {name: relative(ours.weights[name], theirs.weights[name]) for name in theirs.weights}
    averages = zip(ours.average, theirs.average, strict=True)
    return found | {f"average {i}": relative(*pair) for i, pair in enumerate(averages)}


def relative(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors, by the largest number in them."""
    a, b = a.double(), b.double()
    size = b.abs().max().item()
    return (a - b).abs().max().item() / size if size else (a - b).abs().max().item()
