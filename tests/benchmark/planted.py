"""A crew whose times are planted: the clock goes only when a process works."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from runner.benchmark.blocks import ArmEnded, Turn
from runner.benchmark.workers.messages import Finished, Ready

SAMPLES = 32


@dataclass
class PlantedPool:
    """Steps take what `factor` says of each name, as a share of those of `none`, with noise."""

    factors: Mapping[str, float]
    none_ms: float = 100.0
    noise: float = 0.01
    setups: Mapping[str, float] = field(default_factory=dict)  # seconds, of the first steps
    peaks: Mapping[str, int] = field(default_factory=dict)
    ended: Mapping[str, ArmEnded] = field(default_factory=dict)  # by name: at the start
    seed: int = 0
    now: float = 0.0
    alive: set[str] = field(default_factory=set)
    most_alive: int = 0
    started: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def clock(self) -> float:
        return self.now

    def ms(self, name: str) -> float:
        return self.none_ms * self.factors.get(name, 1.0)

    def start(self, name: str, within_s: float | None = None) -> Ready:
        self.started.append(name)
        if name in self.ended:
            raise self.ended[name]
        setup = self.setups.get(name, 1.0)
        if within_s is not None and 2.0 + setup > within_s:
            self.now += within_s
            raise ArmEnded("timeout", f"it was not done within {within_s:g} s")
        self.now += 2.0 + setup
        self.alive.add(name)
        self.most_alive = max(self.most_alive, len(self.alive))
        return Ready(SAMPLES, 2.0, setup, self.ms(name))

    def turn(self, name: str, seconds: float) -> Turn:
        assert name in self.alive
        ms = self.ms(name) * self.random.lognormvariate(0, self.noise)
        steps = max(3, int(1e3 * seconds / ms))
        self.now += 1e-3 * ms * steps
        return Turn(steps, steps * SAMPLES, 1e-3 * ms * steps, ms, ms / SAMPLES)

    def finish(self, name: str) -> Finished:
        self.alive.discard(name)
        memory = {"peak_process_bytes": self.peaks.get(name, 10**9), "peak_device_bytes": 0}
        return Finished({"memory": memory, "techniques": []}, [], [], {})

    def end(self, name: str) -> None:
        self.alive.discard(name)
