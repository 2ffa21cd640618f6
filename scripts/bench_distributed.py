"""What a step of ours by several processes costs beside DistributedDataParallel written by hand.

    python scripts/bench_distributed.py [tiny cnn gpt] [--processes N ...] [--steps N] [--rounds N]

The batch is the same for any number of processes (strong scaling). The same processes make the
loops in turn, through the same group (gloo), with one thread each, so that a drift of the machine
affects all alike; a ratio is to the mean of the two runs by hand around it. The median of the
ratios is in its interval with 95 %. Ours runs with its defaults: checks, clipping, guard,
metrics.jsonl and TensorBoard. The loop by hand is torch's tutorial: DDP with its defaults, the loss
of a process's samples, AdamW. Its BatchNorm is each process's own, as ours is under
distributed.sync_batchnorm=false.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
from itertools import islice
from math import comb
from pathlib import Path
from time import perf_counter

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
from bench_overhead import COMMON, MODELS, StepTimes, microseconds  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from runner import build, compose, train  # noqa: E402
from runner.core.build.setup import Components  # noqa: E402
from runner.core.schemas.device import DistributedConfig, DistributedKind  # noqa: E402
from runner.scale.distributed.rank_info import RankInfo  # noqa: E402
from runner.scale.distributed.world import World  # noqa: E402

STEPS = {"tiny": 300, "cnn": 8, "gpt": 12}  # both in two minutes, where nothing else runs
ALIKE = ["device=cpu", "device.threads=1", "training.validate_every=1000000"]
OURS = {
    "none": ["optimization=none", "distributed.sync_batchnorm=false"],
    "none, one BatchNorm": ["optimization=none"],
}


def run_ours(kind: str, steps: int, more: list[str], world: World) -> float:
    """A run as the command line builds it; microseconds a step."""
    several = ["distributed=ddp", f"distributed.processes={world.size}"]
    config = compose([*COMMON, *MODELS[kind], *ALIKE, *several, f"training.steps={steps}", *more])
    world.config = config.distributed  # which says whether BatchNorm is one over all processes
    times = StepTimes()
    with tempfile.TemporaryDirectory() as own, contextlib.redirect_stdout(io.StringIO()):
        with build(config, world.all_gather(Path(own))[0], Components(world=world)) as run:
            run.hooks.append(times)
            train(run)
        world.barrier()  # the folder is rank 0's
    return microseconds(times.ends)


def run_by_hand(kind: str, steps: int, world: World) -> float:
    """A loop by hand over its share of each batch, without checks."""
    config = compose([*COMMON, *MODELS[kind], *ALIKE, "optimization=none", "checks=off"])
    config.training.batch_size //= world.size
    config.seed += world.rank
    ends = []
    with build(config) as run:
        model = DistributedDataParallel(run.model.train())
        optimizer = torch.optim.AdamW(model.parameters())
        for inputs, target in islice(run.train.batches(0), steps):
            optimizer.zero_grad()
            run.objective(model(inputs), target).backward()
            optimizer.step()
            ends.append(perf_counter())
    return microseconds(ends)


def measure(
    rank: int, size: int, port: int, kinds: list[str], steps: int | None, rounds: int, to: str
) -> None:
    """What one of the processes does; the first writes microseconds and ratios to a file."""
    torch.set_num_threads(1)
    place = RankInfo(rank, size, rank, size, "127.0.0.1", port, hosted=False)
    asked = DistributedConfig(DistributedKind.ddp, size)
    world = World(place, asked, torch.device("cpu"))
    found = {kind: compare(kind, steps or STEPS[kind], rounds, world) for kind in kinds}
    if world.is_rank_zero:
        Path(to).write_text(json.dumps(found))
    world.barrier()
    world.close()
    os._exit(0)  # threads of gloo may end the interpreter by SIGABRT


def compare(kind: str, steps: int, rounds: int, world: World) -> dict[str, dict[str, float]]:
    """The loops in turn: microseconds, and the ratio with its interval."""
    normed = any(isinstance(m, torch.nn.BatchNorm2d) for m in _modules(kind))
    loops = {name: more for name, more in OURS.items() if normed or "BatchNorm" not in name}
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    bares = [run_by_hand(kind, steps, world)]
    for _ in range(rounds):
        for name, more in loops.items():
            gc.collect()
            ours = run_ours(kind, steps, more, world)
            bares.append(run_by_hand(kind, steps, world))
            rows[name].append((ours, ours / statistics.mean(bares[-2:])))
    table = {"by hand": {"us": statistics.median(bares), "ratio": 1.0, "low": 1.0, "high": 1.0}}
    for name, values in rows.items():
        ratios = [ratio for _, ratio in values]
        low, high = median_interval(ratios)
        us = statistics.median(us for us, _ in values)
        table[name] = {"us": us, "ratio": statistics.median(ratios), "low": low, "high": high}
    return table


def median_interval(values: list[float]) -> tuple[float, float]:
    """Has the median with 95 % by its ranks, which are binomial; all values where they are few."""
    n = len(values)
    tails = [2 * sum(comb(n, i) for i in range(k + 1)) / 2**n for k in range(n // 2)]
    first = max(0, sum(tail <= 0.05 for tail in tails) - 1)
    return sorted(values)[first], sorted(values)[n - 1 - first]


def _modules(kind: str) -> list[torch.nn.Module]:
    with build(compose([*COMMON, *MODELS[kind], *ALIKE])) as run:
        return list(run.model.modules())


def main() -> None:
    """Parse, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=["cnn", "gpt"])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--processes", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=9)
    typed = parser.parse_args()
    processor = platform.processor() or platform.machine()
    print(f"# {processor}, processes of 1 thread, torch {torch.__version__}")
    print("| model | processes | loop | µs a step | ratio | 95 % |\n|---|---:|---|---:|---:|---|")
    for size in typed.processes:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with tempfile.TemporaryDirectory() as folder:
            to = f"{folder}/found.json"
            given = (size, port, typed.kinds, typed.steps, typed.rounds, to)
            torch.multiprocessing.spawn(measure, given, size)
            tables = json.loads(Path(to).read_text())
        for kind, table in tables.items():
            for name, row in table.items():
                ends = f"{row['low']:.3f} to {row['high']:.3f}"
                numbers = f"{row['us']:.0f} | {row['ratio']:.3f} | {ends}"
                print(f"| {kind} | {size} | {name} | {numbers} |")


if __name__ == "__main__":
    main()
