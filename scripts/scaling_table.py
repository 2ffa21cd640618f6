"""Weights and speed of the same training by 1, 2 and 4 processes on this machine's CPU.

    python scripts/scaling_table.py [mlp cnn gpt] [--processes 1,2,4] [--steps N] [--timed N]

*distance* is that of the weights and buffers from a run without `distributed`, in fp64 after so
many steps of SGD with momentum, clipping and an average: the largest difference by the largest
number of its tensor. *steps/s* is the median of the second half of a run in fp32, one thread a
process; where there are more processes than cores, they wait for each other.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import socket
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from runner import Hook, build, compose, train  # noqa: E402
from runner.build import Components  # noqa: E402
from runner.distributed.config import DistributedConfig, DistributedKind  # noqa: E402
from runner.distributed.place import Place  # noqa: E402
from runner.distributed.world import World  # noqa: E402
from runner.parity.numerics import double  # noqa: E402
from runner.techniques.base import Evidence, RunBuilder, Technique  # noqa: E402
from runner.training.hook import Step  # noqa: E402
from runner.training.run import Run  # noqa: E402

COMMON = """
    device=cpu device.threads=1 optimization=none checkpoint=off optimizer=sgd
    optimizer.lr=0.01 optimizer.options.momentum=0.9 optimizer.ema=0.9
    stability.clip_norm=0.1 monitoring.progress=false training.validate_every=1000000
    """.split()
MODELS = {
    "mlp": "data=cancer model=mlp training.batch_size=64".split(),
    "cnn": "data=digits model=cnn model.width=8 training.batch_size=127".split(),
    "gpt": """
    data=synthetic data.form=tokens data.samples=64 data.sequence=16 model=gpt
    model.width=32 training.batch_size=23
    """.split(),
}
Cell = tuple[dict[str, Tensor], float]  # the weights in fp64, steps a second


class Double(Technique):
    """Everything in fp64, by which rounding is told from an error."""

    def apply(self, draft: RunBuilder) -> None:
        """Weights and batches."""
        draft.model.double()
        draft.placements.append(double)

    def engaged(self, run: Run) -> Evidence:
        """By the type of the weights."""
        return Evidence(next(run.model.parameters()).dtype is torch.float64)


class StepRate(Hook):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step(self, run: Run, step: Step) -> None:
        """Note the time."""
        self.ends.append(perf_counter())


def run_once(
    kind: str, model: str, steps: int, exact: bool, world: World | None
) -> tuple[dict[str, Tensor], float]:
    """The whole weights and buffers after so many steps, and steps a second."""
    several = [] if world is None else [f"distributed={kind}"]
    config = compose([*COMMON, *MODELS[model], *several, f"training.steps={steps}"])
    given: dict[str, Any] = {"world": world}
    if exact:
        config.optimization.extra = ["double"]
        config.security.trusted = ["double"]
        given["techniques"] = {"double": Double(True)}
    if world is not None:
        world.config = config.distributed
    rate = StepRate()
    with contextlib.redirect_stdout(io.StringIO()):
        with build(config, given=Components(**given)) as run:
            run.hooks.append(rate)
            train(run)
            state = {name: _whole(value).clone() for name, value in run.model.state_dict().items()}
    gc.collect()
    seconds = [after - before for before, after in pairwise(rate.ends[len(rate.ends) // 2 :])]
    return state, 1 / statistics.median(seconds)


def _whole(value: Any) -> Tensor:
    return value.detach().full_tensor() if isinstance(value, DTensor) else value


def measure(rank: int, size: int, port: int, typed: argparse.Namespace, to: str) -> None:
    """What one of the processes does; the first writes the cells to a file."""
    torch.set_num_threads(1)
    place = Place(rank, size, rank, size, "127.0.0.1", port, hosted=False)
    world = World(place, DistributedConfig(DistributedKind.ddp), torch.device("cpu"))
    cells: dict[str, Cell] = {}
    for model in typed.models:
        for kind in ("ddp", "fsdp"):
            weights, _ = run_once(kind, model, typed.steps, True, world)
            cells[f"{model} {kind}"] = weights, run_once(kind, model, typed.timed, False, world)[1]
    if world.first:
        torch.save(cells, to)
    world.barrier()
    world.close()
    os._exit(0)  # threads of gloo may end the interpreter by SIGABRT


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference, by the largest number of its tensor."""
    if ours.keys() != theirs.keys():
        raise ValueError("the models have other weights")
    return max(
        float((ours[name].double() - value.double()).abs().max() / value.double().abs().max())
        for name, value in theirs.items()
    )


def main() -> None:
    """Parse, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--processes", default="1,2,4", help="comma-separated")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--timed", type=int, default=20)
    typed = parser.parse_args()
    torch.set_num_threads(1)
    alone: dict[str, Cell] = {}
    for model in typed.models:
        weights, _ = run_once("none", model, typed.steps, True, None)
        alone[model] = weights, run_once("none", model, typed.timed, False, None)[1]
    print(f"# {os.cpu_count()} cores, torch {torch.__version__}, {typed.steps} steps in fp64")
    print("| model | distributed | processes | distance | steps/s |\n|---|---|---:|---:|---:|")
    for model, (_, rate) in alone.items():
        print(f"| {model} | none | 1 | 0 | {rate:.1f} |", flush=True)
    for size in map(int, typed.processes.split(",")):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with tempfile.TemporaryDirectory() as folder:
            to = f"{folder}/cells.pt"
            torch.multiprocessing.spawn(measure, (size, port, typed, to), size)
            cells: dict[str, Cell] = torch.load(to)  # noqa: TID251  # our own
        for name, (weights, rate) in cells.items():
            model, kind = name.split()
            off = distance(weights, alone[model][0])
            print(f"| {model} | {kind} | {size} | {off:.1e} | {rate:.1f} |", flush=True)


if __name__ == "__main__":
    main()
