"""What looking at each batch adds to a step, beside the same steps without.

    python scripts/bench_checks.py [tiny] [cnn] [gpt] [--threads N] [--rounds N] [--steps N]
                                   [--json FILE]

One run makes all steps; a block of steps with checks is followed by one without, in turns, on the
same weights, batches and caches. What is added is, for each block, its mean step less that of the
two around it. `look` is the time of the look alone, measured on the same batches in a row: a
bound that a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODELS = {
    "tiny": ["data=digits", "model=mlp", "training.batch_size=32"],
    "cnn": ["data=synthetic", "data.form=images", "data.samples=4096", "model=cnn",
            "training.batch_size=64"],
    "gpt": ["data=stdlib_text", "model=gpt", "training.batch_size=8"],
}  # fmt: skip
STEPS = {"tiny": 200, "cnn": 10, "gpt": 10}  # of a block
WARM = 70  # steps before
QUIET = ["monitoring.progress=false", "optimization=basic", "training.steps=1000000"]


class Turns:
    """Steps of one run, with the checks or without."""

    def __init__(self, run: Any) -> None:
        self.run, self.inputs = run, run.inputs
        self.batches: dict[bool, Iterator[Any]] = {}

    def block(self, on: bool, steps: int) -> float:
        """Microseconds a step."""
        from runner.training.step import make_step

        run, inputs = self.run, self.inputs
        run.inputs = run.train.inspector = inputs if on else None
        batches = run.train.batches(run.progress.step)
        next(batches)  # the order of the epoch is found out by whoever comes first
        batches = run.train.batches(run.progress.step)
        start = time.perf_counter()
        for _ in range(steps):
            batch = next(batches)
            if on:
                batch = inputs.admit(run.progress.step + 1, batch)
            step, _ = make_step(run, batch)
            run.progress.step += 1
        float(step.loss)  # waits for the device
        return 1e6 * (time.perf_counter() - start) / steps

    def look(self, count: int) -> float:
        """Median microseconds of one look, with the caches as a step leaves them or better."""
        run, inputs, taken = self.run, self.inputs, []
        run.train.inspector = None
        for number, batch in enumerate(run.train.batches(run.progress.step), run.progress.step):
            start = time.perf_counter()
            inputs.admit(number + 1, inputs.inspect(number, batch))
            taken.append(1e6 * (time.perf_counter() - start))
            if len(taken) >= count:
                return statistics.median(taken)
        return statistics.median(taken)


def measure(kind: str, steps: int, rounds: int) -> dict[str, float]:
    """Of one model: a step without, what is added to it, the ratio and its interval."""
    from runner import build, compose
    from runner.benchmark.statistics import median_interval

    with build(compose([*MODELS[kind], *QUIET])) as run:
        turns = Turns(run)
        run.model.train()
        turns.block(True, WARM)
        turns.block(False, steps)
        before, added, ratios, plain = turns.block(False, steps), [], [], []
        for _ in range(rounds):
            gc.collect()
            mine = turns.block(True, steps)
            after = turns.block(False, steps)
            middle = (before + after) / 2
            added.append(mine - middle)
            ratios.append(mine / middle)
            plain.append(middle)
            before = after
        look = turns.look(200)
    low, high = median_interval(ratios, 0.05)
    return {
        "us": statistics.median(plain), "added_us": statistics.median(added), "look_us": look,
        "ratio": statistics.median(ratios), "low": low, "high": high,
    }  # fmt: skip


def main() -> None:
    """Parse, measure, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", default=list(MODELS))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    if unknown := set(wanted.kinds) - set(MODELS):
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(MODELS)}")
    if wanted.threads:
        os.environ["OMP_NUM_THREADS"] = str(wanted.threads)
        QUIET.append(f"device.threads={wanted.threads}")
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import logging

    import torch

    logging.disable(logging.WARNING)
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    print(f"{machine}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{wanted.rounds} rounds\n")
    print("| model | step without | added | look alone | ratio | 95 % interval |")
    print("|---|---|---|---|---|---|", flush=True)
    found: dict[str, dict[str, float]] = {}
    for kind in wanted.kinds:
        row = found[kind] = measure(kind, wanted.steps or STEPS[kind], wanted.rounds)
        print(
            f"| {kind} | {row['us'] / 1e3:.3g} ms | {row['added_us']:+.1f} µs "
            f"| {row['look_us']:.0f} µs, {row['look_us'] / row['us']:.2%} "
            f"| {row['ratio']:.3f} | {row['low']:.3f} to {row['high']:.3f} |", flush=True,
        )  # fmt: skip
    if wanted.json:
        wanted.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
