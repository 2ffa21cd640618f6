"""What one training step of our loop costs beside a hand-written loop on the same batches.

    python scripts/bench_overhead.py [tiny mlp cnn gpt] [--levels none,basic] [--clip]
                                     [--threads N] [--steps N] [--rounds N]

Every level takes its turn between two runs of the bare loop, so a drift of the machine affects all
alike; a ratio is to the mean of its two neighbours. Ours runs with its defaults: checks, clipping,
guard, metrics.jsonl and TensorBoard. The bare loop has the same model, optimizer and batches; with
--clip it also clips the gradients and looks with `.item()` whether loss and norm are finite. The
level `whole_step` is that technique alone, compiled before the steps that count.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import math
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from runner import Hook, build, compose, train  # noqa: E402
from runner.core.interfaces.hook import Step  # noqa: E402
from runner.core.interfaces.run import Run  # noqa: E402

COMMON = ["data=synthetic", "data.samples=1024", "schedule=constant", "checkpoint=off"]
MODELS = {
    "tiny": ["data.form=tabular", "model=mlp", "model.width=32", "training.batch_size=32"],
    "mlp": ["data.form=tabular", "data.features=784", "model=mlp", "model.width=1024"],
    "cnn": ["data.form=images", "model=cnn", "training.batch_size=64"],
    "gpt": ["data.form=tokens", "model=gpt", "training.batch_size=8"],
}
STEPS = {"tiny": 300, "mlp": 40, "cnn": 20, "gpt": 12}  # a quarter of them is warm-up


OWN = {"whole_step": ["optimization=none", "optimization.whole_step.enabled=true"]}


class StepTimes(Hook):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step(self, run: Run, step: Step) -> None:
        """Note the time."""
        self.ends.append(perf_counter())


def microseconds(ends: list[float]) -> float:
    """Of a step, by the ends of all but the first quarter."""
    first = len(ends) // 4
    return 1e6 * (ends[-1] - ends[first]) / (len(ends) - 1 - first)


def run_ours(kind: str, steps: int, level: str) -> float:
    """A run as the command line builds it; microseconds a step."""
    length = [f"training.steps={steps}", "training.validate_every=1000000"]
    chosen = OWN.get(level, [f"optimization={level}"])
    threads = f"device.threads={torch.get_num_threads()}"
    config = compose([*COMMON, *MODELS[kind], *length, *chosen, threads])
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        with build(config, Path(folder)) as run:
            run.hooks.append(times)
            train(run)
            run.device.synchronize()
    return microseconds(times.ends)


def run_bare(kind: str, steps: int, clip: bool) -> float:
    """A loop by hand over the batches of the same loader, without its checks."""
    config = compose([*COMMON, *MODELS[kind], "optimization=none", "checks=off"])
    ends = []
    with build(config) as run:
        model, optimizer = run.model.train(), torch.optim.AdamW(run.model.parameters())
        for _, (inputs, target) in zip(range(steps), run.train.batches(0), strict=False):
            optimizer.zero_grad()
            loss = run.objective(model(inputs), target)
            loss.backward()
            if clip:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if not (math.isfinite(loss.item()) and math.isfinite(norm.item())):
                    continue
            optimizer.step()
            run.device.synchronize()
            ends.append(perf_counter())
    return microseconds(ends)


def compare(
    kind: str, levels: list[str], steps: int, rounds: int, clip: bool
) -> dict[str, dict[str, float]]:
    """Measure in turn; microseconds, ratio with its quartiles, and what is added, by level."""
    rows: dict[str, list[tuple[float, float]]] = {level: [] for level in levels}
    bares = [run_bare(kind, steps, clip)]
    for _ in range(rounds):
        for level in levels:
            gc.collect()
            ours = run_ours(kind, steps, level)
            bares.append(run_bare(kind, steps, clip))
            rows[level].append((ours, ours / statistics.mean(bares[-2:])))
    table = {"bare": {"us": statistics.median(bares), "ratio": 1.0, "q1": 1.0, "q3": 1.0}}
    for level, values in rows.items():
        ratios = sorted(ratio for _, ratio in values)
        low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
        us = statistics.median(us for us, _ in values)
        table[level] = {"us": us, "ratio": statistics.median(ratios), "q1": low, "q3": high}
    return table


def main() -> None:
    """Parse, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=list(MODELS))
    parser.add_argument("--levels", default="none,basic", help="comma-separated")
    parser.add_argument("--clip", action="store_true", help="by hand, too, with a check")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rounds", type=int, default=9)
    typed = parser.parse_args()
    torch.set_num_threads(typed.threads)
    processor = platform.processor() or platform.machine()
    print(f"# {processor}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print("| model | loop | µs a step | ratio | quartiles |\n|---|---|---:|---:|---|")
    for kind in typed.kinds:
        steps = typed.steps or STEPS[kind]
        table = compare(kind, typed.levels.split(","), steps, typed.rounds, typed.clip)
        for name, row in table.items():
            numbers = f"{row['us']:.0f} | {row['ratio']:.3f} | {row['q1']:.3f} to {row['q3']:.3f}"
            print(f"| {kind} | {name} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
