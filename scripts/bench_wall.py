"""Wall time of whole commands, start-up included.

    python scripts/bench_wall.py [--pairs 7]     the default command beside the same by hand
    python scripts/bench_wall.py levels          200 steps under each level beside optimization=none

Whole processes, in turn; the ratio is pair by pair, so a drift of the machine hits both. The first
has one thread for both: it is what ours takes for so small a model, and the fastest by hand on a
busy machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
SHORT = {
    "digits, mlp": [],
    "digits, cnn": ["model=cnn"],
    "text, gpt": ["data=stdlib_text", "model=gpt"],
    "parts, classifier": ["data=stdlib_parts", "model=classifier"],
}


def seconds(command: list[str], folder: str, **extra: str) -> float:
    start = perf_counter()
    environment = {**ENVIRONMENT, **extra}
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return perf_counter() - start


def levels(pairs: int) -> None:
    """A short run under each level, to the mean of the two runs of `none` around it."""
    print("| 200 steps | none | level | level / none |\n|---|---|---|---|")
    for name, overrides in SHORT.items():
        command = [sys.executable, "-m", "runner", *overrides, "training.steps=200"]

        def once(level: str, command: list[str] = command) -> float:
            with tempfile.TemporaryDirectory() as folder:
                return seconds([*command, f"optimization={level}"], folder)

        once("none")
        for level in ("none", "basic", "advanced"):
            before, laps, ratios = once("none"), [], []
            for _ in range(pairs):
                lap, after = once(level), once("none")
                ratios.append(2 * lap / (before + after))
                laps.append((after, lap))
                before = after
            ratios.sort()
            plain, ours = (statistics.median(column) for column in zip(*laps, strict=True))
            print(
                f"| {name}, {level} | {plain:.2f} s | {ours:.2f} s | "
                f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}..{ratios[-1]:.2f}] |",
                flush=True,
            )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=["default", "levels"], default="default")
    parser.add_argument("--pairs", type=int, default=7)
    arguments = parser.parse_args()
    if arguments.what == "levels":
        levels(arguments.pairs)
        return
    pairs = arguments.pairs
    by_hand, ours, help_text = [], [], []
    for pair in range(pairs + 1):
        with tempfile.TemporaryDirectory() as folder:
            script = str(ROOT / "scripts" / "handwritten_digits.py")
            one = seconds([sys.executable, script, folder], folder, OMP_NUM_THREADS="1")
            other = seconds([sys.executable, "-m", "runner"], folder, OMP_NUM_THREADS="1")
            answer = seconds([sys.executable, "-m", "runner", "--help"], folder)
        if pair:  # the first one warms the file cache
            by_hand.append(one)
            ours.append(other)
            help_text.append(answer)
    ratios = sorted(b / a for a, b in zip(by_hand, ours, strict=True))
    print(f"by hand           {statistics.median(by_hand):.2f} s")
    print(f"python -m runner  {statistics.median(ours):.2f} s")
    print(f"ratio             {statistics.median(ratios):.2f} [{ratios[0]:.2f}..{ratios[-1]:.2f}]")
    print(f"--help            {statistics.median(help_text):.2f} s")


if __name__ == "__main__":
    main()
