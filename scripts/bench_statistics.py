"""How often the interval of a benchmark holds the truth, on simulated machines.

    python scripts/bench_statistics.py [--runs 1000] [--narrow 0.02] [--blocks 96] [--processes 5]
        [--only 'process to process']

For each kind of noise, two arms that are equally fast and four ways to know: the benchmark's own
(`run_blocks`: several processes of each arm, a t interval over them that is never narrower than the
blocks' order statistics), the same with one process of each, the same looks at plain 95 % intervals
of one process each, and a bootstrap of the median after each block; each stops as soon as its
interval is narrow. The table has the share of runs whose last interval holds a ratio of 1, and how
many blocks it took. In some rows the arms differ: one suffers more stalls than the other, so that
the usual ratio is not 1, and the truth is the median of very many blocks (first column). In the
last rows processes differ, each from the next.

The second table is of what is said in the end: how often an arm that is as fast as the reference
is claimed to be faster or slower, beside a control, one minute of measuring and starting processes;
with one process of each arm before, and with several.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runner.measure.benchmark.blocks import INTERIM_BLOCKS, StoppingRule  # noqa: E402
from runner.measure.benchmark.statistics import median_interval  # noqa: E402
from tests.measure.benchmark.simulated_machine import (
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
    rule = StoppingRule(1e-9, 1e9, interim_blocks=(blocks,))
    turns = measure(noise, seed, rule, {BASE: 1.0, "control": 1.0}).turns
    pairs = zip(turns[BASE], turns["control"], strict=True)
    return [a.per_sample_ms / b.per_sample_ms for a, b in pairs]


def plain_until_narrow(ratios: list[float], narrow: float) -> Known:
    """The benchmark's looks, each at 95 %, as if it were the only one."""
    looks = [*(n for n in StoppingRule(narrow, 1).interim_blocks if n < len(ratios)), len(ratios)]
    low, high = -math.inf, math.inf
    for count in looks:
        low, high = median_interval(np.log(ratios[:count]).tolist(), 0.05)
        if high - low <= 2 * math.log1p(narrow):
            break
    return math.exp(low), math.exp(high), count


def measured(noise: Noise, seed: int, rule: StoppingRule) -> Known:
    """The benchmark's own interval, and its blocks."""
    result = measure(noise, seed, rule, {BASE: 1.0, "control": 1.0})
    estimate = result.estimates["control"]
    return estimate.low, estimate.high, result.blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--narrow", type=float, default=0.02)
    parser.add_argument("--blocks", type=int, default=96)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    arguments = parser.parse_args()
    draw, narrow, runs = np.random.default_rng(0), arguments.narrow, arguments.runs
    looks = (*(n for n in INTERIM_BLOCKS if n < arguments.blocks), arguments.blocks)
    rule = StoppingRule(narrow, 120, interim_blocks=looks)
    several = replace(rule, processes=arguments.processes)
    print("| noise | truth | ours | one process | plain 95 % | bootstrap |")
    print("|---|---|---|---|---|---|")
    rows = {n: x for n, x in {**NOISES, **UNLIKE, **PROCESSES}.items() if arguments.only in n}
    for name, noise in rows.items():
        truth = (
            float(np.median(ratios(noise, 10**6, min(20_000, 200 * runs))))
            if name in UNLIKE
            else 1.0
        )
        series = [ratios(noise, seed, arguments.blocks) for seed in range(runs)]
        ways = [
            [measured(noise, seed, several) for seed in range(runs)],
            [measured(noise, seed, rule) for seed in range(runs)],
            [plain_until_narrow(one, narrow) for one in series],
            [bootstrap_until_narrow(one, narrow, draw) for one in series],
        ]
        cells = []
        for way in map(np.array, ways):
            held = np.mean((way[:, 0] <= truth) & (truth <= way[:, 1]))
            cells.append(f"{held:.1%}, {way[:, 2].mean():.0f} blocks")
        print(f"| {name} | {truth:.3f} | {' | '.join(cells)} |", flush=True)
    print("\n| noise | one arm, one process | one arm | any of four |\n|---|---|---|---|")
    rule = StoppingRule(narrow, 60)
    several = replace(rule, processes=arguments.processes)
    for name, noise in ((n, x) for n, x in rows.items() if n not in UNLIKE):
        ways = [(rule, 1), (several, 1), (several, 4)]
        shares = [f"{claimed(noise, how, runs, arms):.1%}" for how, arms in ways]
        print(f"| {name} | {' | '.join(shares)} |", flush=True)


if __name__ == "__main__":
    main()
