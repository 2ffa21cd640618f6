"""Whole commands, start-up included, beside what a person would run instead.

    python scripts/bench_wall.py [FIGURE …] [--pairs 7]
    python scripts/bench_wall.py levels       short runs under each level beside optimization=none

Whole processes, in turn; a ratio is of one pair, so that a drift of the machine hits both; printed
are the median, the smallest and the largest. All have one thread, which is what ours takes for so
small a model, and the fastest by hand. `typo` is in CPU seconds, all else in seconds of the clock.
A job of a sweep is the time of a longer sweep less that of a shorter one, for each job.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
PYTHON = [sys.executable, "-P"]
RUN = [*PYTHON, "-m", "runner"]
BY_HAND = [*PYTHON, str(ROOT / "scripts" / "handwritten_digits.py")]
IMPORT = [*PYTHON, "-c", "import torch"]
SWEEP = [*RUN, "-m", "training.steps=20", "optimization=none"]
SHORT = {
    "digits, mlp": ["training.steps=200"],
    "digits, cnn": ["model=cnn", "training.steps=60"],
    "text, gpt": ["data=stdlib_text", "model=gpt", "training.steps=15"],
}
Measure = Callable[[list[str], str], float]


def wall(command: list[str], folder: str) -> float:
    """Seconds of a command in that folder."""
    start = perf_counter()
    subprocess.run(command, cwd=folder, env=ENVIRONMENT, check=True, capture_output=True)
    return perf_counter() - start


def cpu(command: list[str], folder: str) -> float:
    """CPU seconds of a command, which may fail."""
    with open(os.devnull, "wb") as nowhere:
        process = subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stderr=nowhere)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime


def sweep_job(command: list[str], folder: str, jobs: int = 8) -> float:
    """Seconds that one more job of a sweep takes."""
    few = wall([*command, "seed=range(2)"], folder)
    return (wall([*command, f"seed=range({2 + jobs})"], folder) - few) / jobs


def page(command: list[str], folder: str, runs: int = 100) -> float:
    """Seconds of the comparison of so many runs."""
    root = Path(folder)
    wall([*RUN, "training.steps=20", "hydra.run.dir=all/0"], folder)
    for number in range(1, runs):
        shutil.copytree(root / "all/0", root / f"all/{number}")
    return wall(command, folder)


FIGURES: dict[str, tuple[Measure, list[str], list[str], str]] = {
    "default": (wall, RUN, [*BY_HAND, "."], "default run / by hand"),
    "short": (wall, [*RUN, "training.steps=10"], [*BY_HAND, ".", "10"], "10 steps / by hand"),
    "typo": (cpu, [*RUN, "trainnig.steps=3"], IMPORT, "typo in a key / import torch"),
    "help": (wall, [*RUN, "--help"], IMPORT, "--help / import torch"),
    "sweep": (sweep_job, SWEEP, [*RUN, "training.steps=20"], "job of a sweep / a run"),
    "page": (page, [*PYTHON, "-m", "runner.report", "all"], IMPORT, "100 runs / import torch"),
    "control": (wall, IMPORT, IMPORT, "control: import torch / the same"),
}


def measure(name: str, pairs: int) -> dict[str, float]:
    """Seconds of both, and their ratios."""
    how, ours, reference, _ = FIGURES[name]
    beside = cpu if how is cpu else wall
    rows = []
    for _ in range(pairs + 1):
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            rows.append((beside(reference, one), how(ours, other)))
    rows = rows[1:]  # the first one warms the file cache
    ratios = sorted(b / a for a, b in rows)
    known, taken = (statistics.median(column) for column in zip(*rows, strict=True))
    return {"reference_s": known, "ours_s": taken, "ratio": statistics.median(ratios),
            "least": ratios[0], "most": ratios[-1]}  # fmt: skip


def levels(pairs: int) -> None:
    """A short run under each level, to the mean of the two runs of `none` around it."""
    print("| run | none | level | level / none |\n|---|---|---|---|")
    for name, overrides in SHORT.items():
        command = [*RUN, *overrides]

        def once(level: str, command: list[str] = command) -> float:
            with tempfile.TemporaryDirectory() as folder:
                return wall([*command, f"optimization={level}"], folder)

        once("none")
        for level in ("none", "basic", "advanced", "ultra"):
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
    parser.add_argument("figures", nargs="*", metavar="FIGURE")
    parser.add_argument("--pairs", type=int, default=7)
    arguments = parser.parse_args()
    if unknown := {*arguments.figures} - {*FIGURES, "levels"}:
        parser.error(f"{', '.join(unknown)}: there are {', '.join([*FIGURES, 'levels'])}")
    if arguments.figures == ["levels"]:
        levels(arguments.pairs)
        return
    print("| figure | reference | ours | ratio |\n|---|---|---|---|")
    for name in arguments.figures or FIGURES:
        row = measure(name, arguments.pairs)
        print(
            f"| {FIGURES[name][-1]} | {row['reference_s']:.2f} s | {row['ours_s']:.2f} s | "
            f"{row['ratio']:.2f} [{row['least']:.2f}..{row['most']:.2f}] |",
            flush=True,
        )


if __name__ == "__main__":
    main()
