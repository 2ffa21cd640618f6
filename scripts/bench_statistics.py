"""How often the interval of a benchmark holds the truth, on simulated machines.

    python scripts/bench_statistics.py [--runs 1000] [--narrow 0.02] [--blocks 96]

For each kind of noise, two arms that are equally fast and three ways to know: the benchmark's own
(`Spending`, order statistics, wider where blocks resemble each other), the same looks at plain 95 %
intervals, and a bootstrap of the median after each block; each stops as soon as its interval is
narrow. The table has the share of runs whose last interval holds a ratio of 1, and how many blocks
it took. In some rows the arms differ: one suffers more stalls than the other, so that the usual
ratio is not 1, and the truth is the median of very many blocks (first column). In the last rows
processes differ, each from the next, which nothing that looks at one process each can cover.

The second table is of what is said in the end: how often an arm that is as fast as the reference
is claimed to be faster or slower, beside a control, one minute of measuring.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runner.benchmark.blocks import StoppingRule  # noqa: E402
from runner.benchmark.statistics import Spending, lag1_rank_autocorrelation, median_interval  # noqa: E402
from tests.benchmark.simulated_machine import (  # noqa: E402
    BASE,
    NOISES,
    PROCESSES,
    Noise,
    claimed,
    measure,
)

UNLIKE = {
    "one stalls in 5 %, one never": Noise(stalls=0.0, stalled={"control": 0.05}),
    "one stalls in 20 %, one in 5 %": Noise(stalled={"control": 0.2}),
    "one stalls in 20 %, one never": Noise(stalls=0.0, stalled={"control": 0.2}),
    "the same, by steps: 15 a turn": Noise(stalls=0.0, stalled={"control": 0.2}, steps=15),
}
Known = tuple[float, float, int]


def bootstrap_until_narrow(
    ratios: list[float], narrow: float, draw: np.random.Generator, start: int = 5
) -> tuple[float, float, int]:
    """What not to do: 95 % of bootstrapped medians, looked at after each block until narrow."""
    logs = np.log(ratios)
    low, high = -math.inf, math.inf
    for count in range(start, len(logs) + 1):
        medians = np.median(logs[draw.integers(0, count, (200, count))], axis=1)
        low, high = np.quantile(medians, [0.025, 0.975])
        if high - low <= 2 * math.log1p(narrow):
            break
    return math.exp(low), math.exp(high), count


def ratios(noise: Noise, seed: int, blocks: int) -> list[float]:
    """Of an arm that is as fast as the reference, as many as there may be."""
    rule = StoppingRule(1e-9, 1e9, looks=(blocks,))
    turns = measure(noise, seed, rule, {BASE: 1.0, "control": 1.0}).turns
    pairs = zip(turns[BASE], turns["control"], strict=True)
    return [a.per_sample_ms / b.per_sample_ms for a, b in pairs]


def planned(
    blocks: int,
    narrow: float,
    alphas: Callable[[int, bool], float],
    alike: Callable[[list[float]], float],
) -> Callable[..., Known]:
    looks = [*(n for n in StoppingRule(narrow, 1).looks if n < blocks), blocks]
    plan = [(n, alphas(n, n == blocks)) for n in looks]

    def known(found: list[float]) -> Known:
        low, high = -math.inf, math.inf
        for n, alpha in plan:
            logs = np.log(found[:n]).tolist()
            low, high = median_interval(logs, alpha, alike(logs))
            if high - low <= 2 * math.log1p(narrow):
                break
        return math.exp(low), math.exp(high), n

    return known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--narrow", type=float, default=0.02)
    parser.add_argument("--blocks", type=int, default=96)
    arguments = parser.parse_args()
    draw, spending = np.random.default_rng(0), Spending()
    ways = [
        planned(
            arguments.blocks,
            arguments.narrow,
            lambda n, last: spending.interim_alpha(n, 1.0 if last else 1 / 6),
            lag1_rank_autocorrelation,
        ),
        planned(arguments.blocks, arguments.narrow, lambda n, last: 0.05, lambda logs: 0.0),
        lambda found: bootstrap_until_narrow(found, arguments.narrow, draw),
    ]
    print("| noise | truth | ours | plain 95 % | bootstrap |\n|---|---|---|---|---|")
    for name, noise in {**NOISES, **UNLIKE, **PROCESSES}.items():
        truth = (
            float(np.median(ratios(noise, 10**6, min(20_000, 200 * arguments.runs))))
            if name in UNLIKE
            else 1.0
        )
        series = [ratios(noise, seed, arguments.blocks) for seed in range(arguments.runs)]
        cells = []
        for way in ways:
            found = np.array([way(one) for one in series])
            held = np.mean((found[:, 0] <= truth) & (truth <= found[:, 1]))
            cells.append(f"{held:.1%}, {found[:, 2].mean():.0f} blocks")
        print(f"| {name} | {truth:.3f} | {' | '.join(cells)} |", flush=True)
    print("\n| noise | one arm | any of four |\n|---|---|---|")
    rule = StoppingRule(arguments.narrow, 60)
    for name, noise in {**NOISES, **PROCESSES}.items():
        shares = [f"{claimed(noise, rule, arguments.runs, arms):.1%}" for arms in (1, 4)]
        print(f"| {name} | {' | '.join(shares)} |", flush=True)


if __name__ == "__main__":
    main()
