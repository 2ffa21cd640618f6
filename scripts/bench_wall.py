"""Wall time of the default command beside the same training written by hand, start-up included.

    python scripts/bench_wall.py [--pairs 7]

Whole processes, in turn; the ratio is pair by pair, so a drift of the machine hits both. One thread
for both: it is what ours takes for so small a model, and the fastest by hand on a busy machine.
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
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def seconds(command: list[str], folder: str) -> float:
    start = perf_counter()
    subprocess.run(command, cwd=folder, env=ENVIRONMENT, check=True, capture_output=True)
    return perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=7)
    pairs = parser.parse_args().pairs
    by_hand, ours, help_text = [], [], []
    for pair in range(pairs + 1):
        with tempfile.TemporaryDirectory() as folder:
            script = str(ROOT / "scripts" / "handwritten_digits.py")
            one = seconds([sys.executable, script, folder], folder)
            other = seconds([sys.executable, "-m", "runner"], folder)
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
