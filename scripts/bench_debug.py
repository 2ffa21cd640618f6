"""What guards, checks and debug tools add to a step, each beside the same run without.

    python scripts/bench_debug.py [tiny] [cnn] [gpt] [--threads N] [--rounds N] [--steps N]
                                  [--only NAME,NAME]

Runs of the two kinds take turns in one process; what is added is to the mean of the two turns
around it, so a drift of the machine hits both alike. The steps' own time is measured (data,
forward, backward, update, hooks, reports), after the first few; what a tool does once, before the
first step or after the last, is not in it: that is the column "once". A tool that looks now and
then has one look in 50 steps. `control` is a run compared with itself.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODELS = {
    "tiny": "data=digits model=mlp training.batch_size=32".split(),
    "cnn": """
    data=synthetic data.form=images data.samples=512 model=cnn training.batch_size=64
    """.split(),
    "gpt": "data=stdlib_text model=gpt training.batch_size=8".split(),
}
STEPS = {"tiny": 400, "cnn": 100, "gpt": 100}
WARM = 10
QUIET = """
    training.validate_every=1000000 monitoring.progress=false optimization=basic
    checkpoint=off
    """.split()
NO_GUARD = ["stability=off", "debug.capture.enabled=false"]
TOOLS: dict[str, tuple[list[str], list[str]]] = {
    # name: (what it is compared with, what it is)
    "control": ([], []),
    "stability=default": (NO_GUARD, []),
    "checks of batches": (["checks=off"], []),
    "gradients, each 50": ([], ["debug=gradients", "debug.every=50"]),
    "memory, each 50": ([], ["debug=memory", "debug.every=50"]),
    "profile, outside its windows": ([], ["debug=profile", "debug.max_iterations=1"]),
    "anomaly, every step": ([], ["debug=anomaly"]),
    "anomaly, each 50": ([], ["debug=anomaly", "debug.anomaly.every=50"]),
    "gradcheck": ([], ["debug=gradcheck"]),
    "full, each 50": ([], ["debug=full", "debug.every=50"]),
}


def once(overrides: list[str], steps: int) -> tuple[float, float]:
    """Microseconds a step over one run, and the seconds that it took beside its steps."""
    from runner import build, compose, train

    config = compose([*overrides, *QUIET, f"training.steps={steps}"])
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, build(config, Path(folder)) as run:
        train(run)
        seconds = run.stopwatch.step_seconds().tolist()
    beside = time.perf_counter() - start - sum(seconds)
    kept = seconds[WARM:]
    return 1e6 * sum(kept) / len(kept), beside


def measure(kind: str, name: str, steps: int, rounds: int) -> dict[str, Any]:
    """The added time per step of one tool: median, 95 % interval by the sign test, microseconds."""
    from runner.measure.benchmark.statistics import median_interval

    base, variant = ([*MODELS[kind], *extra] for extra in TOOLS[name])
    once(base, steps), once(variant, steps)  # imports, caches, a first start of the profiler
    before, added, ratios, plain, beside = once(base, steps), [], [], [], []
    for _ in range(rounds):
        gc.collect()
        mine = once(variant, steps)
        after = once(base, steps)
        middle = (before[0] + after[0]) / 2
        added.append(mine[0] - middle)
        ratios.append(mine[0] / middle)
        plain.append(middle)
        beside.append(mine[1] - (before[1] + after[1]) / 2)
        before = after
    low, high = median_interval(ratios, 0.05)
    return {
        "us": statistics.median(plain),
        "added_us": statistics.median(added),
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
        "once_s": statistics.median(beside),
    }


def main() -> None:
    """Parse, measure, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", default=list(MODELS))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--only", default="", help="parts of names, comma-separated")
    wanted = parser.parse_args()
    if unknown := set(wanted.kinds) - set(MODELS):
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(MODELS)}")
    if wanted.threads:
        os.environ["OMP_NUM_THREADS"] = str(wanted.threads)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import logging

    import torch

    logging.disable(logging.WARNING)
    if wanted.threads:
        QUIET.append(f"device.threads={wanted.threads}")
    names = [n for n in TOOLS if not wanted.only or any(p in n for p in wanted.only.split(","))]
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    print(f"{machine}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{wanted.rounds} rounds\n")
    print("| model | tool | step without | added | ratio | 95 % interval | once |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for kind in wanted.kinds:
        for name in names:
            row = measure(kind, name, wanted.steps or STEPS[kind], wanted.rounds)
            print(
                f"| {kind} | {name} | {row['us'] / 1e3:.3g} ms | {row['added_us']:+.1f} µs "
                f"| {row['ratio']:.3f} | {row['low']:.3f} to {row['high']:.3f} "
                f"| {row['once_s']:+.2f} s |",
                flush=True,
            )


if __name__ == "__main__":
    main()
