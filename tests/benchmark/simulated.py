"""Arms that take planned times: effects that multiply, interactions, noise, a clock to match."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

from runner.benchmark.arms import Arm
from runner.benchmark.blocks import ArmEnded, Turn
from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.workers.messages import Finished, Ready

PLAIN_MS = 10.0
MIB = 2**20


@dataclass
class World:
    """What is true of it; `attribute` has to find it out."""

    speedups: Mapping[str, float]  # of each technique alone
    together: Mapping[tuple[str, str], float] = field(default_factory=dict)  # more, for both
    noise: float = 0.02
    layout: float = 0.0  # that each process differs by from the next, for good
    mib: Mapping[str, float] = field(default_factory=dict)  # that each adds to the peak
    holds: Callable[[str, set[str]], str] = lambda name, on: ""  # why it does not, or ""
    dies: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # arms: status and reason
    dies_after: int = 3  # turns
    seed: int = 0
    now: float = 0.0
    most_alive: int = 0
    started: list[str] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def crew(
        self,
        arms: Sequence[Arm],
        settings: BenchmarkConfig,
        folder: Path | None,
        given: Any = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> Any:
        return Simulation(self, arms)

    def engaged(self, arm: Arm) -> set[str]:
        on = {name for name, technique in arm.config.optimization.techniques() if technique.enabled}
        return {name for name in on if not self.holds(name, on)}

    def speedup(self, on: set[str]) -> float:
        pairs = combinations(sorted(on), 2)
        return prod(self.speedups.get(name, 1.0) for name in on) * prod(
            self.together.get(pair, 1.0) for pair in pairs
        )


class Simulation:
    """In place of `WorkerPool`."""

    def __init__(self, world: World, arms: Sequence[Arm]) -> None:
        self.world, self.arms = world, {arm.name: arm for arm in arms}
        self.turns = dict.fromkeys(self.arms, 0)
        self.alive: set[str] = set()
        self.noise = random.Random(f"{world.seed} {' '.join(self.arms)}")
        lot = random.Random(f"layout {world.seed} {' '.join(self.arms)}")
        self.layout = {name: lot.lognormvariate(0.0, world.layout) for name in self.arms}

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *error: object) -> None:
        self.alive.clear()

    def start(self, name: str) -> Ready:
        self.world.started.append(name)
        self.alive.add(name)
        self.world.most_alive = max(self.world.most_alive, len(self.alive))
        self.world.now += 5.0  # which is not measuring
        return Ready(32, 5.0, 0.1, PLAIN_MS)

    def turn(self, name: str, seconds: float) -> Turn:
        if name in self.world.dies and self.turns[name] >= self.world.dies_after:
            self.alive.discard(name)
            raise ArmEnded(*self.world.dies[name])
        self.turns[name] += 1
        drift = 1 + 0.3 * (self.world.now % 100 > 50)  # of the machine, half of the time
        ms = PLAIN_MS * drift / self.world.speedup(self.world.engaged(self.arms[name]))
        ms *= self.layout[name] * self.noise.lognormvariate(0.0, self.world.noise)
        self.world.now += seconds
        steps = max(3, int(seconds * 1000 / ms))
        return Turn(steps, 32 * steps, seconds, ms, ms / 32)

    def finish(self, name: str) -> Finished:
        self.alive.discard(name)
        arm, engaged = self.arms[name], self.world.engaged(self.arms[name])
        on = {n for n, technique in arm.config.optimization.techniques() if technique.enabled}
        rows = [
            {"name": n, "requested": n in on, "engaged": n in engaged,
             "reason": self.world.holds(n, on) if n in on else "not asked for", "evidence": {}}
            for n, _ in arm.config.optimization.techniques()
        ]  # fmt: skip
        peak = int((500 + sum(self.world.mib.get(n, 0.0) for n in engaged)) * MIB)
        summary = {
            "techniques": rows, "choices": [],
            "memory": {"peak_process_bytes": peak, "peak_device_bytes": 0},
        }  # fmt: skip
        return Finished(summary, [1.0], [], {})

    def end(self, name: str) -> None:
        self.alive.discard(name)
