"""A machine that exists in numbers only: what a benchmark should find is known beforehand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from runner.core.errors import WorkerFailure
from runner.measure.benchmark.blocks import Measurements, StoppingRule, Turn, run_blocks
from runner.measure.benchmark.statistics import bonferroni_alpha, classify_ratio, noise_floor

Floats = NDArray[np.float64]
BASE = "none"
EFFECTS = {BASE: 1.0, "control": 1.0, "small": 1.02, "large": 1.3}  # how much faster each arm is


def lognormal(draw: np.random.Generator, size: tuple[int, ...]) -> Floats:
    return draw.standard_normal(size)


def heavy(draw: np.random.Generator, size: tuple[int, ...]) -> Floats:
    """Student's t with 2 degrees: its variance is infinite."""
    return draw.standard_t(2, size)


def skewed(draw: np.random.Generator, size: tuple[int, ...]) -> Floats:
    """Never below the best case, often a little above, at times far above."""
    return draw.exponential(1.0, size) - math.log(2)


@dataclass(frozen=True)
class Noise:
    """How the times of an arm's turns scatter; of each arm the same unless it is named."""

    jitter: float = 0.02
    kind: Callable[[np.random.Generator, tuple[int, ...]], Floats] = lognormal
    stalls: float = 0.05  # share of turns (steps, where a turn has several) 3 to 10 times slower
    drift: float = 0.005  # of the machine, from turn to turn: a random walk
    spells: float = 0.0  # chance of each turn that a neighbour comes or goes who halves the speed
    steps: int = 1  # of a turn, whose median counts
    processes: float = 0.0  # how a process differs from the next one, as long as it lives
    memory: float = 0.0  # correlation of an arm's jitter in a turn with that of the turn before
    jitters: Mapping[str, float] = field(default_factory=dict)
    stalled: Mapping[str, float] = field(default_factory=dict)


NOISES = {
    "lognormal 1 %": Noise(0.01),
    "lognormal 2 %, no stalls": Noise(0.02, stalls=0.0),
    "lognormal 5 %": Noise(0.05),
    "heavy-tailed 2 %": Noise(0.02, heavy),
    "skewed 3 %": Noise(0.03, skewed),
    "arms scatter unlike": Noise(0.01, jitters={"control": 0.03, "small": 0.04, "large": 0.002}),
    "a neighbour comes and goes": Noise(0.01, spells=0.1),
    "15 steps a turn, 10 % of them stalled": Noise(0.05, skewed, stalls=0.1, steps=15),
    "each turn resembles the last (0.5)": Noise(0.02, stalls=0.0, memory=0.5),
}
START_S = 1.0  # that an arm takes to start again
PROCESSES = {  # what no interval of one process each covers
    "0.5 % from process to process": Noise(0.005, stalls=0.0, processes=0.005),
    "1 % from process to process": Noise(0.01, stalls=0.0, processes=0.01),
    "2 % from process to process": Noise(0.02, stalls=0.0, processes=0.02),
}


class Machine:
    """Gives turns of known speed; its clock is how long they took."""

    def __init__(self, noise: Noise, effects: Mapping[str, float], seed: int) -> None:
        self.noise, self.effects = noise, effects
        self.draw = np.random.default_rng(seed)
        self.draw_processes = np.random.default_rng([seed, 1])
        self.own: dict[str, float] = {}
        self.start(list(effects))
        self.jitter = dict.fromkeys(effects, 0.0)  # of the last turn
        self.now = 0.0
        self.times: dict[str, list[float]] = {name: [] for name in effects}
        self.order: list[str] = []
        self.walk: list[float] = []
        self.level, self.busy = 0.0, 0

    def clock(self) -> float:
        return self.now

    def start(self, names: Sequence[str]) -> None:
        own = self.draw_processes.normal(0, self.noise.processes, len(names))
        self.own |= dict(zip(names, np.exp(own), strict=True))

    def relaunch(self, names: Sequence[str], within_s: float) -> dict[str, WorkerFailure]:
        """New processes, which differ from the last ones."""
        self.now += min(START_S * len(names), within_s)
        if START_S * len(names) > within_s:
            raise TimeoutError
        self.start(names)
        return {}

    def turn(self, name: str, seconds: float) -> Turn:
        if not self.times[name]:
            self.times[name] = self._times(name, 128)[::-1]
        if not self.walk:
            walk = self.level + np.cumsum(self.draw.normal(0, self.noise.drift, 512))
            switched = self.busy + np.cumsum(self.draw.random(512) < self.noise.spells)
            self.level, self.busy = float(walk[-1]), int(switched[-1] % 2)
            self.walk = (np.exp(walk) * (1 + switched % 2))[::-1].tolist()
        time = self.own[name] * self.times[name].pop() * self.walk.pop()
        self.order.append(name)
        step = 0.01 * time  # s
        count = max(1, math.ceil(seconds / step))
        self.now += count * step
        return Turn(count, count, count * step, step * 1e3, step * 1e3)

    def _jitter(self, name: str, size: tuple[int, ...]) -> Floats:
        jitter, memory = self.noise.kind(self.draw, size), self.noise.memory
        if memory:
            for turn in jitter:
                turn *= math.sqrt(1 - memory**2)
                turn += memory * self.jitter[name]
                self.jitter[name] = float(turn[-1])
        return jitter

    def _times(self, name: str, turns: int) -> list[float]:
        noise, size = self.noise, (turns, self.noise.steps)
        times = np.exp(self._jitter(name, size) * noise.jitters.get(name, noise.jitter))
        stalled = self.draw.random(size) < noise.stalled.get(name, noise.stalls)
        times *= np.where(stalled, self.draw.uniform(3, 10, size), 1.0)
        return (np.median(times, axis=1) / self.effects[name]).tolist()  # type: ignore[no-any-return]


def measure(
    noise: Noise,
    seed: int,
    rule: StoppingRule,
    effects: Mapping[str, float] = EFFECTS,
) -> Measurements:
    machine = Machine(noise, effects, seed)
    rule = replace(rule, restart_s=START_S * len(effects))
    names, how = list(effects), {"relaunch": machine.relaunch}
    return run_blocks(machine.turn, names, BASE, rule, 0.25, seed, machine.clock, **how)


def coverage(noise: Noise, rule: StoppingRule, runs: int = 1000) -> tuple[dict[str, float], float]:
    """Of each arm, the share of runs whose last interval holds the truth; and the mean blocks."""
    covered, blocks = dict.fromkeys([n for n in EFFECTS if n != BASE], 0), 0
    for seed in range(runs):
        measured = measure(noise, seed, rule)
        blocks += measured.blocks
        for name, estimate in measured.estimates.items():
            covered[name] += estimate.low <= EFFECTS[name] <= estimate.high
    return {name: count / runs for name, count in covered.items()}, blocks / runs


def claimed(noise: Noise, rule: StoppingRule, runs: int = 1000, arms: int = 1) -> float:
    """The share of runs in which an arm equal to the reference is said to be faster or slower.

    Of several such arms: any of them, with the intervals that a benchmark of so many has.
    """
    rule = replace(rule, alpha=bonferroni_alpha(arms))
    names = [f"again {number}" for number in range(arms)]
    effects, count = dict.fromkeys([BASE, "control", *names], 1.0), 0
    for seed in range(runs):
        estimates = measure(noise, seed, rule, effects).estimates
        floor = noise_floor(estimates["control"])
        count += any(
            classify_ratio(estimates[name], floor) in ("faster", "slower") for name in names
        )
    return count / runs
