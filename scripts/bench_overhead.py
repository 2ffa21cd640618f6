"""What one training step of our loop costs, beside hand-written loops and other trainers.

    python scripts/bench_overhead.py PEERS tiny|mlp|cnn|gpt [--threads N] [--steps N] [--rounds N]
                                     [--only NAME,NAME] [--levels LEVEL,LEVEL] [--json FILE]

PEERS is a folder with `workloads.py` (`make(kind)`, `Timed`) and `overhead.py` (`ALL`: loops by
name, each a function that trains on `Timed` batches and returns microseconds a step). Every loop
takes its turn between two runs of the bare one, so a drift of the machine hits all alike; a ratio
is to the mean of its two neighbours. Ours runs with its defaults: clipping, guard, metrics.jsonl
and TensorBoard; all have the same number of threads.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MODELS = {
    "tiny": ["data=synthetic", "data.form=tabular", "model._target_=workloads.MLP"],
    "mlp": ["data=synthetic", "data.form=tabular", "data.features=784",
            "model._target_=workloads.MLP", "+model.dims=[784,1024,1024,10]"],
    "cnn": ["data=synthetic", "data.form=images", "model._target_=workloads.CNN"],
    "gpt": ["data=synthetic", "data.form=tokens", "model._target_=workloads.GPT"],
}  # fmt: skip
LENGTH = {"tiny": (260, 60), "mlp": (40, 10), "cnn": (12, 3), "gpt": (12, 3)}  # steps, warm-up


class Ready:
    """Batches that are ready, in the shape of our loader."""

    choices: list[Any] = []

    def __init__(self, timed: Any, samples: int) -> None:
        self.timed, self.count, self.steps_per_epoch = timed, samples, len(timed)

    def batches(self, start: int) -> Iterator[Any]:
        return iter(self.timed)

    def peek(self) -> Any:
        return self.timed.data[0]

    def samples(self, step: int) -> int:
        return self.count

    def close(self) -> None:
        pass


def ours(kind: str, steps: int, warm: int, level: str) -> Callable[[], float]:
    """One run of our own loop, built as the command line builds it."""
    import torch
    from workloads import Timed, make

    from runner import build, compose, train

    _, data, _ = make(kind)
    overrides = [
        *MODELS[kind], "security.trusted=[workloads]", f"optimization={level}",
        f"training.steps={steps}",
        f"training.batch_size={data[0][1].shape[0]}", "training.validate_every=1000000",
        "data.samples=256", "schedule=constant",
        f"device.threads={torch.get_num_threads()}",  # the same for all, so only the loop differs
    ]  # fmt: skip
    config = compose(overrides)

    def once() -> float:
        timed = Timed(data, steps, warm)
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            with build(config, Path(folder)) as run:
                run.train = Ready(timed, data[0][1].shape[0])
                train(run)
        return float(timed.us)

    return once


def main() -> None:
    """Parse, measure, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("peers", type=Path)
    parser.add_argument("kind", choices=MODELS)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="parts of names, comma-separated")
    parser.add_argument("--levels", default="basic", help="of ours, comma-separated")
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    if wanted.threads:
        os.environ["OMP_NUM_THREADS"] = str(wanted.threads)
    steps, warm = LENGTH[wanted.kind]
    steps = wanted.steps or steps
    # the peers' module reads its own command line when it is imported
    sys.argv = ["overhead.py", wanted.kind, str(wanted.threads), str(steps), str(warm), "1"]
    sys.path[:0] = [str(wanted.peers), str(Path(__file__).parents[1])]
    import torch
    from overhead import ALL

    parts = [part for part in wanted.only.split(",") if part]
    loops: dict[str, Callable[[], float]] = {
        f"runner, optimization={level}": ours(wanted.kind, steps, warm, level)
        for level in wanted.levels.split(",")
    }
    loops |= {k: f for k, f in ALL.items() if k != "bare" and any(p in k for p in parts)}
    loops["bare (control)"] = bare = ALL["bare"]

    print(f"# {wanted.kind}: {platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
          f"{torch.get_num_threads()} threads, torch {torch.__version__}, {steps} steps, "
          f"{wanted.rounds} rounds", flush=True)  # fmt: skip
    for name, loop in list(loops.items()):  # one pass that does not count: imports, allocations
        try:
            loop()
        except Exception as error:  # a peer that is not installed is left out, ours is not
            if name.startswith("runner"):
                raise
            print(f"  left out: {name}: {type(error).__name__}: {error}", flush=True)
            del loops[name]
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in loops}
    bares = []
    for _ in range(wanted.rounds):
        before = bare()
        for name, loop in loops.items():
            gc.collect()
            mine = loop()
            after = bare()
            middle = (before + after) / 2
            rows[name].append((mine, mine / middle, mine - middle))
            bares.append(after)
            before = after
    table = {"bare": {"us": statistics.median(bares), "ratio": 1.0}}
    print(f"  {'bare':52s} {table['bare']['us']:10.1f} us")
    for name, values in rows.items():
        us, ratio, added = (statistics.median(v[i] for v in values) for i in range(3))
        ratios = sorted(v[1] for v in values)
        low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
        table[name] = {"us": us, "ratio": ratio, "q1": low, "q3": high, "added_us": added}
        print(
            f"  {name:52s} {us:10.1f} us  x{ratio:.3f} [{low:.3f}..{high:.3f}]"
            f"  added {added:+9.1f} us"
        )
    if wanted.json:
        wanted.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
